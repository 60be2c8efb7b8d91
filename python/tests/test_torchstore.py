"""What stands in for torchstore, beside torchstore itself: in one process, Monarch's, torchrun's, Ray's, spawned ones."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
import tssd
import tssd.torchstore as ts
from processes import UNCONNECTED, reconnects, stop_daemons
from same import same
from torchstore_cases import CASES, told

HERE = Path(__file__).parent
ONES = torch.ones(2)

# What is another thing here than in the torchstore that is released: there, and here. The first is the class of an
# error where it fails. docs/migration.md has a line for each.
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a_parameter_comes_back_as_a_tensor": (("Parameter", True), ("Tensor", False)),
    "an_object_of_a_class": ("nothing", "TypeError"),
    "deleting_what_is_missing": ("Exception", "KeyError"),
    "in_place_of_another_shape": ("nothing", "ValueError"),
    "in_place_of_ints": ("nothing", "TypeError"),
    "in_place_of_an_object": ("ValueError", "TypeError"),
    "what_is_no_tensor_in_place": ("ValueError", "TypeError"),
    "a_slice_of_another_global_shape": ("nothing", "RuntimeError"),
    "another_shape_under_the_same_key": ("ActorError", [torch.zeros(2, dtype=torch.int32), "text"]),
    "a_state_dict_of_another_shape": ("nothing", "ValueError"),
    "what_a_state_dict_keeps": (("dict", False, False, ["0"]), ("OrderedDict", True, True, [0])),
    "initializing_again": (("Exception", "RuntimeError"), ("RuntimeError", "RuntimeError")),
    "an_uneven_sharding": ("ActorError", [[[(True, True, True)] * count, True] for count in (4, 2, 2)]),
    "experts_that_are_whole": ("KeyError", [torch.zeros(2, 2), torch.ones(2, 2)]),
}

# What torchstore has had since.
SINCE: dict[str, Any] = {
    "batches": (
        {"batches.a": torch.arange(3.0), "batches.b": "text", "batches.c": torch.ones(2, 2)},
        {"batches.a": torch.arange(3.0), "batches.b": "text"},
        True,
    ),
    "batches_that_are_none": [
        "AssertionError", "ValueError", "ValueError", "ValueError", "TypeError", "KeyError", "KeyError", "TypeError",
        "nothing", torch.zeros(1),
    ],
    "deleting_batches": ["deleting_batches.c"],
    "deleting_a_part": True,
    "a_transfer_dtype": (
        {"w": torch.tensor([1.0], dtype=torch.bfloat16), "n": torch.tensor([123457])},
        {"w": torch.tensor([1.0]), "n": torch.tensor([123457])},
        torch.tensor([1.001]),
    ),
    "another_store": ((False, True, ["mine"]), True, False),
}


@pytest.fixture(scope="module", autouse=True)
def own_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Daemons of these tests alone."""
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        yield dict(os.environ)
    stop_daemons(folder)


@reconnects
def run(*command: str | Path, timeout: int = 240) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], capture_output=True, text=True, timeout=timeout, cwd=HERE
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def outcomes(module: str, folder: Path, *wanted: str) -> dict[str, Any]:
    if importlib.util.find_spec("monarch") is None or importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} or Monarch is not installed")
    out = folder / "outcomes.json"
    run("torchstore_cases.py", module, out, *wanted)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first = outcomes("tssd.torchstore", tmp_path_factory.mktemp("ours"))
    failed = [name for name, each in first.items() if raised(each)]
    # Ranks that torch has not connected meet once more, and those who took their place then.
    if not any(UNCONNECTED in first[name]["raised"] for name in failed):
        return first
    return first | outcomes("tssd.torchstore", tmp_path_factory.mktemp("ours"), *failed)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first = outcomes("torchstore", tmp_path_factory.mktemp("theirs"))
    # On a busy machine its actors lose each other at times, and then those after them. Who failed is asked once more.
    lost = [name for name, each in first.items() if raised(each) in ("ActorError", "TimeoutError")]
    return first | outcomes("torchstore", tmp_path_factory.mktemp("theirs"), *lost)


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_torchstore_does(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    here, there = ours[name], raised(theirs[name]) or theirs[name]
    if name in SINCE:
        assert there in ("AttributeError", "TypeError") and here == said(SINCE[name]), theirs[name]
    else:
        expected = [here, here] if name not in DIFFERENT else [*map(said, DIFFERENT[name])]
        assert [there, here] == expected, theirs[name]


def raised(outcome: Any) -> str | None:
    """The class of what a case has raised."""
    return outcome["raised"].split(":")[0] if isinstance(outcome, dict) and "raised" in outcome else None


def said(value: Any) -> Any:
    return json.loads(json.dumps(told(value)))


def test_nothing_fails_that_should_not(ours: dict[str, Any]) -> None:
    assert not [each for each in ours.values() if raised(each)]


def test_ranks_of_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    run(*torchrun, "torchstore_ranks.py", tmp_path)


def test_processes_of_ray() -> None:
    pytest.importorskip("ray")
    run("torchstore_ray.py")


def child(rank: int, url: str) -> None:
    """A process that knows of nothing but torchstore."""
    tssd.torchstore.install()
    import torchstore
    from torchstore import api, state_dict_utils
    from torchstore.logging import init_logging
    from torchstore.spmd import SPMDEnv
    from torchstore.strategy import LocalRankStrategy
    from torchstore.transport import TransportType
    from torchstore.transport.types import Request, TensorSlice

    assert torchstore is ts and TensorSlice is tssd.TensorSlice and api.put is torchstore.put
    assert state_dict_utils.DELIM == "/" and SPMDEnv is torchstore.spmd.SPMDEnv
    assert LocalRankStrategy(TransportType.Gloo).default_transport_type is TransportType.Gloo
    part = Request.from_any("", None, TensorSlice((1,), None, torch.Size([2]), (1,), None)).tensor_slice
    init_logging()

    async def use() -> None:
        client = await torchstore.client()
        got = await state_dict_utils.get_state_dict(client, "policy")
        assert torch.equal(got["w"], ONES) and torch.equal(await client.get("policy/w", None, part), ONES[1:])
        await torchstore.put(f"rank.{rank}", torch.tensor(rank))

    asyncio.run(use())


def test_processes_that_are_spawned_find_the_store() -> None:
    async def use() -> None:
        await ts.initialize()
        await ts.put_state_dict({"w": ONES}, "policy")

    asyncio.run(use())
    try:
        torch.multiprocessing.spawn(child, args=("",), nprocs=2)
        assert asyncio.run(ts.keys("rank")) == ["rank.0", "rank.1"]
    finally:
        asyncio.run(ts.shutdown())


def test_it_is_not_installed_over_torchstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchstore", tssd)
    with pytest.raises(RuntimeError, match="before"):
        ts.install()


def test_pickles_are_allowed_for_the_whole_store() -> None:
    class Object:
        def __eq__(self, other: object) -> bool:
            return type(other).__name__ == "Object"

    async def use() -> None:
        with pytest.raises(AssertionError, match="initialize"):
            await ts.put("x", 1, store_name="pickles")
        with pytest.raises(ValueError, match="a path"):
            await ts.initialize(store_name="a/b")
        await ts.initialize(store_name="pickles", allow_pickle=True)
        try:
            value = {"object": Object(), "set": {1, 2}, "w": ONES}
            await ts.put("x", value, store_name="pickles")
            await ts.put_state_dict({"y": value}, "z", store_name="pickles")
            for got in (
                await ts.get("x", store_name="pickles"),
                (await ts.get_state_dict("z", store_name="pickles"))["y"],
                (await ts.get_state_dict("z", {"y": {"w": torch.zeros(2)}}, False, "pickles"))["y"],
            ):
                assert got["object"] == value["object"] and got["set"] == {1, 2} and torch.equal(got["w"], ONES)
            assert await ts.get("z/y.set", store_name="pickles") == {1, 2}
            ts._api._initialized.discard("pickles")
            with pytest.raises(RuntimeError, match="allow_pickle=True"):
                await ts.initialize(store_name="pickles")
        finally:
            await ts.shutdown("pickles")

    asyncio.run(use())


def test_spmd_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RuntimeError, match="explicit"):
        asyncio.run(ts.initialize_spmd())
    with pytest.raises(RuntimeError, match="MASTER_ADDR"):
        asyncio.run(ts.initialize_spmd(ts.LocalRankStrategy()))
    env = ts.spmd.SPMDEnv.from_env(master_addr="localhost")
    assert (env.num_hosts, env.group_rank, env.master_port) == (2, 0, 1)
    with pytest.raises(RuntimeError, match="rank 0"):
        soon = timedelta(seconds=0.1)
        asyncio.run(ts.initialize_spmd(ts.LocalRankStrategy(), "alone", env=env, rendezvous_timeout=soon))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="divisible"):
        ts.spmd.SPMDEnv.from_env(master_addr="localhost")


def test_what_is_put_and_deleted_at_once_is_put_or_deleted() -> None:
    async def use() -> None:
        await ts.initialize(store_name="races")
        try:
            for number in range(40):
                key = f"k{number}"
                await ts.put_state_dict({"a": ONES}, key, "races")
                await asyncio.gather(
                    ts.delete_batch([f"{key}/a"], store_name="races"),
                    ts.put_state_dict({"a": ONES, "b": ONES}, key, "races"),
                )
                # Nobody has deleted that.
                assert await ts.exists(f"{key}/b", "races")
                await asyncio.gather(
                    ts.delete_batch([key], store_name="races"),
                    ts.put(key, ONES, "races"),
                    ts.put_state_dict({"a": ONES}, key, "races"),
                    ts.put(f"{key}/a", ONES, "races"),
                )
            four = await asyncio.gather(*[ts.client("races") for _ in range(4)])
            assert all(each is four[0] for each in four)
            with pytest.raises(ValueError, match="settings"):
                await ts.put(".torchstore", 1, "races")
        finally:
            await ts.shutdown("races")

    asyncio.run(use())


def test_a_store_is_one_for_both_ways_to_use_it() -> None:
    async def use() -> None:
        await ts.initialize(store_name="both")
        state = {"model": {"w": ONES, "n": 3}, "list": [ONES, "text"]}
        with tssd.Store("unix:both") as store:
            await ts.put_state_dict(state, "a", "both")
            await ts.put("b", ONES, "both")
            assert same(store.get_state_dict("a"), state) and torch.equal(store.get("b"), ONES)
            store.put_state_dict(state, "c")
            store.put("d", ONES)
            assert same(await ts.get_state_dict("c", store_name="both"), state)
            assert torch.equal(await ts.get("c/model.w", store_name="both"), ONES)
            assert torch.equal(await ts.get("d", store_name="both"), ONES)
            into = {"model": {"w": torch.zeros(2), "n": 0}, "list": [torch.zeros(2), ""]}
            assert same(await ts.get_state_dict("c", into, store_name="both"), state)
        await ts.shutdown("both")

    asyncio.run(use())


def test_a_batch_that_does_not_fit_fills_nothing() -> None:
    async def use() -> None:
        await ts.initialize(store_name="fits")
        try:
            await ts.put_batch({"a": ONES, "b": ONES}, "fits")
            into = torch.zeros(2)
            with pytest.raises(ValueError, match="key `b` has shape"):
                await ts.get_batch({"a": into, "b": torch.zeros(3)}, "fits")
            assert not into.any()
            task = asyncio.ensure_future(ts.put_batch({f"c.{number}": ONES for number in range(2000)}, "fits"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(await ts.keys("c", store_name="fits")) < 2000
        finally:
            await ts.shutdown("fits")

    asyncio.run(use())


def test_a_store_that_another_process_has_ended_can_be_initialized_again() -> None:
    async def use(*code: str) -> None:
        await ts.initialize(store_name="ended")
        await ts.put("a", 1, "ended")
        run("-c", "import asyncio, tssd.torchstore as ts; asyncio.run(ts.shutdown('ended'))")
        await ts.initialize(store_name="ended", allow_pickle=True)
        await ts.put("a", {1}, "ended")
        assert await ts.keys(store_name="ended") == ["a"]
        await ts.shutdown("ended")

    asyncio.run(use())


def test_processes_that_import_torchstore_get_it_by_their_path(tmp_path: Path) -> None:
    path = subprocess.run([sys.executable, "-m", "tssd.torchstore"], capture_output=True, text=True, check=True).stdout
    program = tmp_path / "program.py"
    program.write_text(
        "import torchstore as ts, torchstore.transport.types, multiprocessing\n"
        "from torchstore.transport import TransportType\n"
        "def child(): assert ts.__name__ == 'tssd.torchstore', ts\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join(); child(); raise SystemExit(process.exitcode)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([path.strip(), os.environ["PYTHONPATH"]]))
        run(program)


def test_a_task_that_puts_does_not_tear_what_another_gets() -> None:
    async def use() -> None:
        await ts.initialize(store_name="torn")
        try:
            async def put() -> None:
                for number in range(30):
                    await ts.put("w", torch.full((1 << 16,), float(number)), store_name="torn")

            async def get() -> None:
                for _ in range(30):
                    got = await ts.get("w", store_name="torn")
                    assert (got == got[0]).all()

            await ts.put("w", torch.zeros(1 << 16), store_name="torn")
            await asyncio.gather(put(), get(), put(), get())
        finally:
            await ts.shutdown("torn")

    asyncio.run(use())
