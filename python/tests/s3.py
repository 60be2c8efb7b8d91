"""An S3 server in a separate process, for the tests of stores in a bucket."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

BUCKET = "tssd-tests"

HAS_MOTO = importlib.util.find_spec("moto") is not None


class Server:
    """A moto server on a free port, with one bucket."""

    def __init__(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.prefix_count = 0
        arguments = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        devnull = subprocess.DEVNULL
        self.process = subprocess.Popen([sys.executable, *arguments], stdout=devnull, stderr=devnull)
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def client(self):  # type: ignore[no-untyped-def]
        """A boto3 client. Waits up to 60 s until the server listens."""
        import boto3
        from botocore.config import Config

        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                break
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(retries={"max_attempts": 3}),
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a store finds this server."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
        }

    def new_url(self) -> str:
        """Returns the URL of a store at an unused prefix."""
        self.prefix_count += 1
        return f"s3://{BUCKET}/runs/{self.prefix_count}"

    def object_names(self, url: str) -> list[str]:
        """Returns the names of a store's objects, relative to its prefix."""
        prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return [name.removeprefix(prefix) for name in keys]

    def read_object(self, url: str, name: str) -> bytes:
        prefix = url.removeprefix(f"s3://{BUCKET}/")
        return self.client.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}")["Body"].read()

    def count_pending_uploads(self) -> int:
        """Returns the number of multipart uploads that are neither completed nor aborted."""
        return len(self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    previous = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    yield server
    for name, value in previous.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    server.stop()
