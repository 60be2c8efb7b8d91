"""A TCP proxy that counts bytes: an independent measure of what a client receives from a daemon."""

from __future__ import annotations

import socket
import threading


class CountingProxy:
    """Forwards the connections to `address` to a daemon, and counts the bytes in both directions."""

    def __init__(self, daemon: str) -> None:
        host, port = daemon.removeprefix("tcp://").rsplit(":", 1)
        self._daemon = host, int(port)
        self.received = 0
        self.sent = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._daemon)
            self._sockets += [client, server]
            for source, target, is_reply in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._forward, args=(source, target, is_reply), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    if is_reply:
                        self.received += len(data)
                    else:
                        self.sent += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            each.close()
