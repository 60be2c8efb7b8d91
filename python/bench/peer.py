"""torchstore in another process, with a daemon, a client that puts, and a client that gets.

The process measures its own times.
"""

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
REUSED_KEY = "torchstore, key reused: torn"
NEW_KEY = "torchstore, a new key per version"
#: The transport between hosts without shared memory.
RPC = "torchstore by RPC"


class TorchstoreProcess:
    """A process of torchstore_peer.py. It is controlled by lines of text."""

    def __init__(self, python: str, transport: str) -> None:
        self.python, self.transport = python, transport
        #: The process. The first command starts it.
        self.process: subprocess.Popen[str] | None = None
        self.versions = count()
        #: The last key that was created for one version, and the key of the last put.
        self.key = self.last = ""

    def __call__(self, command: str, argument: str = KEY) -> float:
        if command == "put":
            self.last = argument
        return self.request(command, argument)[0]

    def request(self, command: str, argument: str) -> list[float]:
        if self.process is None:
            arguments = [self.python, str(Path(__file__).parent / "torchstore_peer.py"), self.transport]
            pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
            self.process = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(command, argument, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"torchstore_peer.py has ended at {command}: run it by {TORCHSTORE} to see why")
        return [float(each) for each in answer.split()]

    def stop(self) -> None:
        """Stops the process, which frees its memory. The next command starts another process."""
        if self.process is not None:
            self.process.communicate()
            self.process = None

    def select_model(self, model: Model, size: int | None) -> None:
        """Selects the model for the next puts and gets. Deletes all keys of the previous one."""
        self.key = ""
        self("use", f"{size or 0} {model.spec}")

    def put_new(self) -> float:
        """Puts a version under a new key. Only in this way, no reader sees a mix of two versions."""
        if self.key:
            self("delete", self.key)
        self.key = f"model.{next(self.versions)}"
        return self("put", self.key)

    def get_new(self) -> float:
        self.put_new()
        return self("get", self.key)

    def get_first(self) -> float:
        """Measures the first get of a new reader."""
        self.put_new()
        return self("first", self.key)

    def put_same(self) -> float:
        return self("put")

    def get_same(self) -> float:
        self("put")
        return self("get")

    def put_and_get_new(self) -> float:
        return self.put_new() + self("get", self.key)

    def put_and_get_same(self) -> float:
        return self.put_same() + self("get")

    def check_get(self) -> None:
        """Raises an error unless the last get returned the values that were put."""
        self("check", self.last)

    def check_put(self) -> None:
        """Raises an error unless a get returns the values of the last put."""
        self("get", self.last)
        self.check_get()


@contextmanager
def torchstore(transport: str = "SharedMemory") -> Iterator[TorchstoreProcess | None]:
    """Yields a peer that runs torchstore; None if TSSD_BENCH_TORCHSTORE is not set."""
    python = os.environ.get(TORCHSTORE)
    if not python:
        print(f"torchstore is left out: {TORCHSTORE} names no Python that has it (docs/performance.md)\n")
        yield None
        return
    peer = TorchstoreProcess(python, transport)
    try:
        yield peer
    finally:
        peer.stop()


def torchstore_runners(
    peer: TorchstoreProcess | None,
    check: Callable[[TorchstoreProcess], object],
    *runs: tuple[str, Callable[[TorchstoreProcess], float], float | None],
) -> list[Runner]:
    """Returns the runners of torchstore. Empty if it does not take part."""
    if peer is None:
        return []
    return [
        Runner(name, partial(run, peer), target=target, check=lambda _: check(peer))
        for name, run, target in runs
    ]
