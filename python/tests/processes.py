"""The processes of tests: daemons, and ranks that communicate over gloo."""

from __future__ import annotations

import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Error text of torch if gloo cannot connect the ranks. This happens occasionally on a busy machine.
GLOO_CONNECT_ERROR = "Gloo connectFullMesh failed"


def retry_on_gloo_failure(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function so that it runs a second time if gloo cannot connect the ranks."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except AssertionError as error:
            if GLOO_CONNECT_ERROR not in str(error):
                raise
            return function(*args, **kwargs)

    return wrapper


@retry_on_gloo_failure
def run_ranks(script: str, count: int, folder: Path, *arguments: str) -> None:
    """Runs a script in `count` processes, which rendezvous through a file.

    A rank exits with 0 if all its checks hold.
    """
    (folder / "meet").unlink(missing_ok=True)
    path = Path(__file__).with_name(script)
    command = [sys.executable, "-W", "ignore", str(path), str(folder), str(count)]
    logs = [folder / f"{rank}.log" for rank in range(count)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                processes.append(
                    subprocess.Popen([*command, str(rank), *arguments], stdout=output, stderr=subprocess.STDOUT)
                )
        deadline = time.monotonic() + 300
        while any(process.poll() is None for process in processes):
            # The other ranks would wait for a failed rank until the deadline.
            failed_logs = [log.read_text() for process, log in zip(processes, logs) if process.poll() not in (None, 0)]
            assert not failed_logs, failed_logs[0]
            assert time.monotonic() < deadline, [log.read_text()[-2000:] for log in logs]
            time.sleep(0.1)
        assert [process.returncode for process in processes] == [0] * count, [log.read_text() for log in logs]
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Daemon:
    """A daemon process of the command that is under test."""

    def __init__(self, socket: Path, *options: str) -> None:
        self.socket, self.options = socket, options

    def __enter__(self) -> str:
        command = os.environ.get("TSSD_BIN", "tssd")
        arguments = [command, "serve", "--socket", str(self.socket), "--memory-limit", "1GB", *self.options]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.startup_line = self.process.stdout.readline()
        assert "serving" in self.startup_line
        return f"unix:{self.socket}"

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(timeout=20) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


def stop_daemons(runtime_dir: Path) -> int:
    """Terminates the daemons with a socket in a runtime directory. Returns the number of daemons."""
    paths = list(runtime_dir.glob("tssd/*.sock"))
    for path in paths:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        os.kill(struct.unpack("3i", credentials)[0], signal.SIGTERM)
    return len(paths)
