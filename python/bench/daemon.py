"""A daemon that serves one run. The command is TSSD_BIN; without it, the `tssd` on PATH."""

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
    """Runs a daemon and yields its URL. `memory` is its memory limit, in bytes."""
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
