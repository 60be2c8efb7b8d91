"""What an operation costs by itself, for each tensor and for each byte: points from which that is computed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import records
from files import clear, touch
from formats import DCP, SAFETENSORS, TORCH, TSSD, Format
from model import Model, State, expect_same, like, named
from pair import Pair
from peer import KEY, Peer
from race import Role, Rounds, Runner, measure, timed

COUNTS = (100, 1_500)
BYTES = (32_000_000, 400_000_000)
FORMATS = (TSSD, SAFETENSORS, TORCH, DCP)
OPERATIONS = {
    "put": "A put of a new version, checksums included",
    "get": "A get in place of a version not read before, verified",
    "save": "A new file, nobody waits for the disk",
    "load": "All of a file, each page touched",
}
#: Its name, what is done before, who does it, and what is looked at after.
Operation = tuple[str, Callable[[], object], list[Runner], Callable[[], object]]
Points = dict[str, dict[str, list[dict[str, Any]]]]


def fits(folder: Path, rounds: Rounds, other: Peer | None, size: int | None) -> None:
    """Puts, gets, saves and loads of few and many tensors, small and great."""
    points: Points = {operation: {} for operation in OPERATIONS}
    roles: dict[str, Role] = {"torch copy_": "limit"}
    for count in COUNTS:
        for nbytes in BYTES:
            model = named(f"uniform:{count}:{min(nbytes, size or nbytes)}")
            with ExitStack() as stack:
                every = [*stores(stack, model, other), *files(folder, model)]
                for operation, prepare, runners, check in every:
                    prepare()
                    times = measure(runners, rounds)
                    check()
                    for runner in runners:
                        roles[runner.name] = runner.role
                        point = {"tensors": model.count, "bytes": model.nbytes}
                        own = points[operation].setdefault(runner.name, [])
                        own.append({**point, "seconds": times[runner.name]})
            gc.collect()
    for operation, what in OPERATIONS.items():
        print(f"fit {operation}: {what} (medians in ms)")
        for name, own in points[operation].items():
            row = "  ".join(
                f"{each['tensors']:,} x {each['bytes'] / each['tensors'] / 1e3:,.0f} kB:"
                f" {statistics.median(each['seconds']) * 1e3:.2f}"
                for each in own
            )
            print(f"  {name:<14} {row}", flush=True)
        print()
        runners_of = [{"name": name, "role": roles[name], "points": own} for name, own in points[operation].items()]
        records.write("fit", {"operation": operation, "what": what, "runners": runners_of})


def stores(stack: ExitStack, model: Model, other: Peer | None) -> list[Operation]:
    """Puts and gets."""
    own = stack.enter_context(Pair(model, like(model.state)))

    def copy() -> None:
        for name, tensor in model.state.items():
            own.into[name].copy_(tensor)

    puts = [Runner("tssd", timed(own.put), "ours"), Runner("torch copy_", timed(copy), "limit")]
    gets = [Runner("tssd", timed(own.get_into, before=own.put), "ours"), Runner("torch copy_", timed(copy), "limit")]
    if other is not None:
        other.use(model, None)
        puts.insert(1, Runner("torchstore", partial(other, "put")))
        gets.insert(1, Runner("torchstore", partial(Peer.get_same, other)))

    def check() -> None:
        own.check()
        if other is not None:
            other.check(KEY)

    return [("put", own.warm, puts, check), ("get", own.warm, gets, check)]


def files(folder: Path, model: Model) -> list[Operation]:
    """Saves and loads."""

    def save(each: Format) -> None:
        each.save(model.state, folder / each.name)

    def load(each: Format) -> State:
        state = each.load(folder / each.name, model.state)
        touch(state)
        return state

    def save_all() -> None:
        clear(folder)
        for each in FORMATS:
            save(each)

    def check() -> None:
        for each in FORMATS:
            expect_same(each.load(folder / each.name, model.state), model.state)

    def save_all_and_check() -> None:
        save_all()
        check()

    saves = [
        Runner(each.name, timed(partial(save, each), before=partial(clear, folder)), each.role)
        for each in FORMATS
    ]
    loads = [Runner(each.name, timed(partial(load, each)), each.role) for each in FORMATS]
    return [("save", save_all, saves, save_all_and_check), ("load", save_all, loads, check)]
