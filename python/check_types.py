"""mypy and pyright over the package, and its stubs beside what it really has. Run by a Python that has it
and torch installed."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = sys.executable

CHECKS = [
    [PYTHON, "-m", "mypy", "--config-file", HERE / "pyproject.toml", "-p", "tssd"],
    [PYTHON, "-m", "mypy.stubtest", "tssd", "--allowlist", HERE / "stubtest.txt"],
    [PYTHON, "-m", "pyright", "--pythonpath", PYTHON, "--project", HERE / "pyproject.toml"],
]


def main() -> int:
    # Not here, where the package lies without its extension module.
    elsewhere = HERE / "tests"
    results = [subprocess.run(check, cwd=elsewhere, check=False).returncode for check in CHECKS]
    failed = len(results) - results.count(0)
    print(f"{results.count(0)} passed, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
