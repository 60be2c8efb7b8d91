"""A round trip of one message through a plain socket: the minimum cost of a call to another process."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

RUNNER_NAME = "bare socket, there and back"
MESSAGE = b"01234567" * 8
ECHO_SCRIPT = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as other:
    while word := other.recv(4096):
        other.sendall(word)
"""


class EchoProcess:
    """A process that echoes messages, and a socket to it. The process exits when the block ends."""

    def __enter__(self) -> EchoProcess:
        self.socket, peer_socket = socket.socketpair()
        with peer_socket:
            command = [sys.executable, "-S", "-c", ECHO_SCRIPT, str(peer_socket.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[peer_socket.fileno()])
        # After the first round trip, the process has started.
        self.round_trip()
        return self

    def __exit__(self, *_: Any) -> None:
        self.socket.close()
        self.process.wait()

    def round_trip(self) -> None:
        """Sends a message and waits for its echo."""
        self.socket.sendall(MESSAGE)
        if self.socket.recv(4096) != MESSAGE:
            raise AssertionError("another word came back")
