"""Transfer of a state dict from the ranks of a trainer to those of a generator.

The generator has another sharding. Each rank is a process with one thread. All ranks begin at the same time, and the
slowest one counts.
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
from layouts import RANKS, RESHARDS, make_matrices
from model import Model, make_model
from peer import REUSED_KEY, TORCHSTORE
from race import Role, Rounds, Runner, race

BYTES = 250_000_000


class RankProcesses:
    """The processes of all ranks. They run each command at the same time."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def __call__(self, *words: str) -> float:
        """Runs a command on all ranks. Returns the time of the slowest one, in seconds."""
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

    def put_and_get(self, method: str, name: str) -> float:
        self(method, "put", name)
        return self(method, "get", name)


@contextmanager
def start_ranks(nbytes: int, url: str) -> Iterator[RankProcesses]:
    """Starts the ranks that run tssd and DCP, in the same processes."""
    with start_processes("reshard_rank.py", [[str(rank), str(nbytes), url] for rank in range(RANKS)]) as found:
        yield found


@contextmanager
def start_torchstore(nbytes: int) -> Iterator[RankProcesses | None]:
    """Starts the process that runs torchstore. It starts the ranks itself. Yields None without torchstore."""
    python = os.environ.get(TORCHSTORE)
    if not python:
        yield None
        return
    with start_processes("reshard_torchstore.py", [[str(nbytes)]], python) as found:
        yield found


@contextmanager
def start_processes(script: str, arguments: list[list[str]], python: str | None = None) -> Iterator[RankProcesses]:
    """Starts one process for each list of arguments, all with the same folder."""
    scripts, folder = Path(__file__).parent, Path(tempfile.mkdtemp())
    processes = [
        subprocess.Popen(
            [python or sys.executable, str(scripts / script), str(folder), *process_arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if python else None,
            text=True,
            # Processes that these start must find the modules of this folder too.
            env={**os.environ, "PYTHONPATH": str(scripts)} if python else None,
            start_new_session=True,
        )
        for process_arguments in arguments
    ]
    try:
        yield RankProcesses(processes)
    finally:
        for process in processes:
            assert process.stdin is not None
            # If the rank has exited, its pipe is closed.
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in processes:
            stop_process(process)
        shutil.rmtree(folder)


def stop_process(process: subprocess.Popen[str]) -> None:
    """Waits until a process exits. After 5 seconds, kills it and the processes that it started."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reshard(rounds: Rounds, size: int | None) -> None:
    """Measures the transfers between all pairs of layouts in `RESHARDS`."""
    nbytes = min(BYTES, size or BYTES)
    whole = make_model("square matrices", "", dict(make_matrices(nbytes)))
    with ExitStack() as stack:
        url = stack.enter_context(daemon(8 * nbytes))
        processes = stack.enter_context(start_ranks(nbytes, url))
        torchstore_processes = stack.enter_context(start_torchstore(nbytes))
        for name, (description, *_) in RESHARDS.items():
            measure_reshard(name, description, processes, torchstore_processes, whole, rounds)


def measure_reshard(
    name: str,
    description: str,
    processes: RankProcesses,
    torchstore_processes: RankProcesses | None,
    whole: Model,
    rounds: Rounds,
) -> None:
    # Two versions exist at a time, so from the third on, all memory is warm.
    for _ in range(3):
        processes.put_and_get("tssd", name)
    for case, operation in (("reshard put", "put"), ("reshard get", "get")):
        peers = []
        if torchstore_processes is not None:
            peers.append(runner(REUSED_KEY, torchstore_processes, "torchstore", operation, name))
        race(
            case,
            f"{description}, {'all writers' if operation == 'put' else 'all readers, in place'}",
            runner("tssd", processes, "tssd", operation, name, "ours"),
            *peers,
            runner("DCP, files not synced", processes, "dcp", operation, name),
            Runner("torch copy_", partial(run, processes, "copy", operation, name), "limit"),
            model=whole,
            rounds=rounds,
        )


def runner(label: str, processes: RankProcesses, method: str, operation: str, name: str, role: Role = "peer") -> Runner:
    def check(_: object) -> None:
        if operation == "put":
            processes(method, "get", name)
        processes(method, "check", name)

    return Runner(label, partial(run, processes, method, operation, name), role, check=check)


def run(processes: RankProcesses, method: str, operation: str, name: str) -> float:
    return processes(method, "put", name) if operation == "put" else processes.put_and_get(method, name)
