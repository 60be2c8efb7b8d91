"""Stores for asyncio: the methods of a store as coroutines, and cancelled tasks."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tssd
import tssd.aio
from processes import Daemon


def test_aio_store_has_all_methods_of_store() -> None:
    public = {name for name in dir(tssd.Store) if not name.startswith("_")}
    assert public == {name for name in dir(tssd.aio.Store) if not name.startswith("_")}
    for name in public - {"url"}:
        assert inspect.getdoc(getattr(tssd.aio.Store, name))


def test_values_roundtrip() -> None:
    async def main() -> None:
        async with tssd.aio.Store("memory:") as store:
            report = await store.put_state_dict({"w": np.arange(6), "b": np.ones(2)}, "policy", metadata={"step": 1})
            assert report.version == 1
            got = await store.get_state_dict("policy")
            assert np.array_equal(np.asarray(got["w"]), np.arange(6))
            into = np.zeros(6, int)
            assert await store.get("policy", into, fqn="w") is into and into[5] == 5
            async with store.open("policy", names=["w"]) as opened:
                assert [name async for name, _ in opened.items()] == ["w"]
                assert np.array_equal(np.asarray(await opened.get_slice("w")[2:4]), [2, 3])
                part = opened.get_slice("w")
                assert np.array_equal(np.asarray(await part[[5, 1]]), [5, 1])
                assert (part.shape, part.get_dtype()) == ((6,), str(part.dtype).removeprefix("torch."))
                assert list(opened) == ["w"] and "w" in opened and "b" not in opened
                assert [len(each) async for each in opened.values()] == [6]
                assert (opened.metadata(), len(opened), opened.keys()) == ({"step": 1}, 1, ["w"])
            async with store.publish("policy") as publisher:
                await publisher.put("w", np.arange(3))
            assert publisher.report is not None and publisher.report.version == 2
            async with store.wait_for_version("policy", 2) as lease:
                await store.put("policy", {"w": np.arange(4)})
                assert len((await store.get_state_dict("policy", version=lease))["w"]) == 3
            pin = await store.pin("policy", "best")
            assert (int(pin), await store.pins("policy")) == (3, {"best": 3})
            await pin.unpin()
            pending = await store.put_state_dict({"w": np.arange(5)}, "policy", wait=False)
            assert await pending.wait_visible() == 4 and (await pending.result()).version == 4
            assert await store.keys() == ["policy"] and await store.exists("policy")
            assert await store.delete_batch(["policy"]) == 1 and await store.head("policy") is None
            batch = await store.put_batch({"x": 1, "y": 2}, wait=False, options=tssd.PutOptions())
            assert [await each.wait_visible() for each in batch] == [1, 1]
            with pytest.raises(KeyError):
                await store.get_state_dict("policy")

    asyncio.run(main())


def test_finished_call_leaves_no_thread() -> None:
    """A remaining thread could hold tensors while the interpreter exits."""

    async def main() -> None:
        async with tssd.aio.Store("memory:") as store:
            before = threading.active_count()
            for _ in range(500):
                await store.keys()
                assert threading.active_count() == before

    asyncio.run(main())


def test_waits_run_concurrently_with_other_tasks(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        trainer, generator = tssd.aio.Store(url), tssd.aio.Store(url)
        seen: list[int] = []

        async def follow() -> None:
            async for info in generator.subscribe("policy"):
                seen.append(info.version)
                if info.version == 5:
                    return

        follower = asyncio.create_task(follow())
        for step in range(1, 6):
            await trainer.put_state_dict({"w": np.full(10, step)}, "policy", version=step)
        await asyncio.wait_for(follower, 60)
        assert seen == sorted(set(seen)) and seen[-1] == 5
        # More concurrent waits than a thread pool usually has threads.
        waits = [asyncio.ensure_future(generator.wait_for_version("policy", 6)) for _ in range(40)]
        await trainer.put_state_dict({"w": np.full(10, 6)}, "policy", version=6)
        leases = await asyncio.wait_for(asyncio.gather(*waits), 60)
        assert {lease.version for lease in leases} == {6}

    with Daemon(tmp_path / "socket") as url:
        asyncio.run(main(url))


def test_cancelled_task_ends_its_call() -> None:
    async def main() -> None:
        store = tssd.aio.Store("memory:")

        async def wait_forever() -> None:
            await store.wait_for_version("policy", 1)

        waiting = asyncio.create_task(wait_forever())
        await asyncio.sleep(0.2)
        waiting.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert time.monotonic() - started < 10
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait_forever(), 0.2)
        # A publish that is cancelled inside its block leaves no version.
        async def publish_partially() -> None:
            async with store.publish("policy") as publisher:
                await publisher.put("w", np.ones(10))
                await wait_forever()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(publish_partially(), 0.2)
        assert await store.keys() == []
        await store.put("policy", {"w": np.ones(3)})
        assert (await store.get_state_dict("policy"))["w"][0] == 1

    asyncio.run(main())
