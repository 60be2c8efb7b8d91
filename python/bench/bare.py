"""A word there and back through a bare socket, to another process: what any call costs that asks somebody else."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

NAME = "bare socket, there and back"
WORD = b"01234567" * 8
ECHO = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as other:
    while word := other.recv(4096):
        other.sendall(word)
"""


class Bare:
    """The process at the other end lives as long as this."""

    def __enter__(self) -> Bare:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-S", "-c", ECHO, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        # Once, so that it has started.
        self.there_and_back()
        return self

    def __exit__(self, *_: Any) -> None:
        self.socket.close()
        self.process.wait()

    def there_and_back(self) -> None:
        self.socket.sendall(WORD)
        if self.socket.recv(4096) != WORD:
            raise AssertionError("another word came back")
