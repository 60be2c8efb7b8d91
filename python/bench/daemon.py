"""A daemon of this run's own: TSSD_BIN is the command, else the one that PATH has."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def daemon(memory: int) -> Iterator[str]:
    """Its URL. It may hold so many bytes."""
    folder = Path(tempfile.mkdtemp())
    socket = folder / "socket"
    command = [os.environ.get("TSSD_BIN", "tssd"), "serve", "--memory-limit", str(memory)]
    try:
        with subprocess.Popen([*command, "--socket", socket], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield f"unix:{socket}"
            finally:
                process.terminate()
    finally:
        shutil.rmtree(folder)
