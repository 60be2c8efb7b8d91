"""Regression tests of forks, cancelled tasks, unusual arrays and hanging daemons.

The comment above a test describes the bug that it covers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tssd
import tssd.aio
from processes import Daemon

torch = pytest.importorskip("torch")

Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - state dicts contain untyped ones


def run_script(text: str, *arguments: str) -> None:
    """Runs Python code in a separate process, which must exit with 0 within 60 s."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with Daemon(tmp_path / "socket") as url:
        yield url


@pytest.fixture
def memory() -> tssd.Store:
    return tssd.Store("memory:")


# A fill wrote to the temporary copy that a put would take. The caller's array stayed unchanged, without an error.
@pytest.mark.parametrize(
    "into",
    [
        np.zeros(6, np.float32)[::-1],
        np.zeros(6, ">f4"),
        np.zeros(6, np.dtype([("tag", "u1"), ("value", "<f4")]))["value"],
    ],
    ids=["backwards", "swapped", "between elements"],
)
def test_array_of_any_layout_is_filled_or_rejected(memory: tssd.Store, into: Any) -> None:
    stored = np.arange(6, dtype=np.float32)
    memory.put_state_dict({"a": stored}, "k")
    try:
        memory.get_state_dict("k", {"a": into})
    except (TypeError, ValueError):
        return
    assert np.array_equal(into, stored)


# A forked child joined threads of its parent, which do not exist in the child, and hung.
@pytest.mark.parametrize("end", ["store.close()", "del store", "sys.exit(0)"])
def test_forked_child_exits_although_parent_has_store(end: str) -> None:
    run_script(
        f"""
        import os, signal, sys, tssd
        store = tssd.Store("memory:")
        store.put("k", 1)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            {end}
            os._exit(0)
        sys.exit(os.waitpid(child, 0)[1] != 0)
        """
    )


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nobody says what a process has open")
def test_forked_child_keeps_no_deleted_version_open(tmp_path: Path) -> None:
    run_script(
        f"""
        import os, numpy, tssd
        from pathlib import Path
        store, weights = tssd.Store({str(tmp_path / "store")!r}), numpy.ones(64 << 20, dtype=numpy.uint8)
        for _ in range(5):
            store.put_state_dict({{"w": weights}}, "k", durability="disk")
            view = store.get_state_dict("k")
            store.put_state_dict({{"w": weights}}, "k", durability="disk")
            del view
            child = os.fork()
            if child == 0:
                # The descriptor of the listed folder itself is already closed.
                found = [Path(f"/proc/self/fd/{{each}}") for each in os.listdir("/proc/self/fd")]
                found = [os.readlink(each) for each in found if each.is_symlink()]
                found += Path("/proc/self/maps").read_text().splitlines()
                kept = [each for each in found if each.endswith(".tssd (deleted)") and "manifest" not in each]
                print(*kept, flush=True)
                os._exit(bool(kept))
            assert os.waitpid(child, 0)[1] == 0
        """
    )


# A forked child would wait for threads of its parent, which do not exist in the child.
@pytest.mark.parametrize(
    "call", ["version.get_tensor('w')", "version.to_meta()", "pending.result()", "publisher.put('a', 1) or publisher.flush()"]
)
def test_objects_opened_before_fork_are_rejected_in_child(call: str) -> None:
    run_script(
        f"""
        import os, signal, sys, numpy, tssd
        store = tssd.Store("memory:")
        store.put_state_dict({{"w": numpy.ones(3), "text": "t" * 100}}, "k")
        version, publisher = store.open("k"), store.publish("p")
        pending = store.put_state_dict({{"w": numpy.ones(3)}}, "later", wait=False)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            try:
                {call}
            except ValueError as error:
                os._exit("forked" not in str(error))
            os._exit(1)
        sys.exit(os.waitpid(child, 0)[1] != 0)
        """
    )


# `close` and the drop of the `PendingPut` stopped the writing threads. The put was lost without an error.
def test_put_without_wait_completes_after_close(tmp_path: Path) -> None:
    store = tssd.Store(str(tmp_path / "store"))
    pending = store.put_state_dict({"w": torch.ones(20_000_000)}, "k", wait=False)
    store.close()
    del pending
    for _ in range(100):
        if store.exists("k"):
            return
        time.sleep(0.1)
    raise AssertionError("there is no version")


def fails_while_daemon_is_stopped(url: str, call: Callable[[], object]) -> bool:
    """Stops the daemon. Returns whether a call fails with a timeout or connection error within 20 s."""
    all_pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    socket_path = url.removeprefix("unix:").encode()
    pids = [pid for pid in all_pids if socket_path in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")]
    ended = threading.Event()

    def run() -> None:
        try:
            call()
        except TimeoutError:
            ended.set()
        except ConnectionError:
            ended.set()

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        threading.Thread(target=run, daemon=True).start()
        return ended.wait(20)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


# `connect_timeout` had no effect if the daemon accepted the connection and never answered.
def test_connect_to_hanging_daemon_times_out(url: str) -> None:
    assert fails_while_daemon_is_stopped(url, lambda: tssd.Store(url, connect_timeout=2))


# A thread that waited for bytes of a remote daemon did not check for signals.
@pytest.mark.parametrize("end", ["Ctrl-C", "timeout"])
def test_fill_from_hanging_daemon_ends_on_ctrl_c_or_timeout(tmp_path: Path, end: str) -> None:
    server = Daemon(tmp_path / "socket", "--listen", "127.0.0.1:0")
    with server, tssd.Store(server.startup_line.split()[-1]) as store:
        store.put_state_dict({name: torch.ones(1 << 20) for name in "abcd"}, "k")
        into = {name: torch.zeros(1 << 20) for name in "abcd"}
        with store.open("k") as version:
            server.process.send_signal(signal.SIGSTOP)
            try:
                started = time.monotonic()
                if end == "Ctrl-C":
                    with pytest.raises(KeyboardInterrupt):
                        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                        store.get_state_dict("k", into, version=version)
                else:
                    with pytest.raises(TimeoutError):
                        store.get_state_dict("k", into, version=version, timeout=0.3)
                assert time.monotonic() - started < 10
            finally:
                server.process.send_signal(signal.SIGCONT)
            # The open version is still usable.
            assert store.get_state_dict("k", into, version=version)["d"].min() == 1


def test_ctrl_c_interrupts_connect(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent_socket:
        silent_socket.bind(str(tmp_path / "mute"))
        silent_socket.listen()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            tssd.Store(f"unix:{tmp_path / 'mute'}", connect_timeout=20)
        assert time.monotonic() - started < 10


# A caller that caught an error of `Publisher.put` published a version without that tensor.
def test_version_with_rejected_value_is_not_published(memory: tssd.Store) -> None:
    with pytest.raises(ValueError, match="has failed"):
        with memory.publish("k") as publisher:
            publisher.put("w", torch.ones(3))
            with contextlib.suppress(TypeError):
                publisher.put("object", object())
    assert not memory.exists("k")


def test_pipeline_stages_merge_module_metadata(memory: tssd.Store) -> None:
    modules = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3)})
    whole = modules.state_dict()
    for writer, name in enumerate(modules):
        stage = torch.nn.ModuleDict({name: modules[name]}).state_dict()
        memory.put_state_dict(stage, "put", version=1, writer=writer, writers=2, job="run")
        with memory.publish("published", version=1, writer=writer, writers=2, job="run") as publisher:
            publisher.put(name, modules[name].state_dict())
    got = memory.get_state_dict("put")
    assert got._metadata == whole._metadata and list(got) == list(whole)
    got = memory.get_state_dict("published")
    assert all(got[name]._metadata == modules[name].state_dict()._metadata for name in modules)


# Such a namedtuple has a field `_1`, which `namedtuple` accepts only with `rename=True`.
def test_namedtuple_with_renamed_fields_roundtrips(memory: tssd.Store) -> None:
    Renamed = namedtuple("Renamed", ["a", "def"], rename=True)  # noqa: PYI024 - as above
    memory.put_state_dict({"n": Renamed(1, 2)}, "k")
    got = memory.get_state_dict("k")["n"]
    assert got._fields == ("a", "_1") and tuple(got) == (1, 2)


# The second tensor of a name was dropped without an error.
def test_duplicate_name_is_rejected_or_replaces_value(memory: tssd.Store) -> None:
    try:
        with memory.publish("k", bucket_bytes=10) as publisher:
            publisher.put("w", torch.ones(3))
            publisher.put("w", torch.full((3,), 2.0))
    except (KeyError, ValueError):
        return
    assert memory.get_state_dict("k")["w"].tolist() == [2, 2, 2]


# `publish` chose the job before it had a shard, so the commit at the end of the block was rejected. `put_state_dict`
# lets the ranks agree on a job.
def test_publish_of_dtensors_agrees_on_job_like_put(tmp_path: Path) -> None:
    run_script(
        """
        import sys, torch, tssd
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
        mesh = init_device_mesh("cpu", (2,))
        weight = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        store = tssd.Store(sys.argv[1])
        assert store.put_state_dict({"w": weight}, "put", version=1).missing == [1]
        with store.publish("published", version=1) as publisher:
            publisher.put("w", weight)
        assert publisher.report.missing == [1]
        # The mesh does not contain rank 1, so the version would not wait for it.
        alone = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)
        try:
            with store.publish("alone", version=1) as publisher:
                publisher.put("w", alone)
        except ValueError as error:
            assert "there are also ranks [1]" in str(error), error
        assert not store.exists("alone")
        """,
        str(tmp_path),
    )


# A cast in parts splits the local tensor by its own shape, so a mismatch with the mesh went unnoticed.
def test_local_tensor_of_wrong_shape_is_rejected_before_split(tmp_path: Path) -> None:
    run_script(
        """
        import sys, torch, tssd
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Shard
        dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
        mesh = init_device_mesh("cpu", (2,))
        store = tssd.Store(sys.argv[1])
        for rows in (8, 10, 12):
            weight = DTensor.from_local(
                torch.ones(rows, 33), mesh, [Shard(0)], run_check=False, shape=(20, 33), stride=(33, 1)
            )
            try:
                with store.publish("k", version=rows, bucket_bytes=128, transfer_dtype="float64") as publisher:
                    publisher.put("w", weight)
                assert rows == 10 and publisher.report.missing == [1]
            except tssd.TssdError as error:
                assert rows != 10 and (error.kind, error.fqn) == ("SliceMismatch", "w"), error
        partial = DTensor.from_local(torch.ones(8, 33), mesh, [Partial("sum")], run_check=False)
        try:
            with store.publish("k", version=20, bucket_bytes=128, transfer_dtype="float64") as publisher:
                publisher.put("p", partial)
            raise AssertionError("Partial was put")
        except tssd.TssdError as error:
            assert (error.kind, error.fqn) == ("PartialPlacement", "p"), error
        """,
        str(tmp_path),
    )


# The shards of a `ShardedTensor` have offsets, like those of a `TensorShard`.
def test_sharded_tensor_is_rejected_with_working_advice() -> None:
    run_script(
        """
        import torch, tssd
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec
        dist.init_process_group("fake", rank=1, world_size=2, store=dist.HashStore())
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
        sharded = sharded_tensor.ones(spec, 5, 3)
        try:
            tssd.save({"model": {"table": sharded}})
            raise AssertionError("it was stored")
        except TypeError as error:
            assert error.fqn == "model.table" and "ShardedTensor" in str(error) and "TensorShard" in error.advice, error
        shards = [
            tssd.TensorShard(
                shard.tensor, tssd.TensorSlice(shard.metadata.shard_offsets, None, [5, 3], shard.metadata.shard_sizes, [])
            )
            for shard in sharded.local_shards()
        ]
        (again,) = tssd.load(tssd.save({"table": shards}))["table"]
        assert again.tensor_slice.offsets == (3, 0) and torch.equal(again.local, torch.ones(2, 3))
        """
    )


# The local tensor of a DTensor of one part would have another shape than its mesh requires.
def test_part_of_shard_is_not_loaded_as_dtensor(tmp_path: Path) -> None:
    run_script(
        """
        import sys, torch, tssd
        from pathlib import Path
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        dist.init_process_group("fake", rank=1, world_size=2, store=dist.HashStore())
        mesh = init_device_mesh("cpu", (2,))
        local = torch.arange(330.0).reshape(10, 33)
        weight = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(20, 33), stride=(33, 1))
        store = tssd.Store(sys.argv[1])
        for version, bucket_bytes in ((1, 1 << 20), (2, 1 << 10)):
            with store.publish("k", version=version, bucket_bytes=bucket_bytes, transfer_dtype="float64") as publisher:
                publisher.put("w", weight)
        rows = []
        for path in sorted(Path(sys.argv[1]).rglob("*.tssd")):
            again = tssd.TorchStoreStateDict.from_bytes(path.read_bytes()).to_state_dict(mesh)["w"]
            if isinstance(again, DTensor):
                assert torch.equal(again.to_local(), local.double()), path
                rows.append(10)
            else:
                (first, _), (count, _) = again.tensor_slice.offsets, again.tensor_slice.local_shape
                assert torch.equal(again.local, local.double()[first - 10 : first - 10 + count]), path
                rows.append(count)
        assert sorted(rows)[-1] == 10 and sum(rows) == 20 and len(rows) > 3, rows
        """,
        str(tmp_path),
    )


# Unlike `copy_`, a fill did not notify autograd. A backward pass through overwritten values gave wrong gradients.
def test_fill_notifies_autograd(memory: tssd.Store) -> None:
    memory.put_state_dict({"w": torch.full((2,), 3.0)}, "k")
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    memory.get_state_dict("k", {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# `tensor_slice` was ignored if `into` was given.
def test_get_fills_tensor_with_slice(memory: tssd.Store) -> None:
    whole = torch.arange(16.0).reshape(4, 4)
    memory.put_state_dict({"w": whole}, "k")
    part = torch.zeros(2, 2)
    memory.get("k", part, fqn="w", tensor_slice=tssd.TensorSlice([1, 1], None, [4, 4], [2, 2], []))
    assert torch.equal(part, whole[1:3, 1:3])


# A put names the items of a namedtuple by field, but a fill named them by index, so `p.0` was missing.
def test_tensors_in_namedtuple_are_filled(memory: tssd.Store) -> None:
    memory.put_state_dict({"p": Pair(torch.ones(2), torch.ones(3))}, "k")
    into = {"p": Pair(torch.zeros(2), torch.zeros(3))}
    memory.get_state_dict("k", into)
    assert into["p"].x.sum() == 2


# A put stores a numpy scalar as a tensor, but a fill did not treat it as one. A dict did not match its own version.
def test_dict_with_numpy_scalars_is_filled(memory: tssd.Store) -> None:
    state = {"w": torch.ones(2), "lr": np.float64(0.5)}
    memory.put_state_dict(state, "k")
    memory.get_state_dict("k", into=state)


# torch rejected the staged copy with an error of its own, after other tensors had already been filled.
def test_cast_into_expanded_tensor_is_rejected_before_any_write(memory: tssd.Store) -> None:
    memory.put_state_dict({"a": torch.ones(4), "b": torch.ones(4)}, "k")
    into = {"a": torch.zeros(4), "b": torch.zeros(1, dtype=torch.bfloat16).expand(4)}
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        memory.get_state_dict("k", into, cast=True)
    assert not into["a"].any() and isinstance(caught.value, tssd.TssdError)


# New memory was allocated on torch's default device: empty tensors were there, and a cast failed.
@pytest.mark.parametrize("cast", [False, True])
def test_get_ignores_default_device(memory: tssd.Store, cast: bool) -> None:
    memory.put_state_dict({"w": torch.ones(4), "empty": torch.ones(0, 3), "part": torch.ones(4, 4)[:, ::2]}, "k")
    into = {"w": torch.zeros(4, dtype=torch.bfloat16), "empty": torch.zeros(0, 3), "part": torch.zeros(4, 2)}
    with torch.device("meta"):
        got = memory.get_state_dict("k", into, cast=True) if cast else memory.get_state_dict("k")
    assert {tensor.device.type for tensor in got.values()} == {"cpu"}
    assert (got["w"] == 1).all() and (got["part"] == 1).all()


# A subscription could not be closed while a thread waited for it.
def test_close_ends_loop_over_subscription(url: str) -> None:
    store = tssd.Store(url)
    subscription = store.subscribe("k")
    seen: list[list[Any]] = []
    follower = threading.Thread(target=lambda: seen.append(list(subscription)), daemon=True)
    follower.start()
    time.sleep(0.3)
    subscription.close()
    follower.join(20)
    assert seen == [[]]


def test_close_ends_asyncio_loop_over_subscription() -> None:
    async def main() -> None:
        subscription = tssd.aio.Store("memory:").subscribe("k")

        async def follow() -> None:
            async for _ in subscription:
                pass

        following = asyncio.create_task(follow())
        await asyncio.sleep(0.3)
        subscription.close()
        await asyncio.wait_for(following, 10)

    asyncio.run(main())


# `put_batch` returned the blocking `PendingPut` of `tssd` instead of the awaitable one.
def test_pending_puts_of_batch_are_awaitable() -> None:
    async def main() -> None:
        store = tssd.aio.Store("memory:")
        pending: Any = await store.put_batch({"a": torch.ones(1), "b": torch.ones(1)}, wait=False)
        assert [await each.wait_visible() for each in pending] == [1, 1]

    asyncio.run(main())


# All threads of the pool waited for a version, and none was left for the put.
def test_many_waits_do_not_block_put() -> None:
    run_script(
        """
        import asyncio, tssd.aio
        async def main():
            store = tssd.aio.Store("memory:")
            waits = [asyncio.ensure_future(store.wait_for_version("k", 1)) for _ in range(300)]
            await asyncio.sleep(0)
            await asyncio.wait_for(store.put("k", 1), 20)
            await asyncio.wait_for(asyncio.gather(*waits), 20)
        asyncio.run(main())
        """
    )


# A cancelled call must not write to the tensors after its await has ended. After a second cancel, it did.
def test_task_cancelled_twice_waits_for_its_thread() -> None:
    async def main() -> None:
        ended: list[bool] = []

        def work() -> None:
            time.sleep(0.5)
            ended.append(True)

        task = asyncio.ensure_future(tssd.aio._run_in_thread(work))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(main())


# A list of which one item is selected must be returned whole. The dicts in it were pruned.
def test_selected_list_is_returned_whole(memory: tssd.Store) -> None:
    memory.put_state_dict({"layers": [{"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}]}, "k")
    got = memory.get_state_dict("k", names=["layers.0.a"])
    assert [set(layer) for layer in got["layers"]] == [{"a", "b"}, {"a"}]


# A cast separated tied views and stored an expanded tensor at its full size.
def test_cast_preserves_ties_and_zero_strides(memory: tssd.Store) -> None:
    base = torch.randn(4, 4)
    memory.put_state_dict({"w": base, "t": base.T}, "k", transfer_dtype=torch.bfloat16)
    got = memory.get_state_dict("k")
    assert got["w"].untyped_storage().data_ptr() == got["t"].untyped_storage().data_ptr()
    expanded = torch.ones(1, 3).expand(100_000, 3)
    assert memory.put_state_dict({"w": expanded}, "k", transfer_dtype=torch.bfloat16).bytes < 100_000


# The error was that of a Rust enum, "failed to extract enum Which ('Lease | Number')", and not a `TssdError`.
@pytest.mark.parametrize("version", [-1, "3", 1.0])
def test_invalid_version_has_readable_error(memory: tssd.Store, version: Any) -> None:
    memory.put_state_dict({"w": torch.ones(1)}, "k")
    with pytest.raises((TypeError, ValueError, KeyError)) as caught:
        memory.get_state_dict("k", version=version)
    assert "Which" not in str(caught.value)


# The advice did not apply to the call: `get` has no `strict`, a store has no `load_file`.
def test_advice_applies_to_call(memory: tssd.Store) -> None:
    memory.put("text", "abc")
    with pytest.raises(tssd.TssdError) as caught:
        memory.get("text", torch.zeros(3))
    assert "strict" not in str(caught.value)
    memory.put_state_dict({"s": "abc"}, "k")
    with memory.open("k") as opened, pytest.raises(tssd.TssdError) as caught:
        opened.get_tensor("s")
    assert "load_file" not in str(caught.value)


# A str was iterated by character, so the error named a missing key `p`.
def test_get_batch_rejects_str(memory: tssd.Store) -> None:
    memory.put("policy", torch.ones(1))
    with pytest.raises(TypeError):
        memory.get_batch("policy")


# The daemon kept waits that had timed out in the client, until it stopped to serve the connection.
def test_timed_out_waits_are_released(url: str) -> None:
    store = tssd.Store(url)
    store.put("k", 1)
    assert int(store.wait_for_version("k", 1, timeout=0)) == 1
    for _ in range(100):
        with pytest.raises(TimeoutError):
            store.wait_for_version("k", 2, timeout=0.001)
    head = store.head("k")
    assert head is not None and head.version == 1


# A waiting thread checked for signals after the interpreter had been finalized.
@pytest.mark.skipif(sys.platform != "linux", reason="libc.so.6")
def test_waiting_thread_does_not_crash_exiting_process() -> None:
    for call in ("wait_for_version('k', 1)", "subscribe('k').__next__()"):
        run_script(
            f"""
            import ctypes, threading, time, tssd
            libc = ctypes.CDLL(None)  # the process ends 300 ms after its interpreter
            libc.__cxa_atexit(ctypes.cast(libc.usleep, ctypes.c_void_p), ctypes.c_void_p(300_000), None)
            store = tssd.Store("memory:")
            threading.Thread(target=lambda: store.{call}, daemon=True).start()
            time.sleep(0.2)
            """
        )
