"""The plug-in fits the Python modules of a newer vLLM than the one whose engine runs here."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VERSION = "0.33.0"


def modules() -> Path:
    """Returns a folder with the Python modules of the wheel. It is beside the packages of the environment."""
    folder = Path(sys.prefix, f"vllm-{VERSION}")
    if folder.exists():
        return folder
    partial = folder.with_suffix(f".{os.getpid()}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(partial), f"vllm=={VERSION}"], check=True)
    (wheel,) = partial.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith((".py", ".json")) or ".dist-info/" in name]
        archive.extractall(partial, names)
    wheel.unlink()
    partial.rename(folder)
    return folder


@pytest.mark.supports(
    "vLLM, newer",
    "registration, signatures, the recorder, updates and loading of a Llama, and sources of shards, with the Python "
    "modules of the wheel: its compiled code needs a GPU, so the model does not run",
)
def test_plugin_fits_newer_version(tmp_path: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(modules()), os.environ.get("PYTHONPATH", "")]))
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, str(HERE / "contract.py"), VERSION, str(tmp_path / "store"), str(tmp_path)]
    result = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "the plug-in fits"
