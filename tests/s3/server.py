"""An S3 server whose objects survive a restart: moto, which keeps them in memory, with a journal.

The server executes one request at a time. It appends each modifying request to the journal before it executes it, and
replays the journal at start. A kill of the process loses no answered request. A crash of the machine may lose some: the
journal is not synced.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3 import models
from werkzeug.serving import run_simple
from werkzeug.test import run_wsgi_app

MODIFYING_METHODS = ("PUT", "POST", "DELETE")


class JournaledMoto:
    """A WSGI application that journals each modifying request and executes it with moto."""

    def __init__(self, path: Path, bucket: str) -> None:
        self.path = path
        self.moto = DomainDispatcherApplication(create_backend_app)
        # A reader sees a change completely or not at all.
        self.lock = threading.Lock()
        self.request_count = 0
        self._number_uploads()
        models.s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(bucket, "us-east-1")
        self._replay()
        self.file = path.open("ab", buffering=0)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self.lock:
            if environ["REQUEST_METHOD"] in MODIFYING_METHODS:
                strings = {name: value for name, value in environ.items() if isinstance(value, str)}
                entry = {"environ": strings, "body": body.decode("latin-1")}
                self.file.write(json.dumps(entry).encode() + b"\n")
                self.request_count += 1
            environ["wsgi.input"] = io.BytesIO(body)
            response, status, headers = run_wsgi_app(self.moto, environ)
            content = b"".join(response)
        start_response(status, list(headers))
        return [content]

    def _number_uploads(self) -> None:
        """Derives upload IDs from the request count, so that a replayed upload keeps its ID."""
        original_init = models.FakeMultipart.__init__

        def numbered_init(upload: models.FakeMultipart, *args: Any, **kwargs: Any) -> None:
            original_init(upload, *args, **kwargs)
            upload.id = f"upload-{self.request_count}"

        models.FakeMultipart.__init__ = numbered_init  # type: ignore[method-assign]

    def _replay(self) -> None:
        content = self.path.read_bytes() if self.path.exists() else b""
        # A request of which the journal has only a part was not answered.
        content = content[: content.rfind(b"\n") + 1]
        self.path.write_bytes(content)
        for line in content.splitlines():
            entry = json.loads(line)
            self.request_count += 1
            body = io.BytesIO(entry["body"].encode("latin-1"))
            wsgi_environ = {"wsgi.input": body, "wsgi.errors": sys.stderr, "wsgi.version": (1, 0)}
            response, _, _ = run_wsgi_app(self.moto, entry["environ"] | wsgi_environ)
            b"".join(response)


def main() -> None:
    host, port, journal, bucket = sys.argv[1:]
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    run_simple(host, int(port), JournaledMoto(Path(journal), bucket), threaded=True)


if __name__ == "__main__":
    main()
