"""What an operation costs by itself, for each tensor and for each byte: points from which that is computed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peer
import records
from files import clear, touch
from formats import DCP, SAFETENSORS, TORCH, TSSD, Format
from model import Model, State, expect_same, like, named
from pair import Pair
from peer import NEW, REUSED, RPC, Peer
from race import Role, Rounds, Runner, measure, ours, timed
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
class Beside:
    """A way of torchstore's to put and get, beside which ours does."""

    name: str
    peer: Peer | None
    put: Callable[[Peer], float]
    get: Callable[[Peer], float]
    rounds: Rounds
    counts: tuple[int, ...] = COUNTS


#: Its name, what is done before, and who does it.
Operation = tuple[str, Callable[[], object], list[Runner]]
#: The seconds that an operation took somebody, by tensors and bytes.
Points = dict[str, dict[str, dict[tuple[int, int], list[float]]]]


def fits(folder: Path, rounds: Rounds, near: Peer | None, far: Peer | None, size: int | None) -> None:
    """Puts, gets, saves and loads of few and many tensors, small and great."""
    points: Points = {operation: {} for operation in OPERATIONS}
    roles: dict[str, Role] = {}
    others = [Beside(REUSED, near, Peer.put_same, Peer.get_same, rounds)]
    if near:
        # A put of 400 MB in 1,500 tensors takes 11 GB of memory that is new, which takes 10 s.
        others.append(Beside(NEW, near, Peer.put_new, Peer.get_new, rounds, (100, 400)))
    if far:
        # By RPC a turn takes seconds.
        others.append(Beside(RPC, far, Peer.put_same, Peer.get_same, rounds.at_most(1)))

    def race(model: Model, every: list[Operation], rounds: Rounds) -> None:
        for operation, prepare, runners in every:
            prepare()
            times = measure(runners, rounds)
            for runner in runners:
                roles[runner.name] = runner.role
                own = points[operation].setdefault(runner.name, {})
                own.setdefault((model.count, model.nbytes), []).extend(times[runner.name])

    sizes = [min(nbytes, size or nbytes) for nbytes in BYTES]
    for count in sorted({count for other in others for count in other.counts}):
        for nbytes in sizes:
            model = named(f"uniform:{count}:{nbytes}")
            if count in COUNTS:
                race(model, files(folder, model), rounds)
            # torchstore takes 11 GB (shared memory) and 13 GB (RPC) for 400 MB in 1,500 tensors: not both at once.
            for other in others:
                if count in other.counts:
                    with ExitStack() as stack:
                        race(model, stores(stack, model, other), other.rounds)
            gc.collect()
    for operation, what in OPERATIONS.items():
        print(f"fit {operation}: {what} (medians in ms)")
        runners_of = []
        for name, own in points[operation].items():
            row = "  ".join(
                f"{tensors:,} x {nbytes / tensors / 1e3:,.0f} kB: {statistics.median(seconds) * 1e3:.2f}"
                for (tensors, nbytes), seconds in own.items()
            )
            print(f"  {name:<30} {row}", flush=True)
            every = [
                {"tensors": tensors, "bytes": nbytes, "seconds": seconds}
                for (tensors, nbytes), seconds in own.items()
            ]
            runners_of.append({"name": name, "role": roles[name], "points": every})
        print()
        records.write("fit", {"operation": operation, "what": what, "runners": runners_of})


def stores(stack: ExitStack, model: Model, other: Beside) -> list[Operation]:
    """Puts and gets, ours beside those of a torchstore."""
    own = stack.enter_context(Pair(model, like(model.state)))

    def copy() -> None:
        for name, tensor in model.state.items():
            own.into[name].copy_(tensor)

    if other.peer is not None:
        stack.callback(other.peer.end)
        other.peer.use(model, None)
    limit = Runner(COPY, timed(copy, before=copy), "limit")
    puts = [
        ours(timed(own.put), own.expect_put),
        *peer.runners(other.peer, Peer.expect_put, (other.name, other.put, None)),
        limit,
    ]
    gets = [
        ours(timed(own.get_into, before=own.put_anew), own.expect_filled),
        *peer.runners(other.peer, Peer.expect_got, (other.name, other.get, None)),
        limit,
    ]
    return [("put", own.warm, puts), ("get", own.warm, gets)]


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

    def expect(found: State) -> None:
        expect_same(found, model.state)

    def expect_saved(each: Format, _: object) -> None:
        expect(load(each))

    saves = [
        Runner(
            each.name,
            timed(partial(save, each), before=partial(clear, folder)),
            each.role,
            check=partial(expect_saved, each),
        )
        for each in FORMATS
    ]
    loads = [Runner(each.loader, timed(partial(load, each)), each.role, check=expect) for each in FORMATS]
    return [("save", save_all, saves), ("load", save_all, loads)]
