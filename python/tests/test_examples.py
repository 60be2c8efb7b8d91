"""Runs the examples like a user. An example exits with 0 only if all its comparisons hold."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tssd
from processes import Daemon, retry_on_gloo_failure

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def test_resumed_run_equals_uninterrupted_run() -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "checkpoint.py")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("resumed at step 3 of 6: equal"), result.stdout


def start_torchrun(ranks: int, url: str, example: str, *arguments: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return start_example(launcher, url, example, *arguments)


def start_example(launcher: list[str], url: str, example: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*launcher, str(EXAMPLES / example), *arguments],
        env={**ENVIRONMENT, "TSSD_STORE": url, "RUN": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def leave_versions_of_earlier_run(url: str) -> None:
    """Puts versions that no example may take for its own."""
    with tssd.Store(url) as store:
        for key in ("policy", "logits", "answers"):
            store.put_state_dict({"stale": [1]}, key, version=9)


def wait_for_outputs(*jobs: subprocess.Popen[str]) -> list[str]:
    """Waits until jobs that run together have exited with 0. Returns their outputs."""
    try:
        outputs = []
        for job in jobs:
            outputs.append(job.communicate(timeout=300)[0])
            assert job.returncode == 0, outputs[-1]
        return outputs
    finally:
        for job in jobs:
            # The launcher terminates its ranks on SIGTERM. On SIGKILL it cannot.
            job.terminate()
            job.wait(timeout=60)


requires_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


@requires_transformers
@retry_on_gloo_failure
def test_generators_compute_same_logits_as_trainers(tmp_path: Path) -> None:
    with Daemon(tmp_path / "socket") as url:
        leave_versions_of_earlier_run(url)
        trainers = start_torchrun(4, url, "weight_sync.py", "train")
        generators = start_torchrun(2, url, "weight_sync.py", "generate")
        output, _ = wait_for_outputs(trainers, generators)
        assert output.count("logits differ by") == 3, output


def test_engine_receives_every_version_between_requests(tmp_path: Path) -> None:
    with Daemon(tmp_path / "socket") as url:
        leave_versions_of_earlier_run(url)
        trainer, engine = (start_example([sys.executable], url, "receiver.py", role) for role in ("train", "serve"))
        _, output = wait_for_outputs(trainer, engine)
        assert "requests answered, with 5 versions" in output, output


@retry_on_gloo_failure
def test_fused_parameters_are_filled_in_place(tmp_path: Path) -> None:
    with Daemon(tmp_path / "socket") as url:
        leave_versions_of_earlier_run(url)
        (output,) = wait_for_outputs(start_torchrun(2, url, "fused_engine.py"))
        assert "equal at both steps" in output, output


@retry_on_gloo_failure
def test_model_is_published_while_it_is_gathered(tmp_path: Path) -> None:
    with Daemon(tmp_path / "socket") as url:
        leave_versions_of_earlier_run(url)
        (output,) = wait_for_outputs(start_torchrun(2, url, "bucketed_sender.py"))
        assert output.count("MiB at a time") == 2, output


@requires_transformers
def test_transformers_model_maps_its_file(tmp_path: Path) -> None:
    (output,) = wait_for_outputs(start_example([sys.executable], str(tmp_path), "from_pretrained.py"))
    assert "logits equal" in output, output
