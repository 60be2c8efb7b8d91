"""Stages the package for tests, and the command for wheels.

Usage: stage.py package LIBRARY FOLDER    copies the package to FOLDER, with the extension module LIBRARY
       stage.py command BINARY            copies BINARY as the command `tssd` of a wheel
"""

import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent


def write_metadata(folder: Path) -> None:
    """Writes the metadata by which other packages find the plug-ins of this one, as an installation does."""
    metadata = folder / "tssd-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tssd\nVersion: 0\n")
    project = (HERE / "pyproject.toml").read_text()
    groups = re.findall(r'^\[project\.entry-points\."(.+)"\]\n((?:\w.*\n)+)', project, re.MULTILINE)
    lines = [f"[{group}]\n" + entries.replace('"', "") for group, entries in groups]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def main() -> int:
    match sys.argv[1:]:
        case ["package", library, folder]:
            package = Path(folder) / "tssd"
            shutil.rmtree(package, ignore_errors=True)
            shutil.copytree(HERE / "tssd", package, ignore=shutil.ignore_patterns("__pycache__"))
            # The file name that Python expects: on Windows, an extension module is a `.pyd`.
            name = "_tssd.pyd" if library.endswith(".dll") else "_tssd.abi3.so"
            shutil.copy(library, package / name)
            write_metadata(Path(folder))
        case ["command", binary]:
            scripts = HERE / "tssd.data" / "scripts"
            # The command of another system has another name, and would remain.
            shutil.rmtree(scripts, ignore_errors=True)
            scripts.mkdir(parents=True)
            shutil.copy(binary, scripts / f"tssd{Path(binary).suffix}")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
