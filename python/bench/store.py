"""The store beside torchstore and beside copies of one's own: puts, gets and views of one state dict.

A daemon of this run's own serves it. Writer and reader each have a connection. Two versions are there at once:
from the third on all memory is warm, and that is what is measured, but for what is said to be the first.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import peer
import torch
import tssd
from daemon import daemon
from model import Model, State, clear, expect_same, like, named, tensors
from peer import KEY, NEW, REUSED, RPC, Peer
from race import Role, Rounds, Runner, ours, race, report, timed

COPY = "torch copy_"


class Stores:
    """A writer and a reader of one model."""

    def __init__(
        self, url: str, model: Model, rounds: Rounds, others: tuple[Peer | None, Peer | None], size: int | None
    ) -> None:
        self.writer, self.reader = tssd.Store(url), tssd.Store(url)
        self.model, self.rounds = model, rounds
        self.peer, self.far = others
        self.state = model.state
        self.into: State = like(self.state)
        self.views: State = {}
        for other in others:
            if other is not None:
                other.use(model, size)
        for _ in range(3):
            self.put_version()
            self.get_into()

    def put_version(self) -> None:
        self.writer.put_state_dict(self.state, KEY)

    def get_into(self, verify: bool = True) -> None:
        self.reader.get_state_dict(KEY, self.into, verify=verify)

    def get_views(self, verify: bool = False) -> None:
        self.views = self.reader.get_state_dict(KEY, verify=verify)

    def renew(self) -> None:
        # What was got is dropped first: else three versions are there at once.
        self.views = {}
        self.put_version()

    def copy(self) -> None:
        for target, tensor in zip(tensors(self.into), tensors(self.state), strict=True):
            target.copy_(tensor)

    def copy_shared(self) -> None:
        """Into new memory that others could map."""
        left = torch.frombuffer(mmap.mmap(-1, self.model.nbytes), dtype=torch.uint8)
        for tensor in tensors(self.state):
            left[: tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            left = left[tensor.nbytes :]

    def race(self, case: str, what: str, *runners: Runner, milliseconds: float | None = None) -> None:
        race(case, what, *runners, model=self.model, rounds=self.rounds, milliseconds=milliseconds)

    def put(self) -> None:
        """A put of a version."""
        self.race(
            "put",
            "a new version, checksums included",
            ours(timed(self.put_version)),
            *peer.runners(self.peer, (REUSED, lambda own: own("put"), 2), (NEW, Peer.put_new, 4)),
            *peer.runners(self.far, (RPC, lambda own: own("put"), None)),
            Runner(COPY, timed(self.copy), "limit", 0.8),
        )

    def get(self) -> None:
        """A get into tensors that are there."""
        self.race(
            "get",
            "in place, a version not read before, verified",
            ours(timed(self.get_into, before=self.put_version)),
            *peer.runners(self.peer, (REUSED, Peer.get_same, 2), (NEW, Peer.get_new, 4)),
            *peer.runners(self.far, (RPC, Peer.get_same, None)),
            Runner(COPY, timed(self.copy), "limit", 0.8),
            Runner("tssd, not verified", timed(partial(self.get_into, False), before=self.put_version), "also"),
        )
        clear(self.into)
        self.get_into()
        expect_same(self.into, self.state)
        if self.peer is not None:
            self.peer.check()
        if self.far is not None:
            self.far.check(KEY)

    def first_put(self) -> None:
        """A put where all memory is new."""
        first = First(self.model, self.into)
        self.race(
            "first put",
            "the first version of a store that is new",
            ours(timed(first.put, before=first.start, after=first.stop)),
            *peer.runners(self.peer, (NEW, Peer.put_new, None)),
            Runner("torch copy_ to new shared memory", timed(self.copy_shared), "limit"),
        )

    def first_get(self) -> None:
        """A get where the store's memory is new to the reader."""
        first = First(self.model, self.into)
        self.race(
            "first get",
            "by a reader that is new, in place, verified",
            ours(timed(first.get, before=first.start_and_put, after=first.check_and_stop)),
            *peer.runners(self.peer, (NEW, Peer.get_first, None)),
            Runner(COPY, timed(self.copy), "limit"),
        )

    def view(self) -> None:
        """Tensors that are views of the store: handed over, and looked at."""
        self.race(
            "views",
            "of a version not read before, handed over",
            ours(timed(self.get_views, before=self.renew)),
            Runner("tssd, verified", timed(partial(self.get_views, True), before=self.renew), "also"),
            *peer.runners(self.peer, (REUSED, Peer.get_same, None)),
            milliseconds=1,
        )

        def renew() -> None:
            self.renew()
            self.get_views()

        self.race(
            "views read",
            "every byte of them read once",
            ours(timed(lambda: add(self.views), before=renew)),
            Runner("memory of this process's own", timed(lambda: add(self.state)), "limit", 0.9),
        )
        renew()
        expect_same(self.views, self.state)
        self.views = {}

    def close(self) -> None:
        self.views = {}
        self.writer.close()
        self.reader.close()


class First:
    """Stores that are new in each turn."""

    def __init__(self, model: Model, into: State) -> None:
        self.model, self.into = model, into

    def start(self) -> None:
        self.stack = ExitStack()
        url = self.stack.enter_context(daemon(4 * self.model.nbytes))
        self.writer = self.stack.enter_context(tssd.Store(url))
        self.reader = self.stack.enter_context(tssd.Store(url))

    def start_and_put(self) -> None:
        self.start()
        self.put()
        clear(self.into)

    def put(self) -> None:
        self.writer.put_state_dict(self.model.state, KEY)

    def get(self) -> None:
        self.reader.get_state_dict(KEY, self.into)

    def check_and_stop(self) -> None:
        expect_same(self.into, self.model.state)
        self.stop()

    def stop(self) -> None:
        self.stack.close()


def single(rounds: Rounds, other: Peer | None) -> None:
    """400 tensors, each under a key of its own: what counts is the slowest call."""
    model = named("uniform:400:1638400")
    with daemon(64 << 20) as url, tssd.Store(url) as writer, tssd.Store(url) as reader:
        state = model.state
        into: State = like(state)
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
        for number in range(rounds.warmup + rounds.iterations):
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
