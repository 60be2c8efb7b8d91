"""The examples, run as their users run them. That they exit with 0 says that all they compare is equal."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import reconnects
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


def torchrun(ranks: int, url: str, example: str, *arguments: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return start(launcher, url, example, *arguments)


def start(launcher: list[str], url: str, example: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*launcher, str(EXAMPLES / example), *arguments],
        env={**ENVIRONMENT, "TSSD_STORE": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(*jobs: subprocess.Popen[str]) -> list[str]:
    """What jobs that belong together print. They end with 0, all of them."""
    try:
        printed = []
        for job in jobs:
            printed.append(job.communicate(timeout=300)[0])
            assert job.returncode == 0, printed[-1]
        return printed
    finally:
        for job in jobs:
            # The launcher ends its ranks with itself, unless it is killed.
            job.terminate()
            job.wait(timeout=60)


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


@needs_transformers
@reconnects
def test_generators_compute_what_the_trainers_do(tmp_path: Path) -> None:
    with daemon(tmp_path / "socket") as url:
        trainers = torchrun(4, url, "weight_sync.py", "train")
        generators = torchrun(2, url, "weight_sync.py", "generate")
        output, _ = outputs(trainers, generators)
        assert output.count("logits differ by") == 3, output


def test_an_engine_takes_every_version_between_requests(tmp_path: Path) -> None:
    with daemon(tmp_path / "socket") as url:
        trainer, engine = (start([sys.executable], url, "receiver.py", role) for role in ("train", "serve"))
        _, output = outputs(trainer, engine)
        assert "requests answered, with 5 versions" in output, output


@reconnects
def test_fused_parameters_are_filled_in_place(tmp_path: Path) -> None:
    with daemon(tmp_path / "socket") as url:
        (output,) = outputs(torchrun(2, url, "fused_engine.py"))
        assert "equal at both steps" in output, output


@reconnects
def test_a_model_is_published_while_it_is_gathered(tmp_path: Path) -> None:
    with daemon(tmp_path / "socket") as url:
        (output,) = outputs(torchrun(2, url, "bucketed_sender.py"))
        assert output.count("MiB at a time") == 2, output


@needs_transformers
def test_a_transformers_model_is_a_map_of_its_file(tmp_path: Path) -> None:
    (output,) = outputs(start([sys.executable], str(tmp_path), "from_pretrained.py"))
    assert "logits equal" in output, output
