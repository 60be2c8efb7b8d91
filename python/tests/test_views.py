"""Views of stored tensors. A write to a view is private to that view."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tssd
from processes import Daemon

torch = pytest.importorskip("torch")

SIZE = 1 << 20


@pytest.fixture(params=["directory", "daemon"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "directory":
        yield str(tmp_path / "store")
    else:
        with Daemon(tmp_path / "socket") as url:
            yield url


def test_write_to_view_is_private(url: str) -> None:
    store, other = tssd.Store(url), tssd.Store(url)
    store.put_state_dict({"w": torch.ones(SIZE), "b": torch.ones(3)}, "policy")
    view, other_view = store.get_state_dict("policy"), other.get_state_dict("policy")
    second_view = store.get_state_dict("policy")
    view["w"][SIZE // 2 :] = 5
    view["b"] += 1
    for seen in (other_view, second_view, store.get_state_dict("policy", copy=True), other.get_state_dict("policy")):
        assert (seen["w"] == 1).all() and (seen["b"] == 1).all()
    assert (view["w"][: SIZE // 2] == 1).all() and (view["w"][SIZE // 2 :] == 5).all()


def test_next_view_does_not_show_earlier_writes(url: str) -> None:
    store = tssd.Store(url)
    for step in range(8):
        store.put_state_dict({"w": torch.full((SIZE,), step), "b": torch.full((3,), step)}, "policy")
        for _ in range(4):
            got = store.get_state_dict("policy")
            assert (got["w"] == step).all() and (got["b"] == step).all()
            got["w"][::1000] = -1
            got["b"].zero_()
            del got
            # A background thread returns the mapping to the pool.
            time.sleep(0.02)


def test_views_of_one_storage_are_tied_and_strided(url: str) -> None:
    store = tssd.Store(url)
    base = torch.arange(12.0).reshape(3, 4)
    store.put_state_dict({"w": base, "t": base.T, "half": base[1:, ::2], "grad": base.clone().requires_grad_()}, "k")
    got = store.get_state_dict("k")
    assert torch.equal(got["t"], base.T) and got["t"].stride() == base.T.stride()
    assert torch.equal(got["half"], base[1:, ::2]) and got["grad"].requires_grad
    got["w"][1, 0] = 100
    assert got["t"][0, 1] == 100 and got["half"][0, 0] == 100


def test_slice_inside_one_stored_slice_is_a_view(url: str) -> None:
    store = tssd.Store(url)
    # A small archive is copied, and not mapped.
    whole = torch.arange(2.0**20).reshape(1024, 1024)
    halves = [tssd.TensorSlice([row, 0], None, [1024, 1024], [512, 1024], []) for row in (0, 512)]
    for writer, part in enumerate(halves):
        shard = tssd.TensorShard(whole[512 * writer : 512 * writer + 512], part)
        store.put_state_dict({"w": shard}, "k", version=1, writers=2, writer=writer, job="j")
    box = tssd.TensorSlice([515, 2], None, [1024, 1024], [2, 3], [])
    got = store.get("k", fqn="w", tensor_slice=box)
    assert torch.equal(got, whole[515:517, 2:5]) and got.stride() == (1024, 1)
    across = tssd.TensorSlice([511, 2], None, [1024, 1024], [2, 3], [])
    got = store.get("k", fqn="w", tensor_slice=across)
    assert torch.equal(got, whole[511:513, 2:5]) and got.stride() == (3, 1)
    got, report = store.get_state_dict("k", return_report=True)
    assert torch.equal(got["w"], whole) and report.bytes_viewed == 0


def test_view_outlives_store_key_and_daemon(tmp_path: Path) -> None:
    with Daemon(tmp_path / "socket") as url:
        store = tssd.Store(url)
        store.put_state_dict({"w": torch.ones(SIZE)}, "k")
        view = store.get_state_dict("k")["w"]
        store.delete("k")
        store.close()
        del store
        gc.collect()
        other = tssd.Store(url)
        for step in range(4):
            other.put_state_dict({"w": torch.full((SIZE,), 2.0 + step)}, "k")
        assert (view == 1).all()
    assert (view == 1).all()
    view += 1
    assert (view == 2).all()


def test_forked_child_reads_views_and_opens_its_own_connection(url: str) -> None:
    store = tssd.Store(url)
    store.put_state_dict({"w": torch.ones(SIZE)}, "k")
    view = store.get_state_dict("k")["w"]
    child = os.fork()
    if child == 0:
        try:
            # The threads of torch do not exist in the child.
            torch.set_num_threads(1)
            view += 1
            assert (view == 2).all() and (store.get_state_dict("k")["w"] == 1).all()
            store.put_state_dict({"w": torch.zeros(3)}, "child")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert (view == 1).all() and store.exists("child")


def test_write_in_another_process_is_private(url: str) -> None:
    store = tssd.Store(url)
    store.put_state_dict({"w": torch.ones(SIZE)}, "k")
    view = store.get_state_dict("k")["w"]
    script = "import pickle, sys; store = pickle.loads(bytes.fromhex(sys.argv[1])); store.get_state_dict('k')['w'].zero_()"
    subprocess.run([sys.executable, "-c", script, pickle.dumps(store).hex()], check=True)
    assert (view == 1).all() and (store.get_state_dict("k")["w"] == 1).all()


def test_numpy_views_are_read_only(url: str) -> None:
    store = tssd.Store(url)
    store.put_state_dict({"a": np.ones(SIZE)}, "k")
    view = store.get_state_dict("k")["a"]
    with pytest.raises(ValueError):
        view[0] = 2
    with pytest.raises(ValueError):
        view.setflags(write=True)
