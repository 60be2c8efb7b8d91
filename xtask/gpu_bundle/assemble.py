"""Assembles the GPU bundle: one folder with the GPU tests and benchmarks, for a machine without Rust.

Usage: assemble.py FOLDER WHEELS MAX_MIB CARGO-ARGUMENT...

FOLDER is created again. WHEELS is the folder with the wheel. The Cargo arguments select how the programs are built, such
as `--release -p tssd-tests --features cuda`. It is an error if the folder is larger than MAX_MIB; 0 sets no limit.
Run it with the Python of an environment that has pytest: the bundle gets a copy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The sources of the Python tests.
CASES = ["gpu.py", "gpu_cases.py", "processes.py"]
# The programs in the folder, by the kind of their Cargo target.
PROGRAMS = {"test": "gpu-tests", "bench": "gpu-bench"}


def build_programs(arguments: list[str]) -> dict[str, Path]:
    """Builds the tests and the benchmark. Returns the paths of the programs by the kind of their target."""
    command = [os.environ.get("CARGO", "cargo"), "test", "--no-run", "--test", "gpu", "--bench", "gpu"]
    command += ["--message-format", "json-render-diagnostics", *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    messages = [json.loads(line) for line in output.splitlines()]
    executables = [message for message in messages if message.get("executable")]
    return {kind: Path(message["executable"]) for message in executables for kind in message["target"]["kind"]}


def copy_distribution(name: str, folder: Path, done: set[str]) -> None:
    """Copies the modules of an installed distribution, and of those that it requires on Linux with Python 3.11."""
    if name in done:
        return
    done.add(name)
    found = distribution(name)
    for file in found.files or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(str(found.locate_file(file))), target)
    for requirement in found.requires or []:
        # A marker selects an extra, another system, or Python before 3.11.
        if ";" not in requirement:
            copy_distribution(re.split(r"[^\w.-]", requirement)[0], folder, done)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    folder, wheels, max_mib, *arguments = sys.argv[1:]
    bundle = Path(folder)
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    for kind, program in build_programs(arguments).items():
        shutil.copy(program, bundle / PROGRAMS[kind])
    # The newest one, since the folder may have wheels of earlier versions.
    wheel = max(Path(wheels).glob("tssd-*.whl"), key=lambda path: path.stat().st_mtime)
    shutil.copy(wheel, bundle)
    shutil.copy(Path(__file__).with_name("run.py"), bundle)
    cases = bundle / "python"
    cases.mkdir()
    for case in CASES:
        shutil.copy(ROOT / "python/tests" / case, cases)
    copy_distribution("pytest", bundle / "site-packages", set())
    mib = size_of(bundle) / (1 << 20)
    print(f"{mib:.1f} MiB in {bundle}")
    if 0 < int(max_mib) < mib:
        sys.exit(f"the bundle has more than {max_mib} MiB")


main()
