"""torchstore in a process of its own, by its own clock: a daemon of its own, one client that puts, one that gets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from model import Model
from race import Runner

TORCHSTORE = "TSSD_BENCH_TORCHSTORE"
KEY = "model"
REUSED = "torchstore, key reused: torn"
NEW = "torchstore, a new key per version"
#: Where hosts share no memory.
RPC = "torchstore by RPC"


class Peer:
    """What is asked of it, line by line."""

    def __init__(self, python: str, transport: str) -> None:
        self.python, self.transport = python, transport
        #: Started by what is first asked of it.
        self.process: subprocess.Popen[str] | None = None
        self.versions = count()
        #: The last of those that have one version each, and what was put last.
        self.key = self.last = ""

    def __call__(self, what: str, argument: str = KEY) -> float:
        if what == "put":
            self.last = argument
        return self.ask(what, argument)[0]

    def ask(self, what: str, argument: str) -> list[float]:
        if self.process is None:
            command = [self.python, str(Path(__file__).parent / "torchstore_peer.py"), self.transport]
            pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, argument, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"torchstore_peer.py has ended at {what}: run it by {TORCHSTORE} to see why")
        return [float(each) for each in answer.split()]

    def end(self) -> None:
        """Its process ends and gives back its memory; what is asked next starts another."""
        if self.process is not None:
            self.process.communicate()
            self.process = None

    def use(self, model: Model, size: int | None) -> None:
        """From now on it puts and gets this one, and what it had is deleted."""
        self.key = ""
        self("use", f"{size or 0} {model.word}")

    def put_new(self) -> float:
        """A version in a key that it alone has: the only way in which no reader sees a mix."""
        if self.key:
            self("delete", self.key)
        self.key = f"model.{next(self.versions)}"
        return self("put", self.key)

    def get_new(self) -> float:
        self.put_new()
        return self("get", self.key)

    def get_first(self) -> float:
        """The first get of a reader."""
        self.put_new()
        return self("first", self.key)

    def put_same(self) -> float:
        return self("put")

    def get_same(self) -> float:
        self("put")
        return self("get")

    def both_new(self) -> float:
        return self.put_new() + self("get", self.key)

    def both_same(self) -> float:
        return self.put_same() + self("get")

    def expect_got(self) -> None:
        """Fails unless the last get has brought what was put."""
        self("check", self.last)

    def expect_put(self) -> None:
        """Fails unless what was put last can be got."""
        self("get", self.last)
        self.expect_got()


@contextmanager
def torchstore(transport: str = "SharedMemory") -> Iterator[Peer | None]:
    python = os.environ.get(TORCHSTORE)
    if not python:
        print(f"torchstore is left out: {TORCHSTORE} names no Python that has it (docs/performance.md)\n")
        yield None
        return
    peer = Peer(python, transport)
    try:
        yield peer
    finally:
        peer.end()


def runners(
    peer: Peer | None,
    check: Callable[[Peer], object],
    *named: tuple[str, Callable[[Peer], float], float | None],
) -> list[Runner]:
    """Those of torchstore: nobody where it does not take part."""
    if peer is None:
        return []
    return [
        Runner(name, partial(turn, peer), target=target, check=lambda _: check(peer))
        for name, turn, target in named
    ]
