"""The examples, run as their users run them. That they exit with 0 says that all they compare is equal."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_store import daemon

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "checkpoint.py")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("resumed at step 3 of 6: equal"), done.stdout


def torchrun(ranks: int, role: str, url: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*launcher, str(EXAMPLES / "weight_sync.py"), role],
        env={**ENVIRONMENT, "TSSD_STORE": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_generators_compute_what_the_trainers_do(tmp_path: Path) -> None:
    with daemon(tmp_path / "socket") as url:
        trainers, generators = torchrun(4, "train", url), torchrun(2, "generate", url)
        try:
            output = trainers.communicate(timeout=300)[0]
            assert trainers.returncode == 0, output
            assert output.count("logits differ by") == 3, output
            output = generators.communicate(timeout=60)[0]
            assert generators.returncode == 0, output
        finally:
            for job in (trainers, generators):
                # The launcher ends its ranks with itself, unless it is killed.
                job.terminate()
                job.wait(timeout=60)
