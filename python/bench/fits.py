"""Measured points for the cost model of an operation: costs per call, per tensor and per byte."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import records
from files import empty_folder, touch_pages
from formats import DCP, SAFETENSORS, TORCH, TSSD, Format
from model import Model, State, copy_structure, expect_same, model_from_spec
from pair import ClientPair
from peer import NEW_KEY, REUSED_KEY, RPC, TorchstoreProcess, torchstore_runners
from race import Role, Rounds, Runner, measure, timed, tssd_runner
from store import COPY

COUNTS = (100, 1_500)
BYTES = (32_000_000, 400_000_000)
FORMATS = (TSSD, SAFETENSORS, TORCH, DCP)
OPERATIONS = {
    "put": "A put of a new version, checksums included",
    "get": "A get in place of a version not read before, verified",
    "save": "A new file, nobody waits for the disk",
    "load": "All of a file, each page touched",
}


@dataclass(frozen=True)
class TorchstoreCase:
    """A way to put and get with torchstore, which is measured together with tssd."""

    name: str
    peer: TorchstoreProcess | None
    put: Callable[[TorchstoreProcess], float]
    get: Callable[[TorchstoreProcess], float]
    rounds: Rounds
    counts: tuple[int, ...] = COUNTS


#: The name of an operation, its preparation, and its runners.
Operation = tuple[str, Callable[[], object], list[Runner]]
#: Times in seconds, by operation, by runner, and by the number of tensors and bytes.
Points = dict[str, dict[str, dict[tuple[int, int], list[float]]]]


def fits(
    folder: Path,
    rounds: Rounds,
    shm_peer: TorchstoreProcess | None,
    rpc_peer: TorchstoreProcess | None,
    size: int | None,
) -> None:
    """Measures puts, gets, saves and loads of few and many tensors, small and large."""
    points: Points = {operation: {} for operation in OPERATIONS}
    roles: dict[str, Role] = {}
    cases = [TorchstoreCase(REUSED_KEY, shm_peer, TorchstoreProcess.put_same, TorchstoreProcess.get_same, rounds)]
    if shm_peer:
        # A put of 400 MB in 1,500 tensors allocates 11 GB of new memory, which takes 10 s.
        put, get = TorchstoreProcess.put_new, TorchstoreProcess.get_new
        cases.append(TorchstoreCase(NEW_KEY, shm_peer, put, get, rounds, (100, 400)))
    if rpc_peer:
        # A round by RPC takes seconds.
        put, get = TorchstoreProcess.put_same, TorchstoreProcess.get_same
        cases.append(TorchstoreCase(RPC, rpc_peer, put, get, rounds.at_most(1)))

    def measure_all(model: Model, operations: list[Operation], rounds: Rounds) -> None:
        for operation, prepare, runners in operations:
            prepare()
            times = measure(runners, rounds)
            for runner in runners:
                roles[runner.name] = runner.role
                times_by_size = points[operation].setdefault(runner.name, {})
                times_by_size.setdefault((model.count, model.nbytes), []).extend(times[runner.name])

    sizes = [min(nbytes, size or nbytes) for nbytes in BYTES]
    for count in sorted({count for case in cases for count in case.counts}):
        for nbytes in sizes:
            model = model_from_spec(f"uniform:{count}:{nbytes}")
            if count in COUNTS:
                measure_all(model, file_operations(folder, model), rounds)
            # For 400 MB in 1,500 tensors, torchstore uses 11 GB (shared memory) or 13 GB (RPC). So only one runs at a
            # time.
            for case in cases:
                if count in case.counts:
                    with ExitStack() as stack:
                        measure_all(model, store_operations(stack, model, case), case.rounds)
            gc.collect()
    for operation, description in OPERATIONS.items():
        print(f"fit {operation}: {description} (medians in ms)")
        runner_records = []
        for name, times_by_size in points[operation].items():
            row = "  ".join(
                f"{tensors:,} x {nbytes / tensors / 1e3:,.0f} kB: {statistics.median(seconds) * 1e3:.2f}"
                for (tensors, nbytes), seconds in times_by_size.items()
            )
            print(f"  {name:<30} {row}", flush=True)
            rows = [
                {"tensors": tensors, "bytes": nbytes, "seconds": seconds}
                for (tensors, nbytes), seconds in times_by_size.items()
            ]
            runner_records.append({"name": name, "role": roles[name], "points": rows})
        print()
        records.write("fit", {"operation": operation, "what": description, "runners": runner_records})


def store_operations(stack: ExitStack, model: Model, case: TorchstoreCase) -> list[Operation]:
    """Returns the puts and gets of tssd and of torchstore."""
    pair = stack.enter_context(ClientPair(model, copy_structure(model.state)))

    def copy() -> None:
        for name, tensor in model.state.items():
            pair.into[name].copy_(tensor)

    if case.peer is not None:
        stack.callback(case.peer.stop)
        case.peer.select_model(model, None)
    limit = Runner(COPY, timed(copy, before=copy), "limit")
    puts = [
        tssd_runner(timed(pair.put), pair.check_put),
        *torchstore_runners(case.peer, TorchstoreProcess.check_put, (case.name, case.put, None)),
        limit,
    ]
    gets = [
        tssd_runner(timed(pair.get_into, before=pair.clear_and_put), pair.check_filled),
        *torchstore_runners(case.peer, TorchstoreProcess.check_get, (case.name, case.get, None)),
        limit,
    ]
    return [("put", pair.warm_up, puts), ("get", pair.warm_up, gets)]


def file_operations(folder: Path, model: Model) -> list[Operation]:
    """Returns the saves and loads of all formats."""

    def save(file_format: Format) -> None:
        file_format.save(model.state, folder / file_format.name)

    def load(file_format: Format) -> State:
        state = file_format.load(folder / file_format.name, model.state)
        touch_pages(state)
        return state

    def save_all() -> None:
        empty_folder(folder)
        for file_format in FORMATS:
            save(file_format)

    def expect(found: State) -> None:
        expect_same(found, model.state)

    def expect_saved(file_format: Format, _: object) -> None:
        expect(load(file_format))

    saves = [
        Runner(
            file_format.name,
            timed(partial(save, file_format), before=partial(empty_folder, folder)),
            file_format.role,
            check=partial(expect_saved, file_format),
        )
        for file_format in FORMATS
    ]
    loads = [
        Runner(file_format.loader_name, timed(partial(load, file_format)), file_format.role, check=expect)
        for file_format in FORMATS
    ]
    return [("save", save_all, saves), ("load", save_all, loads)]
