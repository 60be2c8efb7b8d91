"""A store between processes: DTensors of every sharding to every other, over gloo and a daemon."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_store import daemon


@pytest.mark.parametrize("place", ["daemon", "directory"])
def test_what_is_put_in_one_sharding_is_got_in_every_other(tmp_path: Path, place: str) -> None:
    if place == "directory":
        return run("store_ranks.py", 8, tmp_path, str(tmp_path / "store"))
    with daemon(tmp_path / "socket") as url:
        run("store_ranks.py", 8, tmp_path, url)


def run(script: str, count: int, folder: Path, url: str) -> None:
    """Runs a script in so many processes; each exits with 0 if all its checks hold."""
    path = Path(__file__).with_name(script)
    command = [sys.executable, "-W", "ignore", str(path), str(folder), str(count)]
    logs = [folder / f"{rank}.log" for rank in range(count)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                ranks.append(
                    subprocess.Popen([*command, str(rank), url], stdout=output, stderr=subprocess.STDOUT)
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
