"""Runs the example of reinforcement learning like a user. It exits with 0 only if all its comparisons hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/rl_loop.py"


@pytest.mark.supports(
    "vLLM", "a whole loop: FSDP2 on four ranks, an engine on two, five steps, equal tokens after each"
)
def test_rl_loop_trains_and_updates_its_engine() -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr[-3000:]
    steps = re.findall(
        r"step (\d): reward ([\d.]+), .* received / needed ([\d.]+) / ([\d.]+) MB, tokens equal", result.stdout
    )
    assert [int(step[0]) for step in steps] == list(range(6)), result.stdout
    assert all(step[2] == step[3] for step in steps)
    assert float(steps[-1][1]) > float(steps[0][1]) + 0.05, result.stdout
