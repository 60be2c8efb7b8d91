"""The store beside torchstore and beside copies of one's own: puts, gets and views of one state dict, in turns.

Usage: python bench/store.py [--mb 512] [--tensors 340] [--rounds 9]

A daemon of this run's own serves it: TSSD_BIN is the command, else the one that PATH has. Writer and reader
each have a connection. torchstore takes part if TSSD_BENCH_TORCHSTORE is a Python that can import it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch
import tssd
from race import (
    Runner,
    State,
    described,
    expect_same,
    like,
    model,
    options,
    race,
    size,
    timed,
    verdict,
)

TORCHSTORE = "TSSD_BENCH_TORCHSTORE"
KEY = "model"


@contextmanager
def daemon(folder: Path, memory: int) -> Iterator[str]:
    command = [os.environ.get("TSSD_BIN", "tssd"), "serve", "--memory-limit", str(memory)]
    socket = folder / "socket"
    with subprocess.Popen([*command, "--socket", socket], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield f"unix:{socket}"
        finally:
            process.terminate()


class Torchstore:
    """torchstore in a process of its own, by its own clock."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.versions = count()
        self.key = ""

    def __call__(self, what: str, key: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, key, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"torchstore_peer.py has ended: run it by {TORCHSTORE} to see why")
        return float(answer)

    def put_new(self) -> float:
        """A version in a key that it alone has: the only way in which no reader sees a mix."""
        if self.key:
            self("delete", self.key)
        self.key = f"model.{next(self.versions)}"
        return self("put", self.key)

    def get_new(self) -> float:
        self.put_new()
        return self("get", self.key)

    def get_same(self) -> float:
        self("put", KEY)
        return self("get", KEY)

    def check(self) -> None:
        self("check", KEY)
        self("check", self.key)


@contextmanager
def torchstore(megabytes: int, tensors: int) -> Iterator[Torchstore | None]:
    python = os.environ.get(TORCHSTORE)
    if not python:
        print(f"torchstore is left out: {TORCHSTORE} names no Python that has it (docs/performance.md)\n")
        yield None
        return
    script = Path(__file__).parent / "torchstore_peer.py"
    command = [python, str(script), str(megabytes), str(tensors)]
    pipe = subprocess.PIPE
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True) as process:
        yield Torchstore(process)


class Stores:
    """A writer and a reader of one model."""

    def __init__(self, url: str, state: State, rounds: int) -> None:
        self.writer, self.reader = tssd.Store(url), tssd.Store(url)
        self.state, self.rounds = state, rounds
        self.into, self.views = like(state), State()
        self.what = f"{described(state)}, {torch.get_num_threads()} threads"
        self.nbytes = size(state)

    def put(self) -> None:
        self.writer.put_state_dict(self.state, KEY)

    def get(self, verify: bool = True) -> None:
        self.reader.get_state_dict(KEY, self.into, verify=verify)

    def view(self, verify: bool = False) -> None:
        self.views = self.reader.get_state_dict(KEY, verify=verify)

    def renew(self) -> None:
        # What was got is dropped first: else three versions are there at once.
        self.views = {}
        self.put()

    def copy(self) -> None:
        for name, tensor in self.state.items():
            self.into[name].copy_(tensor)

    def beside_torchstore(self, peer: Torchstore) -> None:
        race(
            f"put_state_dict, {self.what}",
            Runner("tssd", timed(self.put)),
            Runner("torchstore, key reused: torn", lambda: peer("put", KEY), ratio=2),
            Runner("torchstore, a new key per version", peer.put_new, ratio=4),
            rounds=self.rounds,
            nbytes=self.nbytes,
        )
        race(
            f"get_state_dict(into), verified, a new version each time, {self.what}",
            Runner("tssd", timed(self.get, before=self.put)),
            Runner("torchstore, key reused: torn", peer.get_same, ratio=2),
            Runner("torchstore, a new key per version", peer.get_new, ratio=4),
            rounds=self.rounds,
            nbytes=self.nbytes,
        )
        self.check()
        peer.check()

    def beside_copies(self) -> None:
        copy = Runner("torch copy_", timed(self.copy), ratio=0.8)
        race(
            f"put_state_dict, {self.what}",
            Runner("tssd", timed(self.put)),
            copy,
            rounds=self.rounds,
            nbytes=self.nbytes,
        )
        race(
            f"get_state_dict(into), verified, a new version each time, {self.what}",
            Runner("tssd", timed(self.get, before=self.put)),
            copy,
            Runner("tssd, not verified", timed(lambda: self.get(verify=False), before=self.put)),
            rounds=self.rounds,
            nbytes=self.nbytes,
        )
        self.check()

    def of_views(self) -> None:
        race(
            f"views, a new version each time: handed over, {self.what}",
            Runner("tssd", timed(self.view, before=self.renew)),
            Runner("tssd, verified", timed(lambda: self.view(verify=True), before=self.renew)),
            rounds=self.rounds,
            milliseconds=1,
        )

        def renew() -> None:
            self.renew()
            self.view()

        race(
            f"the same: every byte read once, {self.what}",
            Runner("tssd", timed(lambda: add(self.views), before=renew)),
            Runner("memory of this process's own", timed(lambda: add(self.state)), ratio=0.9),
            rounds=self.rounds,
            nbytes=self.nbytes,
        )
        renew()
        expect_same(self.views, self.state)
        self.views = {}

    def of_tiny_ones(self) -> None:
        state = {f"a.{number}": torch.tensor(float(number)) for number in range(10_000)}
        into = like(state)
        found: State = {}

        def get() -> None:
            nonlocal found
            self.writer.put_state_dict(state, "tiny")
            found = self.reader.get_state_dict("tiny")

        def get_into() -> None:
            self.writer.put_state_dict(state, "tiny")
            self.reader.get_state_dict("tiny", into)

        for name, work in {"get": get, "get(into)": get_into}.items():
            race(
                f"10,000 tiny tensors: put and {name}",
                Runner("tssd", timed(work, before=lambda: found.clear())),
                rounds=self.rounds,
                milliseconds=300,
            )
        get()
        expect_same(found, state)
        expect_same(into, state)

    def of_single_ones(self) -> None:
        """400 tensors, each under a key of its own: what counts is the slowest call."""
        state = {f"single/{number}": torch.full((1024,), float(number)) for number in range(400)}
        into = like(state)
        calls: dict[str, Callable[[str], object]] = {
            "put": lambda key: self.writer.put(key, state[key]),
            "get": lambda key: self.reader.get(key),
            "get(into)": lambda key: self.reader.get(key, into[key]),
        }
        times: dict[str, list[list[float]]] = {name: [] for name in calls}
        for number in range(self.rounds + 1):
            for name, call in calls.items():
                own = [timed(partial(call, key))() for key in state]
                if number > 0:
                    times[name].append(own)
        print(f"400 single calls, 4 KiB each ({self.rounds} rounds, interleaved; medians of rounds)")
        for name, rounds in times.items():
            median = statistics.median(statistics.median(own) for own in rounds) * 1e3
            slowest = statistics.median(max(own) for own in rounds) * 1e3
            print(
                f"  {name:<38} {median:>9.3f} ms, the slowest {slowest:.3f} ms"
                f"   target 1 ms: {verdict(slowest < 1)}"
            )
        print()
        expect_same({key: self.reader.get(key) for key in state}, state)
        expect_same(into, state)

    def check(self) -> None:
        for tensor in self.into.values():
            tensor.zero_()
        self.get()
        expect_same(self.into, self.state)


def add(state: State) -> int:
    """Looks at every word."""
    return sum(int(tensor.view(torch.int16).flatten().view(torch.int64).sum()) for tensor in state.values())


def main() -> None:
    arguments = options(__doc__).parse_args()
    state = model(arguments.mb, arguments.tensors)
    folder = Path(tempfile.mkdtemp())
    try:
        with daemon(folder, 8 * size(state)) as url:
            stores = Stores(url, state, arguments.rounds)
            # Two versions are there at once: from the third on, all memory is warm.
            for _ in range(3):
                stores.put()
                stores.get()
            with torchstore(arguments.mb, arguments.tensors) as peer:
                if peer is not None:
                    stores.beside_torchstore(peer)
            stores.beside_copies()
            stores.of_views()
            stores.of_tiny_ones()
            stores.of_single_ones()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
