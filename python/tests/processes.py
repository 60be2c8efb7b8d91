"""The processes of tests: daemons, and ranks that communicate over gloo."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
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
    launcher, path = (str(Path(__file__).with_name(name)) for name in ("fork_ranks.py", script))
    command = [sys.executable, "-W", "ignore", launcher, path, str(folder), str(count), *arguments]

    def read_logs() -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in sorted(folder.glob("*.log")))

    # The ranks are in the process group of the launcher, so that all of them can be killed.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        raise AssertionError(read_logs()) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, f"rank {output}\n{read_logs()}"


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
