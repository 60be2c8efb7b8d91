"""A store that several processes share. The ranks run `store_ranks.py` over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Daemon, run_ranks


@pytest.mark.parametrize("store_kind", ["daemon", "directory"])
def test_dtensors_are_resharded_between_processes(tmp_path: Path, store_kind: str) -> None:
    if store_kind == "directory":
        return run_ranks("store_ranks.py", 8, tmp_path, str(tmp_path / "store"))
    with Daemon(tmp_path / "socket") as url:
        run_ranks("store_ranks.py", 8, tmp_path, url)
