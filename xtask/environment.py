"""Makes a virtual environment if it is missing, incomplete or damaged, and prints its size on the disk.

Usage: environment.py FOLDER REQUIREMENTS IMPORTS [PACKAGE]

FOLDER is named NAME-HASH. IMPORTS, separated by commas, must be importable, else the environment is made anew.
PACKAGE is installed without its dependencies, which pin older versions of what REQUIREMENTS names.
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
# Written last, so that an environment without it is incomplete. Each use sets its time.
RECORD = "complete"
# An environment of other requirements is removed when it has not been used for this long.
UNUSED_DAYS = 14


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two checkouts on one machine share the environments."""
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        if os.name == "posix":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_usable(folder: Path, imports: str) -> bool:
    if not (folder / RECORD).exists():
        return False
    probe = [python_of(folder), "-c", f"import {imports}"]
    try:
        return subprocess.run(probe, check=False, stdout=sys.stderr).returncode == 0
    except OSError:  # its Python is missing, or a link to one that is
        return False


def make(folder: Path, requirements: str, packages: list[str]) -> None:
    (folder / RECORD).unlink(missing_ok=True)
    installs = [["--no-deps", *packages]] if packages else []
    if Path(requirements).read_text().strip():
        installs.append(["--requirement", requirements])
    venv.create(folder, clear=True, with_pip=bool(installs), symlinks=os.name != "nt")
    for install in installs:
        subprocess.run([python_of(folder), *PIP, *install], check=True)
    (folder / RECORD).touch()


def remove_unused(folder: Path) -> None:
    name = folder.name.rpartition("-")[0]
    for record in folder.parent.glob(f"{name}-*/{RECORD}"):
        if record.parent != folder and time.time() - record.stat().st_mtime > UNUSED_DAYS * 86400:
            print(f"removed {record.parent}: not used for {UNUSED_DAYS} days")
            shutil.rmtree(record.parent, ignore_errors=True)


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
                make(folder, requirements, packages)
            except subprocess.CalledProcessError as error:
                return error.returncode
            if not is_usable(folder, imports):
                print(f"{folder} is new, but `import {imports}` fails", file=sys.stderr)
                return 1
        (folder / RECORD).touch()
        remove_unused(folder)
    print(f"{size_of(folder) / 1e9:.2f} GB in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
