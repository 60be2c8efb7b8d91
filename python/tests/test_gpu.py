"""`gpu_cases.py`, on a driver without a GPU; and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

HERE = Path(__file__).parent

WITHOUT = """
import gpu, numpy, tssd
array = gpu.Array(None, numpy.ones(3, "float32"))
array.kind = gpu.CUDA
array.__class__.__dlpack__ = lambda self, *, stream, max_version, lend=gpu.Array.__dlpack__: lend(self)
try:
    tssd.Store("memory:").put_state_dict({"weight": array}, "policy")
except tssd.TssdUnsupportedError as error:
    print(error)
"""


def run(folder: Path, driver: Path | None, arguments: list[str], **variables: str) -> str:
    """What a process says that finds this driver."""
    if driver is not None:
        (folder / "libcuda.so").symlink_to(driver)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)} | variables
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def fake() -> Path:
    """The driver without a GPU, which is built beside the command."""
    command = os.environ.get("TSSD_BIN")
    if command is None:
        pytest.skip("TSSD_BIN names no command that was built here")
    return Path(command).with_name("libtssd_fake_cuda.so")


@pytest.mark.parametrize("delay", ["0", "1000"])
def test_on_a_driver_without_a_gpu(tmp_path: Path, fake: Path, delay: str) -> None:
    cases = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", "../pyproject.toml", "gpu_cases.py"]
    text = run(tmp_path, fake, cases, TSSD_FAKE_CUDA_DELAY=delay)
    assert "no driver" not in text and "21 passed" in text, text


@pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has a driver")
def test_without_a_driver_the_error_says_so(tmp_path: Path) -> None:
    assert "no CUDA" in run(tmp_path, None, ["-c", WITHOUT])
