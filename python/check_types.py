"""Runs mypy and pyright on the package, and compares its stubs with the extension module.

The Python that runs it must have the package and torch installed.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = sys.executable

CHECKS = [
    [PYTHON, "-m", "mypy", "--config-file", HERE / "pyproject.toml", "-p", "tssd"],
    [PYTHON, "-m", "mypy.stubtest", "tssd", "--mypy-config-file", HERE / "pyproject.toml", "--allowlist", HERE / "stubtest.txt"],
    [PYTHON, "-m", "pyright", "--pythonpath", PYTHON, "--project", HERE / "pyproject.toml"],
]


def main() -> int:
    # Not in this folder: it contains the package without its extension module.
    directory = HERE / "tests"
    results = [subprocess.run(check, cwd=directory, check=False).returncode for check in CHECKS]
    failed = len(results) - results.count(0)
    print(f"{results.count(0)} passed, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
