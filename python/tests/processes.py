"""Ranks as processes, over gloo."""

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

# What torch says when its own connections between the ranks have failed, as they do at times on a busy machine.
UNCONNECTED = "Gloo connectFullMesh failed"


def reconnects(job: Callable[P, T]) -> Callable[P, T]:
    """What begins once more where torch has not connected its ranks."""

    @functools.wraps(job)
    def once_more(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return job(*args, **kwargs)
        except AssertionError as error:
            if UNCONNECTED not in str(error):
                raise
            return job(*args, **kwargs)

    return once_more


@reconnects
def run(script: str, count: int, folder: Path, *arguments: str) -> None:
    """Runs a script in so many processes, which meet in a file; each exits with 0 if all its checks hold."""
    (folder / "meet").unlink(missing_ok=True)
    path = Path(__file__).with_name(script)
    command = [sys.executable, "-W", "ignore", str(path), str(folder), str(count)]
    logs = [folder / f"{rank}.log" for rank in range(count)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                ranks.append(
                    subprocess.Popen([*command, str(rank), *arguments], stdout=output, stderr=subprocess.STDOUT)
                )
        end = time.monotonic() + 300
        while any(rank.poll() is None for rank in ranks):
            # The others of one that has failed would wait for it.
            failed = [log.read_text() for rank, log in zip(ranks, logs) if rank.poll() not in (None, 0)]
            assert not failed, failed[0]
            assert time.monotonic() < end, [log.read_text()[-2000:] for log in logs]
            time.sleep(0.1)
        assert [rank.returncode for rank in ranks] == [0] * count, [log.read_text() for log in logs]
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def stop_daemons(runtime: Path) -> int:
    """Ends the daemons that stores have started whose runtime directory this is; says how many there were."""
    paths = list(runtime.glob("tssd/*.sock"))
    for path in paths:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        os.kill(struct.unpack("3i", credentials)[0], signal.SIGTERM)
    return len(paths)
