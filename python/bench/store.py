"""The store beside torchstore and beside copies of one's own: puts, gets and views of one state dict.

Memory is warm where it is measured, but for what is said to be the first. What each has put or got last is compared
with its source before anybody else takes a turn.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from functools import partial

import bare
import peer
import torch
from bare import Bare
from model import State, clear, expect_same, like, named, tensors
from pair import Pair
from peer import KEY, NEW, REUSED, RPC, Peer
from race import Role, Rounds, Runner, Timed, ours, race, report, timed

COPY = "torch copy_"
#: What torchstore does in one turn, and what that is called.
Turns = tuple[tuple[str, Callable[[Peer], float]], ...]
BOTH: Turns = ((REUSED, Peer.both_same), (NEW, Peer.both_new))


class Stores:
    """Races of a writer and a reader of one model."""

    def __init__(
        self, pair: Pair, rounds: Rounds, others: tuple[Peer | None, Peer | None], size: int | None
    ) -> None:
        self.pair, self.model, self.rounds = pair, pair.model, rounds
        self.peer, self.far = others
        self.copies = list(zip(tensors(pair.into), tensors(pair.model.state), strict=True))
        for other in others:
            if other is not None:
                other.use(self.model, size)
        pair.warm()

    def race(self, case: str, what: str, *runners: Runner, milliseconds: float | None = None) -> None:
        race(case, what, *runners, model=self.model, rounds=self.rounds, milliseconds=milliseconds)

    def put(self) -> None:
        """A put of a version."""
        self.race(
            "put",
            "a new version, checksums included",
            ours(timed(self.pair.put), self.pair.expect_put),
            *peer.runners(
                self.peer, Peer.expect_put, (REUSED, Peer.put_same, 2), (NEW, Peer.put_new, 4)
            ),
            *peer.runners(self.far, Peer.expect_put, (RPC, Peer.put_same, None)),
            self.copy_warm(0.8),
        )

    def get(self) -> None:
        """A get into tensors that are there."""
        own = self.pair
        self.race(
            "get",
            "in place, a version not read before, verified",
            ours(timed(own.get_into, before=own.put_anew), own.expect_filled),
            *peer.runners(self.peer, Peer.expect_got, (REUSED, Peer.get_same, 2), (NEW, Peer.get_new, 4)),
            *peer.runners(self.far, Peer.expect_got, (RPC, Peer.get_same, None)),
            self.copy_warm(0.8),
            Runner(
                "tssd, not verified",
                timed(partial(own.get_into, False), before=own.put_anew),
                "also",
                check=own.expect_filled,
            ),
        )

    def first_put(self) -> None:
        """A put where all memory is new."""
        with Pair(self.model, self.pair.into) as new:
            self.first(
                "put",
                "the first version of a store that is new",
                ours(timed(new.put, before=new.restart), new.expect_put),
                peer.runners(self.peer, Peer.expect_put, (NEW, Peer.put_new, None)),
                Runner("torch copy_ to new shared memory", timed(self.copy_shared), "limit"),
            )

    def first_get(self) -> None:
        """A get where the store's memory is new to the reader."""
        with Pair(self.model, self.pair.into) as new:

            def restart_and_put() -> None:
                new.restart()
                new.put_anew()

            self.first(
                "get",
                "by a reader that is new, in place, verified",
                ours(timed(new.get_into, before=restart_and_put), new.expect_filled),
                peer.runners(self.peer, Peer.expect_got, (NEW, Peer.get_first, None)),
                self.copy_warm(),
            )

    def first(self, case: str, what: str, own: Runner, theirs: list[Runner], limit: Runner) -> None:
        """Stores are new in each turn, and so is a key of torchstore."""
        self.race(f"first {case}", what, own, *theirs, limit)

    def view(self) -> None:
        """Tensors that are views of the store: handed over, and looked at."""
        own = self.pair

        def renew() -> None:
            own.drop()
            own.put()

        def renew_and_get() -> None:
            renew()
            own.get_views(False)

        with Bare() as other:
            self.race(
                "views",
                "of a version not read before, handed over",
                ours(timed(partial(own.get_views, False), before=renew), own.expect_viewed),
                Runner("tssd, verified", timed(own.get_views, before=renew), "also", check=own.expect_viewed),
                *peer.runners(self.peer, Peer.expect_got, (REUSED, Peer.get_same, None)),
                Runner(bare.NAME, timed(other.there_and_back), "limit"),
                milliseconds=1,
            )
        self.race(
            "views read",
            "every byte of them read once",
            ours(timed(lambda: add(own.views), before=renew_and_get), own.expect_viewed),
            Runner("memory of this process's own", timed(lambda: add(self.model.state)), "limit", 0.9),
        )
        own.drop()

    def put_and_get(
        self, name: str, milliseconds: float | None = None, theirs: Turns = BOTH, note: str = ""
    ) -> None:
        """Both in one turn."""
        own = self.pair

        def copy_twice() -> None:
            self.copy()
            self.copy()

        self.both(
            f"{name} put and get",
            f"a new version, into tensors that are there{note}",
            ours(timed(own.put_and_get_into, before=lambda: clear(own.into)), own.expect_filled),
            theirs,
            Runner(f"{COPY}, twice", timed(copy_twice, before=self.copy), "limit"),
            milliseconds,
        )

    def put_and_view(
        self, name: str, milliseconds: float | None = None, theirs: Turns = BOTH, note: str = ""
    ) -> None:
        """Both in one turn, the get without a copy."""
        own = self.pair
        self.both(
            f"{name} put and views",
            f"a new version, views{note}",
            ours(timed(own.put_and_get_views, before=own.drop), own.expect_viewed),
            theirs,
            self.copy_warm(),
            milliseconds,
        )
        own.drop()

    def both(
        self, case: str, what: str, own: Runner, theirs: Turns, limit: Runner, milliseconds: float | None
    ) -> None:
        turns = [(name, turn, None) for name, turn in theirs]
        others = peer.runners(self.peer, Peer.expect_got, *turns)
        self.race(case, what, own, *others, limit, milliseconds=milliseconds)

    def copy_warm(self, target: float | None = None) -> Runner:
        """Once before it counts: else it finds its threads asleep, and a core still busy with somebody's turn before."""
        return Runner(COPY, timed(self.copy, before=self.copy), "limit", target)

    def copy(self) -> None:
        for target, tensor in self.copies:
            target.copy_(tensor)

    def copy_shared(self) -> None:
        """Into new memory that others could map."""
        left = torch.frombuffer(mmap.mmap(-1, self.model.nbytes), dtype=torch.uint8)
        for tensor in tensors(self.model.state):
            left[: tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            left = left[tensor.nbytes :]


def single(rounds: Rounds, other: Peer | None) -> None:
    """400 tensors, each under a key of its own: what counts is the slowest call.

    One of some thousand ways there and back through a bare socket takes milliseconds on a machine that others use too:
    there are rounds enough for most of them to have none such.
    """
    model = named("uniform:400:1638400")
    state = model.state
    with Pair(model, like(state)) as pair, Bare() as way:
        writer, reader, into = pair.writer, pair.reader, pair.into
        calls: dict[str, Callable[[str], object]] = {
            "put": lambda key: writer.put(key, state[key]),
            "get": lambda key: reader.get(key),
            "get in place": lambda key: reader.get(key, into[key]),
            bare.NAME: lambda _: way.there_and_back(),
        }
        slowest: dict[str, list[float]] = {name: [] for name in calls}
        medians: dict[str, list[float]] = {name: [] for name in calls}
        theirs: list[list[float]] = []
        if other is not None:
            other.use(model, None)
        last = rounds.warmup + 3 * rounds.iterations - 1
        for number in range(last + 1):
            counts = number >= rounds.warmup
            clear(into)
            for name, call in calls.items():
                turns = {key: timed(partial(call, key)) for key in state}
                # A view that lives on would keep its version: only those of the last round are looked at.
                own = [seconds_of(turn, keep=number == last) for turn in turns.values()]
                if counts:
                    slowest[name].append(max(own))
                    medians[name].append(statistics.median(own))
                if number == last and name == "get":
                    expect_same({key: turn.take() for key, turn in turns.items()}, state)
            if other is not None:
                answer = other.ask("single", KEY)
                if counts:
                    theirs.append(answer)
        expect_same(into, state)
        for which, times, first in (("the slowest", slowest, 0), ("the median", medians, 2)):
            limit = times.pop(bare.NAME)
            for name, own in times.items():
                rows: list[tuple[str, Role, list[float]]] = [("tssd", "ours", own)]
                column = first + (name != "put")
                if theirs and name != "get":
                    rows.append((REUSED, "peer", [answer[column] for answer in theirs]))
                rows.append((bare.NAME, "limit", limit))
                report(
                    f"single {name}",
                    f"{which} of 400 calls, 4 KB each",
                    *(Runner(runner, never, role) for runner, role, _ in rows),
                    times={runner: seconds for runner, _, seconds in rows},
                    model=model,
                    milliseconds=1 if times is slowest else None,
                )


def seconds_of(turn: Timed, *, keep: bool) -> float:
    seconds = turn()
    if not keep:
        turn.take()
    return seconds


def never() -> float:
    """For runners whose times are there already."""
    raise AssertionError("their turns are over")


def add(state: State) -> int:
    """Looks at every word."""
    total = 0
    for tensor in tensors(state):
        flat = tensor.view(torch.uint8).flatten()
        words = flat[: flat.numel() // 8 * 8].view(torch.int64)
        total += int(words.sum()) + int(flat[words.nbytes :].sum())
    return total
