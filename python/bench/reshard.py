"""One state dict on the ranks of a trainer, then on those of a generator, with another sharding.

Each rank is a process of one thread. All begin together, and what counts is the slowest of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from daemon import daemon
from layouts import RANKS, RESHARDS, wholes
from model import Model, model
from peer import REUSED, TORCHSTORE
from race import Role, Rounds, Runner, race

BYTES = 250_000_000


class Ranks:
    """Processes that do the same at the same time."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def __call__(self, *words: str) -> float:
        """The seconds of the slowest."""
        for number, process in enumerate(self.processes):
            assert process.stdin is not None
            try:
                print(*words, file=process.stdin, flush=True)
            except BrokenPipeError:
                raise RuntimeError(f"rank {number} had ended before {' '.join(words)}: run {process.args} to see why") from None
        seconds = 0.0
        for number, process in enumerate(self.processes):
            assert process.stdout is not None
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"rank {number} has ended at {' '.join(words)}")
            seconds = max(seconds, float(answer))
        return seconds

    def put_and_get(self, way: str, name: str) -> float:
        self(way, "put", name)
        return self(way, "get", name)


@contextmanager
def ranks(nbytes: int, url: str) -> Iterator[Ranks]:
    """Ours, and those of DCP: the same processes."""
    with started("reshard_rank.py", [[str(rank), str(nbytes), url] for rank in range(RANKS)]) as found:
        yield found


@contextmanager
def torchstore(nbytes: int) -> Iterator[Ranks | None]:
    """One process, which starts the ranks itself."""
    python = os.environ.get(TORCHSTORE)
    if not python:
        yield None
        return
    with started("reshard_torchstore.py", [[str(nbytes)]], python) as found:
        yield found


@contextmanager
def started(script: str, arguments: list[list[str]], python: str | None = None) -> Iterator[Ranks]:
    """A process for each, all with the same folder."""
    here, folder = Path(__file__).parent, Path(tempfile.mkdtemp())
    processes = [
        subprocess.Popen(
            [python or sys.executable, str(here / script), str(folder), *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if python else None,
            text=True,
            # Processes that these start find our modules too.
            env={**os.environ, "PYTHONPATH": str(here)} if python else None,
            start_new_session=True,
        )
        for own in arguments
    ]
    try:
        yield Ranks(processes)
    finally:
        for process in processes:
            assert process.stdin is not None
            # A rank that has ended has closed it.
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in processes:
            end(process)
        shutil.rmtree(folder)


def end(process: subprocess.Popen[str]) -> None:
    """It ends by itself when there is nothing more to do; with what it started, if that takes long."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reshard(rounds: Rounds, size: int | None) -> None:
    """Every layout to every other."""
    nbytes = min(BYTES, size or BYTES)
    whole = model("square matrices", "", dict(wholes(nbytes)))
    with ExitStack() as stack:
        url = stack.enter_context(daemon(8 * nbytes))
        here = stack.enter_context(ranks(nbytes, url))
        there = stack.enter_context(torchstore(nbytes))
        for name, (what, *_) in RESHARDS.items():
            one_way(name, what, here, there, whole, rounds)


def one_way(
    name: str, what: str, here: Ranks, there: Ranks | None, whole: Model, rounds: Rounds
) -> None:
    # Two versions are there at once: from the third on all memory is warm.
    for _ in range(3):
        here.put_and_get("tssd", name)
    for case, run in (("reshard put", "put"), ("reshard get", "get")):
        others = [runner(REUSED, there, "torchstore", run, name)] if there is not None else []
        race(
            case,
            f"{what}, {'all writers' if run == 'put' else 'all readers, in place'}",
            runner("tssd", here, "tssd", run, name, "ours"),
            *others,
            runner("DCP, files not synced", here, "dcp", run, name),
            Runner("torch copy_", partial(turn, here, "copy", run, name), "limit"),
            model=whole,
            rounds=rounds,
        )


def runner(called: str, ranks: Ranks, way: str, run: str, name: str, role: Role = "peer") -> Runner:
    def check(_: object) -> None:
        if run == "put":
            ranks(way, "get", name)
        ranks(way, "check", name)

    return Runner(called, partial(turn, ranks, way, run, name), role, check=check)


def turn(ranks: Ranks, way: str, run: str, name: str) -> float:
    return ranks(way, "put", name) if run == "put" else ranks.put_and_get(way, name)
