"""Staging: a version is on the host, verified, before the caller's tensors are written."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tssd
import tssd.aio
from processes import Daemon
from tssd.mapping import Mapping, fuse, shard

ROWS = 2000
# More than a chunk, so that parts of it are parts of chunks.
COLUMNS = 1500


def make_state(step: int) -> dict[str, Any]:
    weight = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + step
    return {"q": weight, "k": weight[::-1].copy(), "bias": np.full(7, step, np.float64), "step": step}


@pytest.fixture(params=["memory", "directory", "daemon", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tssd.Store]:
    if request.param == "memory":
        yield tssd.Store("memory:")
    elif request.param == "directory":
        yield tssd.Store(str(tmp_path / "store"))
    else:
        server = Daemon(tmp_path / "socket", *(["--listen", "127.0.0.1:0"] if request.param == "tcp" else []))
        with server as url:
            yield tssd.Store(server.startup_line.split()[-1] if request.param == "tcp" else url)


def is_remote(store: tssd.Store) -> bool:
    return store.url.startswith("tcp:")


def make_into() -> dict[str, Any]:
    """Returns tensors of the second of two tensor-parallel ranks."""
    return {
        "qk": np.zeros((ROWS, COLUMNS), np.float32),
        "columns": np.zeros((ROWS, COLUMNS // 2), np.float32),
        "bias": np.zeros(7, np.float64),
        "step": None,
    }


MAPPING = Mapping({"qk": fuse(shard("q", 0, 1, 2), shard("k", 0, 1, 2)), "columns": shard("q", 1, 1, 2)})


def assert_has_step(into: dict[str, Any], step: int) -> None:
    state = make_state(step)
    np.testing.assert_array_equal(into["qk"], np.concatenate([state["q"][ROWS // 2 :], state["k"][ROWS // 2 :]]))
    np.testing.assert_array_equal(into["columns"], state["q"][:, COLUMNS // 2 :])
    np.testing.assert_array_equal(into["bias"], state["bias"])
    assert into["step"] == step


def test_tensors_are_written_by_the_commit_only(store: tssd.Store) -> None:
    store.put_state_dict(make_state(1), "policy")
    into = make_into()
    needed = sum(array.nbytes for array in into.values() if array is not None)
    with store.stage("policy", into, mapping=MAPPING) as staged:
        assert (staged.key, staged.version, int(staged), staged.epoch) == ("policy", 1, 1, 0)
        assert repr(staged) == "StagedVersion('policy', version 1)"
        report = staged.report
        assert report.bytes_needed == needed and report.id == staged.id
        # Exactly the bytes that the tensors need come over a connection.
        assert report.bytes_transferred == (needed if is_remote(store) else 0)
        assert report.bytes_received == (needed if is_remote(store) else 0)
        assert report.bytes_verified >= needed * 3 // 4
        assert not any(array.any() for array in into.values() if array is not None)
        assert into["step"] is None

        # Later versions and deletions do not disturb it.
        store.put_state_dict(make_state(2), "policy")
        store.delete("policy")
        commit = staged.commit()
        assert isinstance(commit, tssd.CommitReport)
        assert (commit.version, commit.bytes) == (1, needed) and commit.seconds > 0
        assert_has_step(into, 1)

        # It can be repeated.
        for array in (into["qk"], into["columns"], into["bias"]):
            array[...] = -1
        staged.commit()
        assert_has_step(into, 1)
    assert repr(staged) == "StagedVersion('policy', version 1, closed)"
    with pytest.raises(ValueError, match="closed"):
        staged.commit()
    staged.close()


def test_views_casts_and_shards_are_staged(store: tssd.Store) -> None:
    state = make_state(3)
    store.put_state_dict(state, "policy")
    whole = np.zeros((2 * ROWS, COLUMNS), np.float64)
    local = np.zeros((10, 20), np.float32)
    part = tssd.TensorSlice([50, 70], None, [ROWS, COLUMNS], [10, 20], None)
    into = {"q": whole[::2], "k": tssd.TensorShard(local, part)}
    with store.stage("policy", into, cast=True, strict=False) as staged:
        assert staged.report.cast == ["q"]
        assert staged.report.unexpected_keys == ["bias"]
        staged.commit()
    np.testing.assert_array_equal(whole[::2], state["q"])
    assert not whole[1::2].any()
    np.testing.assert_array_equal(local, state["k"][50:60, 70:90])


def test_compressed_version_is_staged_decoded(tmp_path: Path) -> None:
    state = make_state(4)
    store = tssd.Store(str(tmp_path / "store"))
    tssd.save_file(state, tmp_path / "file.tssd", compression="zstd")
    command = [os.environ.get("TSSD_BIN", "tssd"), "put", "--store", store.url, "policy", tmp_path / "file.tssd"]
    subprocess.run([*command, "--codec", "zstd"], check=True)
    into = make_into()
    with store.stage("policy", into, mapping=MAPPING) as staged:
        # The small tensor is not compressed.
        assert staged.report.bytes_transferred == staged.report.bytes_needed - into["bias"].nbytes
        staged.commit()
    assert_has_step(into, 4)


def test_damaged_bytes_are_found_before_the_commit(tmp_path: Path) -> None:
    store = tssd.Store(str(tmp_path / "store"))
    store.put_state_dict(make_state(5), "policy")
    (archive,) = [file for file in (tmp_path / "store" / "policy").rglob("*.tssd") if file.stat().st_size > 1 << 20]
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.chmod(0o644)
    archive.write_bytes(content)
    into = make_into()
    with pytest.raises(tssd.TssdCorruptError, match="checksum") as corrupt:
        tssd.Store(str(tmp_path / "store")).stage("policy", into, mapping=MAPPING)
    assert corrupt.value.key == "policy"
    assert not into["qk"].any()


def test_differences_are_errors_of_the_staging(store: tssd.Store) -> None:
    store.put_state_dict(make_state(1), "policy")
    into = {"q": np.zeros((3, 3), np.float32), "absent": np.zeros(3)}
    with pytest.raises(tssd.TssdValueError, match=r"`q` has shape \[3, 3\].*`absent` is not stored"):
        store.stage("policy", into)
    with pytest.raises(tssd.TssdKeyError):
        store.stage("missing", into)
    with pytest.raises(TypeError, match="mapping is a"):
        store.stage("policy", into, mapping={})  # type: ignore[arg-type]


def test_commit_finds_tensors_that_have_other_memory(store: tssd.Store) -> None:
    store.put_state_dict({"a": np.arange(300_000.0)}, "policy")
    array = np.zeros(300_000)
    with store.stage("policy", {"a": array}) as staged:
        array.resize(10, refcheck=False)
        with pytest.raises((tssd.TssdError, ValueError)):
            staged.commit()
        array.resize(300_000, refcheck=False)
        staged.commit()
        np.testing.assert_array_equal(array, np.arange(300_000.0))
        array.flags.writeable = False
        with pytest.raises((tssd.TssdError, ValueError)):
            staged.commit()


def test_staging_is_awaitable() -> None:
    async def stage() -> dict[str, Any]:
        into = make_into()
        async with tssd.aio.Store("memory:") as store:
            await store.put_state_dict(make_state(6), "policy")
            async with store.stage("policy", into, mapping=MAPPING) as staged:
                assert (staged.key, staged.version, staged.report.version) == ("policy", 1, 1)
                await staged.commit()
        return into

    assert_has_step(asyncio.run(stage()), 6)
