"""Stores: put and got, whole and in place; who is not there, what does not fit, who waits."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tssd
from same import same


@pytest.fixture(params=["memory", "directory", "daemon"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tssd.Store]:
    if request.param == "memory":
        yield tssd.Store("memory:")
    elif request.param == "directory":
        yield tssd.Store(str(tmp_path / "store"))
    else:
        with daemon(tmp_path / "socket") as url:
            yield tssd.Store(url)


class daemon:
    """A daemon, by the command that the tests have."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def __enter__(self) -> str:
        command = os.environ.get("TSSD_BIN", "tssd")
        arguments = [command, "serve", "--socket", str(self.socket), "--memory-limit", "1GB"]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "serving" in self.process.stdout.readline()
        return f"unix:{self.socket}"

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(timeout=20) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


def state(step: int) -> dict[str, Any]:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4) + step
    return {
        "model": OrderedDict(weight=weight, tied=weight, bias=np.full(3, step, np.float64)),
        "optimizer": {0: {"step": step, "lr": 0.1}, 1: (None, "x" * 5000, b"bytes")},
        "empty": np.zeros((0, 3), np.int8),
    }


def test_what_is_put_is_got(store: tssd.Store) -> None:
    for step in (1, 2):
        put = store.put_state_dict(state(step), "policy", metadata={"run": "7"})
        assert isinstance(put, tssd.PutReport)
        assert (put.version, put.visible, put.missing) == (step, True, [])
        got, report = store.get_state_dict("policy", return_report=True)
        assert isinstance(report, tssd.GetReport) and report.version == step and report.id == put.id
        assert report.transport == put.transport
        assert list(got) == list(state(step))
        for key in ("weight", "tied", "bias"):
            assert np.array_equal(np.asarray(got["model"][key]), state(step)["model"][key])
        assert got["optimizer"] == state(step)["optimizer"]
    assert store.keys() == ["policy"] and store.keys("x") == []
    assert [int(each) for each in store.versions("policy")] == [2]
    head = store.head("policy")
    assert head is not None and head.writers == [0] and head.version == 2
    assert store.exists("policy") and store.exists("policy", 2) and not store.exists("policy", 1)
    assert store.head("nothing") is None
    assert store.pin("policy", "best") == 2 and store.pins("policy") == {"best": 2}
    store.unpin("policy", "best")
    assert store.delete("policy") == 1 and store.delete("policy") == 0


def test_single_values_come_back(store: tssd.Store) -> None:
    array = np.arange(10, dtype=np.int64).reshape(2, 5)
    store.put("array", array)
    assert np.array_equal(np.asarray(store.get("array")), array)
    store.put("number", 7)
    assert store.get("number") == 7
    store.put_state_dict({"a": {"b": array}, "c": "text"}, "dict")
    assert np.array_equal(np.asarray(store.get("dict", fqn="a.b")), array)
    assert store.get("dict", fqn="c") == "text"
    part = tssd.TensorSlice([0, 1], None, [2, 5], [2, 3], [])
    got = store.get("dict", fqn="a.b", tensor_slice=part)
    assert np.array_equal(np.asarray(got), array[:, 1:4])
    into = np.zeros((2, 5), np.int64)
    assert store.get("dict", into, fqn="a.b") is into and np.array_equal(into, array)


def test_arrays_are_filled_in_place(store: tssd.Store) -> None:
    store.put_state_dict(state(3), "policy")
    fused = np.zeros((3, 8), np.float32)
    tied = fused[:, :4]
    into = {"model": {"weight": tied, "tied": tied, "bias": np.zeros(3)}, "empty": np.zeros((0, 3), np.int8)}
    got, report = store.get_state_dict("policy", into, return_report=True)
    assert got is into
    assert np.array_equal(tied, state(3)["model"]["weight"]) and not fused[:, 4:].any()
    assert report.bytes_needed == report.bytes_transferred
    # Shards of both halves, in whatever sharding it was put.
    rows = [np.zeros((2, 4), np.float32), np.zeros((1, 4), np.float32)]
    for offset, local in zip((0, 2), rows):
        shard = tssd.TensorShard(local, tssd.TensorSlice([offset, 0], None, [3, 4], list(local.shape), []))
        store.get_state_dict("policy", {"model": {"weight": shard}}, strict=False)
    assert np.array_equal(np.concatenate(rows), state(3)["model"]["weight"])


def test_what_does_not_fit_is_said_before_anything_is_written(store: tssd.Store) -> None:
    store.put_state_dict(state(3), "policy")
    good = np.full((3, 4), 9, np.float32)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model": {"weight": good}}, ValueError, "strict=False"),
        ({"model": {"weight": good, "nothing": good.copy()}}, KeyError, "nothing"),
        ({"model": {"weight": good, "bias": np.zeros(4)}}, ValueError, "bias"),
        ({"model": {"weight": good, "bias": np.zeros(3, np.float32)}}, TypeError, "bias"),
    ]
    for into, error, says in cases:
        with pytest.raises(error, match=says) as caught:
            store.get_state_dict("policy", into, strict=len(into["model"]) == 1)
        assert isinstance(caught.value, tssd.TssdError)
        assert (good == 9).all()
    frozen = np.zeros((3, 4), np.float32)
    frozen.setflags(write=False)
    with pytest.raises(TypeError, match="read-only"):
        store.get_state_dict("policy", {"model": {"weight": frozen}}, strict=False)


def test_errors_have_classes_and_say_what_to_do(store: tssd.Store) -> None:
    with pytest.raises(KeyError) as missing:
        store.get_state_dict("nothing")
    assert isinstance(missing.value, tssd.TssdKeyError) and missing.value.key == "nothing"
    with pytest.raises(TypeError, match="put_state_dict\\(state_dict, key\\)"):
        store.put_state_dict("policy", {"a": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError) as opaque:
        store.put_state_dict({"a": {"b": object()}}, "policy")
    assert isinstance(opaque.value, tssd.TssdTypeError) and opaque.value.fqn == "a.b"
    for wrong in ({"divergent": "x"}, {"replicas": "x"}, {"durability": "x"}, {"require": "x"}, {"timeout": -1.0}):
        with pytest.raises(ValueError):
            store.put_state_dict({}, "policy", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tls is required"):
        store.put_state_dict({}, "policy", require="tls")
    store.put_state_dict({}, "policy", version=5)
    with pytest.raises(ValueError, match="rewind"):
        store.put_state_dict({"a": 1}, "policy", version=4)
    assert store.put_state_dict({"a": 1}, "policy", version=4, rewind=True).epoch == 1
    with pytest.raises(ConnectionError):
        tssd.Store("tcp://127.0.0.1:9")
    with pytest.raises(ValueError, match="together"):
        tssd.Store("memory:", ca="ca.pem")


def test_several_writers_make_one_version(store: tssd.Store) -> None:
    whole = np.arange(20, dtype=np.float32).reshape(5, 4)
    for writer, (start, stop) in enumerate([(0, 3), (3, 5)]):
        slice_ = tssd.TensorSlice([start, 0], None, [5, 4], [stop - start, 4], [])
        shard = tssd.TensorShard(whole[start:stop], slice_)
        put = store.put_state_dict({"w": shard}, "policy", version=1, writer=writer, writers=2, job="run")
        assert put.visible == (writer == 1) and put.missing == [1][writer:]
    got = store.get_state_dict("policy")["w"]
    assert np.array_equal(np.asarray(got), whole)


def test_waiting_ends(store: tssd.Store) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        store.wait_for_version("policy", 1, timeout=0.2)
    assert time.monotonic() - started < 10
    threading.Timer(0.2, lambda: store.put_state_dict({"a": 1}, "policy", version=7)).start()
    assert int(store.wait_for_version("policy", 3, timeout=20)) == 7
    pending = store.put_state_dict({"a": np.ones(1000)}, "later", wait=False)
    assert isinstance(pending, tssd.PendingPut)
    assert pending.result(timeout=20).visible and pending.result().visible


def test_ctrl_c_ends_a_wait(store: tssd.Store) -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        store.wait_for_version("policy", 1, timeout=60)
    assert time.monotonic() - started < 30
    store.put("policy", 1)
    assert store.get("policy") == 1


def test_what_was_got_is_the_callers_own(store: tssd.Store) -> None:
    array = np.arange(4096, dtype=np.float64)
    store.put("array", array)
    first = store.get("array")
    for step in range(3):
        store.put("array", array + step)
    if hasattr(first, "add_"):
        first.add_(1)
        assert first[0] == 1
    else:
        assert np.array_equal(first, array)
    assert np.asarray(store.get("array"))[0] == 2


def test_a_version_is_put_and_read_tensor_by_tensor(store: tssd.Store) -> None:
    def tensor(number: int) -> Any:
        return np.full((100, 100), number, np.float32)

    with store.publish("policy", version=3, bucket_bytes=50_000, metadata={"step": 3}) as publisher:
        for number in range(5):
            publisher.put(f"layers.{number}.weight", tensor(number))
        publisher.put("epoch", 7)
        publisher.flush()
        assert not store.exists("policy")
    assert publisher.report is not None and publisher.report.visible
    with pytest.raises(RuntimeError, match="stop"):
        with store.publish("policy") as failing:
            failing.put("a", tensor(1))
            raise RuntimeError("stop")
    assert store.head("policy") is not None and int(store.head("policy") or 0) == 3
    with pytest.raises(ValueError, match="finished"):
        failing.put("b", tensor(1))
    opened = store.open("policy")
    store.put_state_dict({"other": 1}, "policy")
    with opened as version:
        assert (int(version), len(version), version.metadata()) == (3, 5, {"step": 3})
        assert version.keys() == [f"layers.{number}.weight" for number in range(5)]
        for number, (name, value) in enumerate(version.items()):
            assert name == version.keys()[number] and np.array_equal(np.asarray(value), tensor(number))
        part = tssd.TensorSlice([1, 2], None, [100, 100], [3, 4], [])
        assert np.asarray(version.get_tensor("layers.2.weight", part)).shape == (3, 4)
        with pytest.raises(KeyError):
            version.get_tensor("nothing")
    with pytest.raises(ValueError, match="closed"):
        version.get_tensor("layers.2.weight")


def test_versions_come_one_after_the_other(store: tssd.Store) -> None:
    subscription = store.subscribe("policy")
    for step in (1, 2, 5):
        store.put_state_dict({"a": step}, "policy", version=step)
        assert int(next(subscription)) == step
    subscription.close()
    assert list(subscription) == []


def test_a_store_is_pickled_and_forked(tmp_path: Path) -> None:
    store = tssd.Store(str(tmp_path / "store"))
    store.put("x", 3)
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url and again.get("x") == 3
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            os._exit(0 if store.get("x") == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with store:
        assert store.get("x") == 3
    assert store.get("x") == 3 and same(repr(store), f"Store({store.url!r})")
