"""Creates a virtual environment if it is missing, incomplete or damaged, and prints its size on disk.

Usage: environment.py FOLDER REQUIREMENTS IMPORTS [PACKAGE]

FOLDER has the name NAME-HASH. If one of the modules IMPORTS, separated by commas, cannot be imported, the environment
is created again. PACKAGE is installed without its dependencies, which pin older versions of packages in REQUIREMENTS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PIP = ["-m", "pip", "install", "--no-compile", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
# Marker file. It is written last, so an environment without it is incomplete. Each use updates its modification time.
MARKER = "complete"
# Environments of other requirements are removed if they have not been used for this many days.
MAX_UNUSED_DAYS = 14


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks an environment, which several checkouts on one machine share."""
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        if os.name == "posix":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_usable(folder: Path, imports: str) -> bool:
    if not (folder / MARKER).exists():
        return False
    probe = [python_of(folder), "-c", f"import {imports}"]
    try:
        return subprocess.run(probe, check=False, stdout=sys.stderr).returncode == 0
    except OSError:  # The Python of the environment is missing, or a dangling link.
        return False


def create(folder: Path, requirements: str, packages: list[str]) -> None:
    (folder / MARKER).unlink(missing_ok=True)
    installs = [["--no-deps", *packages]] if packages else []
    if Path(requirements).read_text().strip():
        installs.append(["--requirement", requirements])
    venv.create(folder, clear=True, with_pip=bool(installs), symlinks=os.name != "nt")
    for install in installs:
        subprocess.run([python_of(folder), *PIP, *install], check=True)
    (folder / MARKER).touch()


def remove_unused(folder: Path) -> None:
    name = folder.name.rpartition("-")[0]
    for marker in folder.parent.glob(f"{name}-*/{MARKER}"):
        if marker.parent != folder and time.time() - marker.stat().st_mtime > MAX_UNUSED_DAYS * 86400:
            print(f"removed {marker.parent}: not used for {MAX_UNUSED_DAYS} days")
            shutil.rmtree(marker.parent, ignore_errors=True)


def size_of(folder: Path) -> int:
    files = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    return sum(file.lstat().st_size for file in files)


def main() -> int:
    match sys.argv[1:]:
        case [path, requirements, imports, *packages] if len(packages) <= 1:
            folder = Path(path)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if not is_usable(folder, imports):
            try:
                create(folder, requirements, packages)
            except subprocess.CalledProcessError as error:
                return error.returncode
            if not is_usable(folder, imports):
                print(f"{folder} is new, but `import {imports}` fails", file=sys.stderr)
                return 1
        (folder / MARKER).touch()
        remove_unused(folder)
    print(f"{size_of(folder) / 1e9:.2f} GB in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
