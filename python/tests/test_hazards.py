"""Forks, cancelled tasks, odd arrays, daemons that hang: above each test, what went wrong before it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
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
from test_store import daemon

torch = pytest.importorskip("torch")

Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - what state dicts have


def script(text: str, *arguments: str) -> None:
    """Runs Python in a process of its own, which may hang."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with daemon(tmp_path / "socket") as url:
        yield url


@pytest.fixture
def memory() -> tssd.Store:
    return tssd.Store("memory:")


# A fill goes to the copy that storing would take: the caller's array stays as it was, and no error says so.
@pytest.mark.parametrize(
    "into",
    [
        np.zeros(6, np.float32)[::-1],
        np.zeros(6, ">f4"),
        np.zeros(6, np.dtype([("tag", "u1"), ("value", "<f4")]))["value"],
    ],
    ids=["backwards", "swapped", "between elements"],
)
def test_an_array_of_any_layout_is_filled_or_refused(memory: tssd.Store, into: Any) -> None:
    stored = np.arange(6, dtype=np.float32)
    memory.put_state_dict({"a": stored}, "k")
    try:
        memory.get_state_dict("k", {"a": into})
    except (TypeError, ValueError):
        return
    assert np.array_equal(into, stored)


# A child joins threads of its parent, which were not forked: it hangs for ever.
@pytest.mark.parametrize("end", ["store.close()", "del store", "sys.exit(0)"])
def test_a_child_ends_though_its_parent_had_a_store(end: str) -> None:
    script(
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
def test_a_child_keeps_no_version_that_is_gone(tmp_path: Path) -> None:
    script(
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
                # What is not there any more is the folder that was listed.
                found = [Path(f"/proc/self/fd/{{each}}") for each in os.listdir("/proc/self/fd")]
                found = [os.readlink(each) for each in found if each.is_symlink()]
                found += Path("/proc/self/maps").read_text().splitlines()
                kept = [each for each in found if each.endswith(".tssd (deleted)") and "manifest" not in each]
                print(*kept, flush=True)
                os._exit(bool(kept))
            assert os.waitpid(child, 0)[1] == 0
        """
    )


# Nobody would do what a child waits for.
@pytest.mark.parametrize(
    "call", ["version.get_tensor('w')", "version.to_meta()", "pending.result()", "publisher.put('a', 1) or publisher.flush()"]
)
def test_what_was_opened_before_a_fork_is_refused_after_it(call: str) -> None:
    script(
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


# `close` and the end of the PendingPut stop the threads that write: the put is lost, and nobody says so.
def test_a_put_that_is_not_waited_for_is_not_lost(tmp_path: Path) -> None:
    store = tssd.Store(str(tmp_path / "store"))
    pending = store.put_state_dict({"w": torch.ones(20_000_000)}, "k", wait=False)
    store.close()
    del pending
    for _ in range(100):
        if store.exists("k"):
            return
        time.sleep(0.1)
    raise AssertionError("there is no version")


def ends_while_stopped(url: str, call: Callable[[], object]) -> bool:
    """Whether a call ends within 20 s though the daemon does nothing."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    listening = url.removeprefix("unix:").encode()
    mine = [pid for pid in pids if listening in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")]
    ended = threading.Event()

    def run() -> None:
        try:
            call()
        except TimeoutError:
            ended.set()
        except ConnectionError:
            ended.set()

    for pid in mine:
        os.kill(pid, signal.SIGSTOP)
    try:
        threading.Thread(target=run, daemon=True).start()
        return ended.wait(20)
    finally:
        for pid in mine:
            os.kill(pid, signal.SIGCONT)


# connect_timeout counts for nothing where the daemon accepts and never answers.
def test_a_connection_to_a_daemon_that_hangs_times_out(url: str) -> None:
    assert ends_while_stopped(url, lambda: tssd.Store(url, connect_timeout=2))


# Nobody looks for signals while a thread waits for bytes that are elsewhere.
@pytest.mark.parametrize("end", ["Ctrl-C", "timeout"])
def test_a_fill_from_a_daemon_that_hangs_ends(tmp_path: Path, end: str) -> None:
    serving = daemon(tmp_path / "socket", "--listen", "127.0.0.1:0")
    with serving, tssd.Store(serving.said.split()[-1]) as store:
        store.put_state_dict({name: torch.ones(1 << 20) for name in "abcd"}, "k")
        into = {name: torch.zeros(1 << 20) for name in "abcd"}
        with store.open("k") as version:
            serving.process.send_signal(signal.SIGSTOP)
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
                serving.process.send_signal(signal.SIGCONT)
            # It goes on as if nothing had been.
            assert store.get_state_dict("k", into, version=version)["d"].min() == 1


def test_ctrl_c_ends_a_connecting(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            tssd.Store(f"unix:{tmp_path / 'mute'}", connect_timeout=20)
        assert time.monotonic() - started < 10


# Who has caught what a put raises is left with a version that lacks a tensor.
def test_a_version_of_which_a_part_was_refused_is_none(memory: tssd.Store) -> None:
    with pytest.raises(ValueError, match="has failed"):
        with memory.publish("k") as publisher:
            publisher.put("w", torch.ones(3))
            with contextlib.suppress(TypeError):
                publisher.put("object", object())
    assert not memory.exists("k")


def test_stages_of_a_pipeline_say_each_what_their_modules_are(memory: tssd.Store) -> None:
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


# It has a field `_1`, which nobody can name.
def test_a_namedtuple_whose_fields_were_renamed_comes_back(memory: tssd.Store) -> None:
    Renamed = namedtuple("Renamed", ["a", "def"], rename=True)  # noqa: PYI024 - as above
    memory.put_state_dict({"n": Renamed(1, 2)}, "k")
    got = memory.get_state_dict("k")["n"]
    assert got._fields == ("a", "_1") and tuple(got) == (1, 2)


# The second tensor is dropped, and no error says so.
def test_a_name_is_published_once_or_anew(memory: tssd.Store) -> None:
    try:
        with memory.publish("k", bucket_bytes=10) as publisher:
            publisher.put("w", torch.ones(3))
            publisher.put("w", torch.full((3,), 2.0))
    except (KeyError, ValueError):
        return
    assert memory.get_state_dict("k")["w"].tolist() == [2, 2, 2]


# `publish` asks for the job before it has seen a shard: at the end of the block all that was sent is refused, where
# put_state_dict agrees on one.
def test_ranks_publish_dtensors_as_they_put_them(tmp_path: Path) -> None:
    script(
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
        # Nobody would wait for rank 1.
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


# What is cast in parts is cut as it lies: nobody would see that it is not what its mesh says.
def test_a_local_tensor_of_another_shape_is_refused_before_it_is_cut(tmp_path: Path) -> None:
    script(
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


# Its shards say where they belong as ours do.
def test_a_sharded_tensor_is_refused_and_what_is_advised_can_be_done() -> None:
    script(
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


# A DTensor of one part would be a local tensor of another shape than its mesh says.
def test_a_part_of_a_shard_becomes_no_dtensor(tmp_path: Path) -> None:
    script(
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


# Unlike `copy_`: a backward pass through values that were overwritten gives wrong gradients, and no error.
def test_autograd_hears_of_a_fill(memory: tssd.Store) -> None:
    memory.put_state_dict({"w": torch.full((2,), 3.0)}, "k")
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    memory.get_state_dict("k", {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# `tensor_slice` is ignored where `into` is given.
def test_a_slice_is_got_into_a_tensor(memory: tssd.Store) -> None:
    whole = torch.arange(16.0).reshape(4, 4)
    memory.put_state_dict({"w": whole}, "k")
    part = torch.zeros(2, 2)
    memory.get("k", part, fqn="w", tensor_slice=tssd.TensorSlice([1, 1], None, [4, 4], [2, 2], []))
    assert torch.equal(part, whole[1:3, 1:3])


# A namedtuple is gone through by index, and stored by field: `p.0` is not stored.
def test_what_is_in_a_namedtuple_is_filled(memory: tssd.Store) -> None:
    memory.put_state_dict({"p": Pair(torch.ones(2), torch.ones(3))}, "k")
    into = {"p": Pair(torch.zeros(2), torch.zeros(3))}
    memory.get_state_dict("k", into)
    assert into["p"].x.sum() == 2


# A scalar of numpy is stored as a tensor, and is none in `into`: the dict that was put does not fit its own version.
def test_a_dict_with_scalars_of_numpy_is_filled(memory: tssd.Store) -> None:
    state = {"w": torch.ones(2), "lr": np.float64(0.5)}
    memory.put_state_dict(state, "k")
    memory.get_state_dict("k", into=state)


# "Nothing was written": torch refuses the staged copy when other tensors are full already, with an error of its own.
def test_a_cast_into_an_expanded_tensor_is_refused_before_anything_is_written(memory: tssd.Store) -> None:
    memory.put_state_dict({"a": torch.ones(4), "b": torch.ones(4)}, "k")
    into = {"a": torch.zeros(4), "b": torch.zeros(1, dtype=torch.bfloat16).expand(4)}
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        memory.get_state_dict("k", into, cast=True)
    assert not into["a"].any() and isinstance(caught.value, tssd.TssdError)


# New memory is made on torch's default device: empty tensors come on it, and a cast fails.
@pytest.mark.parametrize("cast", [False, True])
def test_a_default_device_changes_nothing(memory: tssd.Store, cast: bool) -> None:
    memory.put_state_dict({"w": torch.ones(4), "empty": torch.ones(0, 3), "part": torch.ones(4, 4)[:, ::2]}, "k")
    into = {"w": torch.zeros(4, dtype=torch.bfloat16), "empty": torch.zeros(0, 3), "part": torch.zeros(4, 2)}
    with torch.device("meta"):
        got = memory.get_state_dict("k", into, cast=True) if cast else memory.get_state_dict("k")
    assert {tensor.device.type for tensor in got.values()} == {"cpu"}
    assert (got["w"] == 1).all() and (got["part"] == 1).all()


# A subscription cannot be closed while somebody waits for it, which is when one wants to.
def test_closing_a_subscription_ends_its_loop(url: str) -> None:
    store = tssd.Store(url)
    subscription = store.subscribe("k")
    seen: list[list[Any]] = []
    follower = threading.Thread(target=lambda: seen.append(list(subscription)), daemon=True)
    follower.start()
    time.sleep(0.3)
    subscription.close()
    follower.join(20)
    assert seen == [[]]


def test_closing_a_subscription_ends_its_loop_in_asyncio() -> None:
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


# What `put_batch` gives is not wrapped: these are the PendingPuts of tssd, which block the loop.
def test_the_pending_puts_of_a_batch_are_awaitable() -> None:
    async def main() -> None:
        store = tssd.aio.Store("memory:")
        pending: Any = await store.put_batch({"a": torch.ones(1), "b": torch.ones(1)}, wait=False)
        assert [await each.visible() for each in pending] == [1, 1]

    asyncio.run(main())


# All threads wait for a version, and none is left for the put of it.
def test_any_number_of_waits_leaves_room_for_the_put() -> None:
    script(
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


# "What it would have filled is left alone when the await has ended": not if it is cancelled once more meanwhile.
def test_a_task_that_is_cancelled_twice_still_waits_for_its_thread() -> None:
    async def main() -> None:
        ended: list[bool] = []

        def work() -> None:
            time.sleep(0.5)
            ended.append(True)

        task = asyncio.ensure_future(tssd.aio._run(work))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(main())


# "Lists and tuples come whole, if anything in them is wanted": the dicts in them are pruned.
def test_a_list_comes_whole(memory: tssd.Store) -> None:
    memory.put_state_dict({"layers": [{"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}]}, "k")
    got = memory.get_state_dict("k", names=["layers.0.a"])
    assert [set(layer) for layer in got["layers"]] == [{"a", "b"}, {"a"}]


# Tied views come apart, and what is expanded is stored as often as it is seen.
def test_a_cast_keeps_ties_and_strides_of_zero(memory: tssd.Store) -> None:
    base = torch.randn(4, 4)
    memory.put_state_dict({"w": base, "t": base.T}, "k", transfer_dtype=torch.bfloat16)
    got = memory.get_state_dict("k")
    assert got["w"].untyped_storage().data_ptr() == got["t"].untyped_storage().data_ptr()
    expanded = torch.ones(1, 3).expand(100_000, 3)
    assert memory.put_state_dict({"w": expanded}, "k", transfer_dtype=torch.bfloat16).bytes < 100_000


# The message is that of an enum of Rust, "failed to extract enum Which ('Lease | Number')", and is no TssdError.
@pytest.mark.parametrize("version", [-1, "3", 1.0])
def test_what_is_no_version_is_said_so(memory: tssd.Store, version: Any) -> None:
    memory.put_state_dict({"w": torch.ones(1)}, "k")
    with pytest.raises((TypeError, ValueError, KeyError)) as caught:
        memory.get_state_dict("k", version=version)
    assert "Which" not in str(caught.value)


# Advice that cannot be followed: `get` has no `strict`, a store has no `load_file`.
def test_advice_is_about_the_call(memory: tssd.Store) -> None:
    memory.put("text", "abc")
    with pytest.raises(tssd.TssdError) as caught:
        memory.get("text", torch.zeros(3))
    assert "strict" not in str(caught.value)
    memory.put_state_dict({"s": "abc"}, "k")
    with memory.open("k") as opened, pytest.raises(tssd.TssdError) as caught:
        opened.get_tensor("s")
    assert "load_file" not in str(caught.value)


# A str is gone through by characters: the key `p` is missed.
def test_one_key_is_no_batch(memory: tssd.Store) -> None:
    memory.put("policy", torch.ones(1))
    with pytest.raises(TypeError):
        memory.get_batch("policy")


# Whoever stopped waiting was waited with for ever, until the daemon listened to that connection no more.
def test_waits_that_ended_are_forgotten(url: str) -> None:
    store = tssd.Store(url)
    store.put("k", 1)
    assert int(store.wait_for_version("k", 1, timeout=0)) == 1
    for _ in range(100):
        with pytest.raises(TimeoutError):
            store.wait_for_version("k", 2, timeout=0.001)
    head = store.head("k")
    assert head is not None and head.version == 1


# A thread that waits asked an interpreter that was gone for signals.
@pytest.mark.skipif(sys.platform != "linux", reason="libc.so.6")
def test_a_thread_that_waits_does_not_hurt_the_end_of_its_process() -> None:
    for call in ("wait_for_version('k', 1)", "subscribe('k').__next__()"):
        script(
            f"""
            import ctypes, threading, time, tssd
            libc = ctypes.CDLL(None)  # the process ends 300 ms after its interpreter
            libc.__cxa_atexit(ctypes.cast(libc.usleep, ctypes.c_void_p), ctypes.c_void_p(300_000), None)
            store = tssd.Store("memory:")
            threading.Thread(target=lambda: store.{call}, daemon=True).start()
            time.sleep(0.2)
            """
        )
