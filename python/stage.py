"""Puts things where they belong before the package is tested or packed.

Usage: stage.py package LIBRARY FOLDER    the package in FOLDER, with the extension module LIBRARY
       stage.py command BINARY            the command `tssd` among what a wheel installs
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    match sys.argv[1:]:
        case ["package", library, folder]:
            package = Path(folder) / "tssd"
            shutil.rmtree(package, ignore_errors=True)
            shutil.copytree(HERE / "tssd", package, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(library, package / "_tssd.abi3.so")
        case ["command", binary]:
            scripts = HERE / "tssd.data" / "scripts"
            scripts.mkdir(parents=True, exist_ok=True)
            shutil.copy(binary, scripts / "tssd")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
