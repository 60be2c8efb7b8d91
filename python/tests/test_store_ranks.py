"""A store between processes: DTensors of every sharding to every other, over gloo and a daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_store import daemon

RANKS = 4


@pytest.mark.parametrize("place", ["daemon", "directory"])
def test_what_is_put_in_one_sharding_is_got_in_every_other(tmp_path: Path, place: str) -> None:
    if place == "directory":
        return run(tmp_path, str(tmp_path / "store"))
    with daemon(tmp_path / "socket") as url:
        run(tmp_path, url)


def run(folder: Path, url: str) -> None:
    script = Path(__file__).with_name("store_ranks.py")
    command = [sys.executable, "-W", "ignore", str(script), str(folder), str(RANKS)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    failed = [output for each, output in zip(ranks, outputs) if each.returncode != 0]
    assert not failed, failed[0]
