"""An S3 server whose objects outlast it: moto, which has them in memory, behind a journal.

Each request that changes something stands in the journal before it is done, one after the other, and all are done
again when the server starts. Whoever kills it takes nothing along that was answered. (The machine would: nothing
is synced.)
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

CHANGES = ("PUT", "POST", "DELETE")


class Journal:
    """moto, of which every change is written down."""

    def __init__(self, path: Path, bucket: str) -> None:
        self.path = path
        self.moto = DomainDispatcherApplication(create_backend_app)
        # Whoever reads sees each change whole.
        self.turn = threading.Lock()
        self.count = 0
        self._number_uploads()
        models.s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(bucket, "us-east-1")
        self._repeat()
        self.file = path.open("ab", buffering=0)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self.turn:
            if environ["REQUEST_METHOD"] in CHANGES:
                strings = {name: it for name, it in environ.items() if isinstance(it, str)}
                entry = {"environ": strings, "body": body.decode("latin-1")}
                self.file.write(json.dumps(entry).encode() + b"\n")
                self.count += 1
            environ["wsgi.input"] = io.BytesIO(body)
            answer, status, headers = run_wsgi_app(self.moto, environ)
            whole = b"".join(answer)
        start_response(status, list(headers))
        return [whole]

    def _number_uploads(self) -> None:
        """An upload that is begun again has the name that its client knows."""
        make = models.FakeMultipart.__init__

        def make_numbered(upload: models.FakeMultipart, *args: Any, **kwargs: Any) -> None:
            make(upload, *args, **kwargs)
            upload.id = f"upload-{self.count}"

        models.FakeMultipart.__init__ = make_numbered  # type: ignore[method-assign]

    def _repeat(self) -> None:
        whole = self.path.read_bytes() if self.path.exists() else b""
        # What was being written when the server was killed was not answered.
        whole = whole[: whole.rfind(b"\n") + 1]
        self.path.write_bytes(whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            self.count += 1
            body = io.BytesIO(entry["body"].encode("latin-1"))
            given = {"wsgi.input": body, "wsgi.errors": sys.stderr, "wsgi.version": (1, 0)}
            answer, _, _ = run_wsgi_app(self.moto, entry["environ"] | given)
            b"".join(answer)


def main() -> None:
    host, port, journal, bucket = sys.argv[1:]
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    run_simple(host, int(port), Journal(Path(journal), bucket), threaded=True)


if __name__ == "__main__":
    main()
