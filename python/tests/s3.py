"""A server that speaks S3, in a process of its own."""

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

HAS_SERVER = importlib.util.find_spec("moto") is not None


class Server:
    """moto on a port of its own, with one bucket."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.prefixes = 0
        arguments = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([sys.executable, *arguments], stdout=quiet, stderr=quiet)
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def client(self):  # type: ignore[no-untyped-def]
        """Amazon's own client."""
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
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
        }

    def url(self) -> str:
        """A prefix that nobody else uses."""
        self.prefixes += 1
        return f"s3://{BUCKET}/runs/{self.prefixes}"

    def names(self, url: str) -> list[str]:
        """The objects of a store, below its prefix."""
        prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        found = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return [name.removeprefix(prefix) for name in found]

    def read(self, url: str, name: str) -> bytes:
        prefix = url.removeprefix(f"s3://{BUCKET}/")
        return self.client.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}")["Body"].read()

    def uploads(self) -> int:
        """How many uploads are neither complete nor given up."""
        return len(self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    yield server
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    server.stop()
