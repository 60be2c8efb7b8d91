"""The store beside torchstore and beside copies of one's own: puts, gets and views of one state dict.

Memory is warm where it is measured, but for what is said to be the first.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from functools import partial

import peer
import torch
from model import State, clear, expect_same, like, named, tensors
from pair import Pair
from peer import KEY, NEW, REUSED, RPC, Peer
from race import Role, Rounds, Runner, Timed, ours, race, report, timed

COPY = "torch copy_"


class Stores:
    """Races of a writer and a reader of one model."""

    def __init__(
        self, pair: Pair, rounds: Rounds, others: tuple[Peer | None, Peer | None], size: int | None
    ) -> None:
        self.pair, self.model, self.rounds = pair, pair.model, rounds
        self.peer, self.far = others
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
            ours(timed(self.pair.put)),
            *peer.runners(self.peer, (REUSED, lambda own: own("put"), 2), (NEW, Peer.put_new, 4)),
            *peer.runners(self.far, (RPC, lambda own: own("put"), None)),
            Runner(COPY, timed(self.copy), "limit", 0.8),
        )

    def get(self) -> None:
        """A get into tensors that are there."""
        own = self.pair
        self.race(
            "get",
            "in place, a version not read before, verified",
            ours(timed(own.get_into, before=own.put)),
            *peer.runners(self.peer, (REUSED, Peer.get_same, 2), (NEW, Peer.get_new, 4)),
            *peer.runners(self.far, (RPC, Peer.get_same, None)),
            Runner(COPY, timed(self.copy), "limit", 0.8),
            Runner("tssd, not verified", timed(partial(own.get_into, False), before=own.put), "also"),
        )
        self.check()

    def first_put(self) -> None:
        """A put where all memory is new."""
        new = Pair(self.model, self.pair.into)
        self.first(
            "put",
            "the first version of a store that is new",
            timed(new.put, before=new.start, after=new.stop),
            Peer.put_new,
            Runner("torch copy_ to new shared memory", timed(self.copy_shared), "limit"),
        )

    def first_get(self) -> None:
        """A get where the store's memory is new to the reader."""
        new = Pair(self.model, self.pair.into)

        def start_and_put() -> None:
            new.start()
            new.put()
            clear(new.into)

        def check_and_stop() -> None:
            expect_same(new.into, self.model.state)
            new.stop()

        self.first(
            "get",
            "by a reader that is new, in place, verified",
            timed(new.get_into, before=start_and_put, after=check_and_stop),
            Peer.get_first,
            Runner(COPY, timed(self.copy), "limit"),
        )

    def first(
        self, case: str, what: str, run: Timed, theirs: Callable[[Peer], float], limit: Runner
    ) -> None:
        """Stores are new in each turn, and so is a key of torchstore."""
        self.race(f"first {case}", what, ours(run), *peer.runners(self.peer, (NEW, theirs, None)), limit)

    def view(self) -> None:
        """Tensors that are views of the store: handed over, and looked at."""
        own = self.pair

        def renew() -> None:
            own.drop()
            own.put()

        def renew_and_get() -> None:
            renew()
            own.get_views(False)

        self.race(
            "views",
            "of a version not read before, handed over",
            ours(timed(partial(own.get_views, False), before=renew)),
            Runner("tssd, verified", timed(own.get_views, before=renew), "also"),
            *peer.runners(self.peer, (REUSED, Peer.get_same, None)),
            milliseconds=1,
        )
        self.race(
            "views read",
            "every byte of them read once",
            ours(timed(lambda: add(own.views), before=renew_and_get)),
            Runner("memory of this process's own", timed(lambda: add(self.model.state)), "limit", 0.9),
        )
        renew_and_get()
        expect_same(own.views, self.model.state)
        own.drop()

    def put_and_get(self, name: str, milliseconds: float | None = None) -> None:
        """Both in one turn."""
        self.both(f"{name} put and get", "into tensors that are there", self.pair.put_and_get_into, milliseconds)

    def put_and_view(self, name: str, milliseconds: float | None = None) -> None:
        """Both in one turn, the get without a copy."""
        self.both(f"{name} put and views", "views", self.pair.put_and_get_views, milliseconds)

    def both(
        self, case: str, what: str, work: Callable[[], object], milliseconds: float | None
    ) -> None:
        self.race(
            case,
            f"a new version, {what}",
            ours(timed(work, before=self.pair.drop)),
            *peer.runners(self.peer, (REUSED, Peer.both_same, None), (NEW, Peer.both_new, None)),
            milliseconds=milliseconds,
        )

    def copy(self) -> None:
        for target, tensor in zip(tensors(self.pair.into), tensors(self.model.state), strict=True):
            target.copy_(tensor)

    def copy_shared(self) -> None:
        """Into new memory that others could map."""
        left = torch.frombuffer(mmap.mmap(-1, self.model.nbytes), dtype=torch.uint8)
        for tensor in tensors(self.model.state):
            left[: tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            left = left[tensor.nbytes :]

    def check(self) -> None:
        """Fails unless all get what they have put."""
        self.pair.check()
        if self.peer is not None:
            self.peer.check()
        if self.far is not None:
            self.far.check(KEY)


def single(rounds: Rounds, other: Peer | None) -> None:
    """400 tensors, each under a key of its own: what counts is the slowest call.

    One of some thousand ways there and back through a bare socket takes milliseconds on a machine that others use too:
    there are rounds enough for most of them to have none such.
    """
    model = named("uniform:400:1638400")
    state = model.state
    with Pair(model, like(state)) as pair:
        writer, reader, into = pair.writer, pair.reader, pair.into
        calls: dict[str, Callable[[str], object]] = {
            "put": lambda key: writer.put(key, state[key]),
            "get": lambda key: reader.get(key),
            "get in place": lambda key: reader.get(key, into[key]),
        }
        slowest: dict[str, list[float]] = {name: [] for name in calls}
        medians: dict[str, list[float]] = {name: [] for name in calls}
        theirs: list[list[float]] = []
        if other is not None:
            other.use(model, None)
        for number in range(rounds.warmup + 3 * rounds.iterations):
            counts = number >= rounds.warmup
            for name, call in calls.items():
                own = [timed(partial(call, key))() for key in state]
                if counts:
                    slowest[name].append(max(own))
                    medians[name].append(statistics.median(own))
            if other is not None:
                answer = other.ask("single", KEY)
                if counts:
                    theirs.append(answer)
        for which, times, first in (("the slowest", slowest, 0), ("the median", medians, 2)):
            for name, own in times.items():
                rows: list[tuple[str, Role, list[float]]] = [("tssd", "ours", own)]
                column = first + (name != "put")
                if theirs and name != "get":
                    rows.append(("torchstore", "peer", [answer[column] for answer in theirs]))
                report(
                    f"single {name}",
                    f"{which} of 400 calls, 4 KB each",
                    *(Runner(runner, never, role) for runner, role, _ in rows),
                    times={runner: seconds for runner, _, seconds in rows},
                    model=model,
                    milliseconds=1 if times is slowest else None,
                )
        expect_same({key: reader.get(key) for key in state}, state)
        expect_same(into, state)


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
