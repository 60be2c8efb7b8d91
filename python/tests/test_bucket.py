"""Stores in a bucket of an S3 server."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tssd
from s3 import BUCKET, Server

MIB = 1 << 20


def make_state(step: int, mib: int = 40) -> dict[str, Any]:
    """Returns a tensor that exceeds one upload request, a smaller one and an int."""
    values = np.arange(mib * MIB // 4, dtype=np.float32).reshape(-1, 1024) + step
    return {"large": values, "small": np.full(7, step, np.int64), "step": step}


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("TSSD_BIN", "tssd")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_versions_are_archives_below_the_prefix(server: Server, tmp_path: Path) -> None:
    url = server.new_url()
    store = tssd.Store(url)
    for step in (1, 2, 3):
        put_report = store.put_state_dict(make_state(step), "policy/actor")
        assert (put_report.version, put_report.visible, put_report.transport) == (step, True, "object")
    got, report = store.get_state_dict("policy/actor", return_report=True)
    assert report.version == 3 and report.transport == "object"
    for name, value in make_state(3).items():
        assert np.array_equal(np.asarray(got[name]), value)
    # Retention deletes the older versions. Only their ledger records remain.
    names = [name for name in server.object_names(url) if "/.ledger/" not in name]
    folder = f"policy%2Factor/0-3-{put_report.id[:16]}"
    assert [name for name in names if not name.startswith(f"{folder}/")] == []
    (archive,) = (name for name in names if not name.endswith("manifest.tssd"))
    path = tmp_path / "archive.tssd"
    path.write_bytes(server.read_object(url, archive))
    assert np.array_equal(np.asarray(tssd.load_file(path, framework="numpy")["large"]), make_state(3)["large"])
    assert server.count_pending_uploads() == 0


def test_get_returns_slice_of_tensor_in_bucket(server: Server) -> None:
    store = tssd.Store(server.new_url())
    store.put_state_dict(make_state(1), "policy")
    rows = make_state(1)["large"].shape[0]
    part = tssd.TensorSlice((rows // 2, 0), (), (rows, 1024), (rows // 20, 1024), ())
    got = store.get("policy", fqn="large", tensor_slice=part)
    assert np.array_equal(np.asarray(got), make_state(1)["large"][rows // 2 : rows // 2 + rows // 20])


def test_concurrent_writers_create_distinct_versions(server: Server) -> None:
    url = server.new_url()
    program = f"""
import numpy as np, tssd
store = tssd.Store({url!r})
for step in range(4):
    try:
        print(store.put_state_dict({{"w": np.full(1000, step)}}, "policy").version, flush=True)
    except tssd.TssdError as error:
        assert error.kind == "overtaken", error
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    numbers = [int(line) for process in writers for line in process.communicate(timeout=120)[0].split()]
    assert [process.returncode for process in writers] == [0, 0, 0]
    assert len(set(numbers)) == len(numbers) > 4
    assert tssd.Store(url).head("policy").version == max(numbers)


def test_next_writer_cleans_up_after_killed_writer(server: Server) -> None:
    url = server.new_url()
    store = tssd.Store(url)
    store.put_state_dict(make_state(1), "policy")
    program = f"""
import numpy as np, tssd
weights = {{"w": np.zeros(200 << 18, np.float32)}}
print("begun", flush=True)
tssd.Store({url!r}).put_state_dict(weights, "policy")
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    deadline = time.monotonic() + 60
    # The marker follows the upload. An upload without a marker is not found by the next writer.
    while not any("/.tmp-" in name for name in server.object_names(url)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    assert server.count_pending_uploads() == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert store.head("policy").version == 1
    # The next writer, of another job, aborts the unfinished version and deletes its files.
    newest = store.put_state_dict(make_state(2), "policy", job="next", writer=0)
    assert newest.visible
    got = tssd.Store(url).get_state_dict("policy")
    assert np.array_equal(np.asarray(got["large"]), make_state(2)["large"])
    assert server.count_pending_uploads() == 0
    assert [name for name in server.object_names(url) if "/.tmp-" in name] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_forked_child_uses_store(server: Server) -> None:
    store = tssd.Store(server.new_url())
    store.put_state_dict(make_state(1, 1), "policy")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.put_state_dict(make_state(2, 1), "policy")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get_state_dict("policy")["step"] == 2


def test_command_accepts_bucket_urls(server: Server, tmp_path: Path) -> None:
    url = server.new_url()
    tssd.save_file(make_state(5, 2), tmp_path / "in.tssd")
    result = run_command("put", "--store", url, "policy", tmp_path / "in.tssd")
    assert result.returncode == 0, result.stderr
    result = run_command("ls", "--store", url)
    assert result.returncode == 0 and "policy" in result.stdout, result.stderr
    result = run_command("get", "--store", url, "policy", "-o", tmp_path / "out.tssd")
    assert result.returncode == 0, result.stderr
    got = tssd.load_file(tmp_path / "out.tssd", framework="numpy")
    assert np.array_equal(np.asarray(got["large"]), make_state(5, 2)["large"])


def test_command_reads_archives_in_bucket(server: Server, tmp_path: Path) -> None:
    url = server.new_url()
    tssd.Store(url).put_state_dict(make_state(5), "policy")
    (archive,) = (name for name in server.object_names(url) if "/0-1-" in name and "manifest" not in name)
    result = run_command("inspect", f"{url}/{archive}")
    assert result.returncode == 0 and "large" in result.stdout and "[10240, 1024]" in result.stdout, result
    result = run_command("verify", f"{url}/{archive}")
    assert result.returncode == 0, result
    result = run_command("convert", f"{url}/{archive}", "-o", tmp_path / "out.tssd")
    assert result.returncode == 0, result
    got = tssd.load_file(tmp_path / "out.tssd", framework="numpy")
    assert np.array_equal(np.asarray(got["large"]), make_state(5)["large"])
    result = run_command("inspect", f"{url}/missing.tssd")
    assert result.returncode == 3 and "there is no object" in result.stderr, result
    result = run_command("inspect", "s3://tssd-tests")
    assert result.returncode == 3, result


def test_errors_have_kind_and_name_bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tssd.TssdError, match="no-such-bucket") as raised:
        tssd.Store("s3://no-such-bucket/x").put_state_dict(make_state(1, 1), "policy")
    assert raised.value.kind in ("not_found", "unreachable")
    with pytest.raises(tssd.TssdError) as raised:
        tssd.Store(server.new_url()).get_state_dict("policy")
    assert raised.value.kind == "not_found"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConnectionRefusedError, match=BUCKET) as refused:
        tssd.Store(f"s3://{BUCKET}/x", connect_timeout=1.0).keys()
    assert isinstance(refused.value, tssd.TssdConnectionError)
    assert (refused.value.errno, refused.value.strerror) == (
        errno.ECONNREFUSED,
        os.strerror(errno.ECONNREFUSED),
    )
    assert refused.value.filename.startswith(f"s3://{BUCKET}/x")


class BucketDaemon:
    """A daemon that replicates versions to a bucket."""

    def __init__(self, folder: Path, bucket: str, *options: str) -> None:
        program = os.environ.get("TSSD_BIN", "tssd")
        socket = folder / "socket"
        self.process = subprocess.Popen(
            [program, "serve", "--socket", socket, "--bucket", bucket, *options], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.startup_line = self.process.stdout.readline()
        assert bucket in self.startup_line
        self.store = tssd.Store(f"unix:{socket}")

    def __enter__(self) -> BucketDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_daemon_replicates_durable_versions_to_bucket(server: Server, tmp_path: Path) -> None:
    url = server.new_url()
    with BucketDaemon(tmp_path, url) as daemon:
        report = daemon.store.put_state_dict(make_state(1), "policy", durability="object")
        assert (report.visible, report.stored, report.transport) == (True, True, "shared_memory")
        assert report.phases["store"] > 0
        assert not daemon.store.put_state_dict(make_state(2), "policy").stored
        assert daemon.store.head("policy").version == 2
        # A reader that can only access the bucket reads these archives.
        bucket_store = tssd.Store(url)
        assert (bucket_store.head("policy").version, bucket_store.head("policy").id) == (1, report.id)
        got = bucket_store.get("policy", fqn="large")
        assert np.array_equal(np.asarray(got), make_state(1)["large"])
    with BucketDaemon(tmp_path, url) as daemon:
        assert daemon.store.head("policy").version == 1
        got, report = daemon.store.get_state_dict("policy", return_report=True)
        assert report.transport == "shared_memory"
        assert all(np.array_equal(np.asarray(got[name]), value) for name, value in make_state(1).items())
        with daemon.store.publish("policy", bucket_bytes=8 << 20, durability="object") as publisher:
            for name, value in make_state(2).items():
                publisher.put(name, value)
        assert publisher.report is not None and publisher.report.stored
        assert len([name for name in server.object_names(url) if "/0-2-" in name and "manifest" not in name]) > 1
        daemon.store.delete("policy")
        assert [name for name in server.object_names(url) if "/.ledger/" not in name] == []
    assert server.count_pending_uploads() == 0


def test_fill_from_hanging_bucket_times_out(tmp_path: Path) -> None:
    hanging_server = Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", hanging_server.environment["AWS_ENDPOINT_URL"])
        store = tssd.Store(hanging_server.new_url())
        store.put_state_dict(make_state(1), "policy")
        into = {name: np.zeros_like(value) for name, value in make_state(1).items() if isinstance(value, np.ndarray)}
        with store.open("policy") as version:
            hanging_server.process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(tssd.TssdTimeoutError):
                store.get_state_dict("policy", into, version=version, strict=False, timeout=0.5)
            assert time.monotonic() - started < 10
            hanging_server.process.send_signal(signal.SIGCONT)
            store.get_state_dict("policy", into, version=version, strict=False)
            assert all(np.array_equal(value, make_state(1)[name]) for name, value in into.items())
    hanging_server.stop()


def test_put_without_wait_is_visible_before_it_is_in_bucket(tmp_path: Path, server: Server) -> None:
    hanging_server = Server()
    url = hanging_server.new_url()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", hanging_server.environment["AWS_ENDPOINT_URL"])
        with BucketDaemon(tmp_path, url) as daemon:
            hanging_server.process.send_signal(signal.SIGSTOP)
            pending = daemon.store.put_state_dict(make_state(1), "policy", durability="object", wait=False, timeout=60)
            assert pending.wait_visible(10) == 1
            assert daemon.store.get_state_dict("policy")["step"] == 1
            with pytest.raises(tssd.TssdTimeoutError):
                pending.result(0.2)
            with pytest.raises(tssd.TssdTimeoutError, match="in memory, and not in the bucket"):
                daemon.store.put_state_dict(make_state(2), "policy", durability="object", timeout=0.5)
            with pytest.raises(tssd.TssdTimeoutError, match="is behind"):
                daemon.store.put_state_dict(make_state(3), "policy", durability="object", timeout=0.5)
            (status,) = run_command("status", "--store", daemon.store.url).stdout.splitlines()[-2:-1]
            assert status.startswith("on its way to the bucket: `policy` version 1, writer 0: ")
            hanging_server.process.send_signal(signal.SIGCONT)
            assert pending.result(60).stored and pending.wait_visible() == 1
            assert daemon.store.put_state_dict(make_state(3), "policy", durability="object").stored
            assert tssd.Store(url).head("policy").version == 3
    hanging_server.stop()
