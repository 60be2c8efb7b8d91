"""`tssd.torchstore` compared with torchstore, and in processes of Monarch, torchrun, Ray and `spawn`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
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
from equality import same
from processes import GLOO_CONNECT_ERROR, retry_on_gloo_failure, stop_daemons
from torchstore_cases import CASES, to_json

HERE = Path(__file__).parent
ONES = torch.ones(2)

# Cases whose result differs from that of the released torchstore: its result, then that of tssd. The result of a case
# that raises is the class of the error. docs/migration.md has a line for each.
DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "parameter_becomes_tensor": (("Parameter", True), ("Tensor", False)),
    "object_of_custom_class": ("nothing", "TypeError"),
    "delete_missing_key": ("Exception", "KeyError"),
    "get_in_place_with_other_shape": ("nothing", "ValueError"),
    "get_in_place_with_int_dtype": ("nothing", "TypeError"),
    "get_object_in_place": ("ValueError", "TypeError"),
    "get_in_place_into_list": ("ValueError", "TypeError"),
    "get_slice_with_other_global_shape": ("nothing", "RuntimeError"),
    "put_with_other_shape": ("ActorError", [torch.zeros(2, dtype=torch.int32), "text"]),
    "get_state_dict_with_other_shape": ("nothing", "ValueError"),
    "state_dict_structure": (("dict", False, False, ["0"]), ("OrderedDict", True, True, [0])),
    "initialize_twice": (("Exception", "RuntimeError"), ("RuntimeError", "RuntimeError")),
    "reshard_uneven_shape": ("ActorError", [[[(True, True, True)] * count, True] for count in (4, 2, 2)]),
    "unsharded_experts": ("KeyError", [torch.zeros(2, 2), torch.ones(2, 2)]),
}

# Results of cases that need a newer torchstore than the released one.
NEWER_CASES: dict[str, Any] = {
    "batches": (
        {"batches.a": torch.arange(3.0), "batches.b": "text", "batches.c": torch.ones(2, 2)},
        {"batches.a": torch.arange(3.0), "batches.b": "text"},
        True,
    ),
    "invalid_batches": [
        "AssertionError", "ValueError", "ValueError", "ValueError", "TypeError", "KeyError", "KeyError", "TypeError",
        "nothing", torch.zeros(1),
    ],
    "delete_batches": ["delete_batches.c"],
    "delete_incomplete_tensor": True,
    "cast_with_transfer_dtype": (
        {"w": torch.tensor([1.0], dtype=torch.bfloat16), "n": torch.tensor([123457])},
        {"w": torch.tensor([1.0]), "n": torch.tensor([123457])},
        torch.tensor([1.001]),
    ),
    "second_store": ((False, True, ["mine"]), True, False),
}


@pytest.fixture(scope="module", autouse=True)
def own_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Gives these tests daemons of their own, in a separate runtime directory."""
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        yield dict(os.environ)
    stop_daemons(folder)


@retry_on_gloo_failure
def run_python(*command: str | Path, timeout: int = 240) -> None:
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", *command], capture_output=True, text=True, timeout=timeout, cwd=HERE
    )
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-4000:]


def run_cases(module: str, folder: Path, *names: str) -> dict[str, Any]:
    if importlib.util.find_spec("monarch") is None or importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} or Monarch is not installed")
    out = folder / "outcomes.json"
    try:
        run_python("torchstore_cases.py", module, out, *names)
    except AssertionError:
        # On a busy machine, Monarch can abort when a process exits. The results of torchstore are complete by then.
        if module != "torchstore" or not out.exists() or not json.loads(out.read_text()).keys() >= set(names or CASES):
            raise
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.fixture(scope="module")
def tssd_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first = run_cases("tssd.torchstore", tmp_path_factory.mktemp("ours"))
    failed = [name for name, each in first.items() if raised_class(each)]
    # If gloo failed to connect ranks, all failed cases run again: later cases may have failed because of it.
    if not any(GLOO_CONNECT_ERROR in first[name]["raised"] for name in failed):
        return first
    return first | run_cases("tssd.torchstore", tmp_path_factory.mktemp("ours"), *failed)


@pytest.fixture(scope="module")
def reference_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of torchstore.

    They depend on the cases and on the installed packages, so they are stored in the environment, under a hash of both.
    """
    packages = sorted(f"{each.name}=={each.version}" for each in importlib.metadata.distributions())
    inputs = (HERE / "torchstore_cases.py").read_text() + "\n".join(packages)
    stored = Path(sys.prefix) / f"torchstore-results-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        found: dict[str, Any] = json.loads(stored.read_text())
        return found
    results = run_cases("torchstore", tmp_path_factory.mktemp("theirs"))
    # On a busy machine, actors occasionally lose their connection, and later cases fail, too. All of them run again.
    results |= run_cases("torchstore", tmp_path_factory.mktemp("theirs"), *connection_errors(results))
    if not DIFFERENCES.keys() >= set(connection_errors(results)):
        # A case may have lost its connection twice: the next run tries again.
        return results
    with contextlib.suppress(PermissionError):
        temporary = stored.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(results))
        temporary.rename(stored)
    return results


def connection_errors(results: dict[str, Any]) -> list[str]:
    """Returns the cases with an error that a lost connection causes too."""
    return [name for name, each in results.items() if raised_class(each) in ("ActorError", "TimeoutError")]


@pytest.mark.parametrize("name", CASES)
def test_case_matches_torchstore(name: str, tssd_results: dict[str, Any], reference_results: dict[str, Any]) -> None:
    actual, reference = tssd_results[name], raised_class(reference_results[name]) or reference_results[name]
    if name in NEWER_CASES:
        assert reference in ("AttributeError", "TypeError") and actual == as_json(NEWER_CASES[name]), (
            reference_results[name]
        )
    else:
        expected = [actual, actual] if name not in DIFFERENCES else [*map(as_json, DIFFERENCES[name])]
        assert [reference, actual] == expected, reference_results[name]


def raised_class(result: Any) -> str | None:
    """Returns the class of the error that a case has raised, or None."""
    return result["raised"].split(":")[0] if isinstance(result, dict) and "raised" in result else None


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(to_json(value)))


def test_no_case_raises(tssd_results: dict[str, Any]) -> None:
    assert not [each for each in tssd_results.values() if raised_class(each)]


def test_torchrun_ranks_share_a_store(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    run_python(*torchrun, "torchstore_ranks.py", tmp_path)


def test_ray_actors_share_a_store() -> None:
    pytest.importorskip("ray")
    run_python("torchstore_ray.py")


def check_in_child(rank: int, url: str) -> None:
    """Runs in a spawned process, which only imports torchstore."""
    tssd.torchstore.install()
    import torchstore
    from torchstore import api, state_dict_utils
    from torchstore.logging import init_logging
    from torchstore.spmd import SPMDEnv
    from torchstore.strategy import LocalRankStrategy
    from torchstore.transport import TransportType, pipe
    from torchstore.transport.types import Request, TensorSlice

    assert torchstore is ts and pipe.TensorSlice is TensorSlice is tssd.TensorSlice and api.put is torchstore.put
    assert state_dict_utils.DELIM == "/" and SPMDEnv is torchstore.spmd.SPMDEnv
    assert LocalRankStrategy(TransportType.Gloo).default_transport_type is TransportType.Gloo
    part = Request.from_any("", None, TensorSlice((1,), None, torch.Size([2]), (1,), None)).tensor_slice
    init_logging()

    async def scenario() -> None:
        client = await torchstore.client()
        got = await state_dict_utils.get_state_dict(client, "policy")
        assert torch.equal(got["w"], ONES) and torch.equal(await client.get("policy/w", None, part), ONES[1:])
        await torchstore.put(f"rank.{rank}", torch.tensor(rank))

    asyncio.run(scenario())


def test_spawned_processes_find_the_store() -> None:
    async def scenario() -> None:
        await ts.initialize()
        await ts.put_state_dict({"w": ONES}, "policy")

    asyncio.run(scenario())
    try:
        torch.multiprocessing.spawn(check_in_child, args=("",), nprocs=2)
        assert asyncio.run(ts.keys("rank")) == ["rank.0", "rank.1"]
    finally:
        asyncio.run(ts.shutdown())


def test_install_fails_after_import_of_torchstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchstore", tssd)
    with pytest.raises(RuntimeError, match="before"):
        ts.install()


def test_allow_pickle_applies_to_whole_store() -> None:
    class Object:
        def __eq__(self, other: object) -> bool:
            return type(other).__name__ == "Object"

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_errors_have_the_words_of_torchstore() -> None:
    class NoVolume(ts.TorchStoreStrategy):
        pass

    part = tssd.TensorSlice((0,), None, (2,), (1,), None)

    async def scenario() -> None:
        with pytest.raises(AssertionError, match=r"Please call torchstore\.initialize before attempting to use store"):
            await ts.get("x", store_name="words")
        await ts.initialize(store_name="words")
        try:
            await ts.put("object", "text", "words")
            await ts.put_state_dict({"a": ONES, "b": 1}, "policy", "words")
            await ts.delete("policy/a", store_name="words")
            half = tssd.TensorShard(ONES[:1], part)
            with tssd.Store("unix:words") as store:
                for key, name in (("half", ""), ("halves", "w")):
                    store.put_state_dict({name: half}, key, writers=2, writer=0, job="words", wait=False)
            client = await ts.client("words")
            located = "Unable to locate {} in any storage volumes"
            for call, error, words in [
                (client.get("x"), KeyError, located.format("x")),
                (client.get("x/y"), KeyError, located.format("x/y")),
                (client.get_batch(["object", "x"]), KeyError, located.format("x")),
                (client.delete("x"), KeyError, located.format("x")),
                (client.get("half"), KeyError, "DTensor 'half' is only partially committed"),
                (client.get("halves/w"), KeyError, "DTensor 'halves/w' is only partially committed"),
                (client.delete("half"), KeyError, "partially committed"),
                (client.get_state_dict("halves"), RuntimeError, "partially committed"),
                (client.get("policy/a"), KeyError, located.format("policy/a")),
                (client.get_state_dict("policy"), KeyError, located.format("policy/a")),
                (client.get_state_dict("x"), RuntimeError, "Mapping is missing from the store"),
                (client.get("object", ONES), TypeError, "specified but the value stored is an object"),
                (client.get("object", tensor_slice_spec=part), TypeError, "the value stored is an object"),
                (client.get("object", [1]), TypeError, "Must be None, torch.Tensor, or DTensor"),
                (client.get("object", ONES, part), ValueError, "does not match in-place tensor shape"),
                (client.put_state_dict(None, "x", True), AssertionError, "state_dict is required on first"),
                (client.get_state_dict("x", direct_rdma=True), AssertionError, "user_state_dict is required for"),
                (ts.initialize(store_name="words"), RuntimeError, "TorchStore is already initialized"),
            ]:  # fmt: skip
                with pytest.raises(error) as caught:  # type: ignore[arg-type, var-annotated]
                    await call  # type: ignore[misc]
                assert words in str(caught.value), (words, caught.value)
                assert not isinstance(caught.value, tssd.TssdKeyError) or caught.value.kind == "not_found"
                # A program that looks for a missing key finds no key that is there in part.
                assert "partially" not in str(caught.value) or "Unable to locate" not in str(caught.value)
        finally:
            await ts.shutdown("words")

    asyncio.run(scenario())
    with pytest.raises(NotImplementedError, match="NoVolume must implement 'get_volume_id'"):
        NoVolume.get_client_id()


def test_spmd_errors_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_concurrent_put_and_delete_are_atomic() -> None:
    async def scenario() -> None:
        await ts.initialize(store_name="races")
        try:
            for number in range(40):
                key = f"k{number}"
                await ts.put_state_dict({"a": ONES}, key, "races")
                await asyncio.gather(
                    ts.delete_batch([f"{key}/a"], store_name="races"),
                    ts.put_state_dict({"a": ONES, "b": ONES}, key, "races"),
                )
                # No task deletes this entry.
                assert await ts.exists(f"{key}/b", "races")
                await asyncio.gather(
                    ts.delete_batch([key], store_name="races"),
                    ts.put(key, ONES, "races"),
                    ts.put_state_dict({"a": ONES}, key, "races"),
                    ts.put(f"{key}/a", ONES, "races"),
                )
            clients = await asyncio.gather(*[ts.client("races") for _ in range(4)])
            assert all(each is clients[0] for each in clients)
            with pytest.raises(ValueError, match="settings"):
                await ts.put(".torchstore", 1, "races")
        finally:
            await ts.shutdown("races")

    asyncio.run(scenario())


def test_both_apis_share_one_store() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_mismatched_batch_fills_nothing() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_store_ended_by_another_process_is_initialized_again() -> None:
    async def scenario(*code: str) -> None:
        await ts.initialize(store_name="ended")
        await ts.put("a", 1, "ended")
        run_python("-c", "import asyncio, tssd.torchstore as ts; asyncio.run(ts.shutdown('ended'))")
        await ts.initialize(store_name="ended", allow_pickle=True)
        await ts.put("a", {1}, "ended")
        assert await ts.keys(store_name="ended") == ["a"]
        await ts.shutdown("ended")

    asyncio.run(scenario())


def test_pythonpath_replaces_torchstore(tmp_path: Path) -> None:
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
        run_python(program)


def test_concurrent_puts_do_not_tear_gets() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())
