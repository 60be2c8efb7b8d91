"""Runs `gpu_cases.py` on the fake CUDA driver, and checks the error without a driver."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

HERE = Path(__file__).parent

NO_DRIVER_SCRIPT = """
import gpu, numpy, tssd
array = gpu.Array(None, numpy.ones(3, "float32"))
array.kind = gpu.CUDA
array.__class__.__dlpack__ = lambda self, *, stream, max_version, export=gpu.Array.__dlpack__: export(self)
try:
    tssd.Store("memory:").put_state_dict({"weight": array}, "policy")
except tssd.TssdUnsupportedError as error:
    print(error)
"""


def run_python(folder: Path, driver: Path | None, arguments: list[str], **variables: str) -> str:
    """Runs Python with a driver in its library path, or without one. Returns its output."""
    if driver is not None:
        (folder / "libcuda.so").symlink_to(driver)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)} | variables
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def fake_driver() -> Path:
    """Returns the path of the fake CUDA driver, which is built next to the command."""
    command = os.environ.get("TSSD_BIN")
    if command is None:
        pytest.skip("TSSD_BIN names no command that was built here")
    return Path(command).with_name("libtssd_fake_cuda.so")


@pytest.mark.parametrize("delay", ["0", "1000"])
def test_gpu_cases_pass_on_fake_driver(tmp_path: Path, fake_driver: Path, delay: str) -> None:
    cases = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", "../pyproject.toml", "gpu_cases.py"]
    output = run_python(tmp_path, fake_driver, cases, TSSD_FAKE_CUDA_DELAY=delay)
    assert "no driver" not in output and "21 passed" in output, output


@pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has a driver")
def test_error_names_missing_driver(tmp_path: Path) -> None:
    assert "no CUDA" in run_python(tmp_path, None, ["-c", NO_DRIVER_SCRIPT])
