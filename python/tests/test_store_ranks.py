"""A store between processes: DTensors of every sharding to every other, over gloo and a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run
from test_store import daemon


@pytest.mark.parametrize("place", ["daemon", "directory"])
def test_what_is_put_in_one_sharding_is_got_in_every_other(tmp_path: Path, place: str) -> None:
    if place == "directory":
        return run("store_ranks.py", 8, tmp_path, str(tmp_path / "store"))
    with daemon(tmp_path / "socket") as url:
        run("store_ranks.py", 8, tmp_path, url)
