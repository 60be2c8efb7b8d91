"""Stores in a bucket, over a server that speaks S3."""

from __future__ import annotations

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


def weights(step: int, mib: int = 40) -> dict[str, Any]:
    """More than goes in one request, and less than that."""
    values = np.arange(mib * MIB // 4, dtype=np.float32).reshape(-1, 1024) + step
    return {"large": values, "small": np.full(7, step, np.int64), "step": step}


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("TSSD_BIN", "tssd")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_versions_are_ordinary_archives_below_the_prefix(server: Server, tmp_path: Path) -> None:
    url = server.url()
    store = tssd.Store(url)
    for step in (1, 2, 3):
        put = store.put_state_dict(weights(step), "policy/actor")
        assert (put.version, put.visible, put.transport) == (step, True, "object")
    got, report = store.get_state_dict("policy/actor", return_report=True)
    assert report.version == 3 and report.transport == "object"
    for name, value in weights(3).items():
        assert np.array_equal(np.asarray(got[name]), value)
    # Retention is honoured: of the others nothing is left but their places in the ledger.
    names = [name for name in server.names(url) if "/.ledger/" not in name]
    folder = f"policy%2Factor/0-3-{put.id[:16]}"
    assert [name for name in names if not name.startswith(f"{folder}/")] == []
    (archive,) = (name for name in names if not name.endswith("manifest.tssd"))
    path = tmp_path / "archive.tssd"
    path.write_bytes(server.read(url, archive))
    assert np.array_equal(np.asarray(tssd.load_file(path, framework="numpy")["large"]), weights(3)["large"])
    assert server.uploads() == 0


def test_a_slice_moves_little_more_than_its_bytes(server: Server) -> None:
    store = tssd.Store(server.url())
    store.put_state_dict(weights(1), "policy")
    rows = weights(1)["large"].shape[0]
    part = tssd.TensorSlice((rows // 2, 0), (), (rows, 1024), (rows // 20, 1024), ())
    got = store.get("policy", fqn="large", tensor_slice=part)
    assert np.array_equal(np.asarray(got), weights(1)["large"][rows // 2 : rows // 2 + rows // 20])


def test_several_processes_make_versions_one_after_the_other(server: Server) -> None:
    url = server.url()
    program = f"""
import numpy as np, tssd
store = tssd.Store({url!r})
for step in range(4):
    try:
        print(store.put_state_dict({{"w": np.full(1000, step)}}, "policy").version, flush=True)
    except tssd.TssdError as error:
        assert error.kind == "overtaken", error
"""
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    numbers = [int(line) for process in started for line in process.communicate(timeout=120)[0].split()]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(set(numbers)) == len(numbers) > 4
    assert tssd.Store(url).head("policy").version == max(numbers)


def test_a_killed_writer_leaves_nothing_that_stays(server: Server) -> None:
    url = server.url()
    store = tssd.Store(url)
    store.put_state_dict(weights(1), "policy")
    program = f"""
import numpy as np, tssd
weights = {{"w": np.zeros(200 << 18, np.float32)}}
print("begun", flush=True)
tssd.Store({url!r}).put_state_dict(weights, "policy")
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    deadline = time.monotonic() + 60
    while server.uploads() == 0:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert store.head("policy").version == 1
    # Who comes next with another job ends what was begun, and what it has left.
    newest = store.put_state_dict(weights(2), "policy", job="next", writer=0)
    assert newest.visible
    got = tssd.Store(url).get_state_dict("policy")
    assert np.array_equal(np.asarray(got["large"]), weights(2)["large"])
    assert server.uploads() == 0
    assert [name for name in server.names(url) if "/.tmp-" in name] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_store_is_forked(server: Server) -> None:
    store = tssd.Store(server.url())
    store.put_state_dict(weights(1, 1), "policy")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.put_state_dict(weights(2, 1), "policy")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get_state_dict("policy")["step"] == 2


def test_the_command_takes_addresses_of_buckets(server: Server, tmp_path: Path) -> None:
    url = server.url()
    tssd.save_file(weights(5, 2), tmp_path / "in.tssd")
    done = command("put", "--store", url, "policy", tmp_path / "in.tssd")
    assert done.returncode == 0, done.stderr
    done = command("ls", "--store", url)
    assert done.returncode == 0 and "policy" in done.stdout, done.stderr
    done = command("get", "--store", url, "policy", "-o", tmp_path / "out.tssd")
    assert done.returncode == 0, done.stderr
    got = tssd.load_file(tmp_path / "out.tssd", framework="numpy")
    assert np.array_equal(np.asarray(got["large"]), weights(5, 2)["large"])


def test_the_command_reads_objects(server: Server, tmp_path: Path) -> None:
    url = server.url()
    tssd.Store(url).put_state_dict(weights(5), "policy")
    (archive,) = (name for name in server.names(url) if "/0-1-" in name and "manifest" not in name)
    done = command("inspect", f"{url}/{archive}")
    assert done.returncode == 0 and "large" in done.stdout and "[10240, 1024]" in done.stdout, done
    done = command("verify", f"{url}/{archive}")
    assert done.returncode == 0, done
    done = command("convert", f"{url}/{archive}", "-o", tmp_path / "out.tssd")
    assert done.returncode == 0, done
    got = tssd.load_file(tmp_path / "out.tssd", framework="numpy")
    assert np.array_equal(np.asarray(got["large"]), weights(5)["large"])
    done = command("inspect", f"{url}/missing.tssd")
    assert done.returncode == 3 and "there is no object" in done.stderr, done
    done = command("inspect", "s3://tssd-tests")
    assert done.returncode == 3, done


def test_what_is_wrong_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tssd.TssdError, match="no-such-bucket") as raised:
        tssd.Store("s3://no-such-bucket/x").put_state_dict(weights(1, 1), "policy")
    assert raised.value.kind in ("not_found", "unreachable")
    with pytest.raises(tssd.TssdError) as raised:
        tssd.Store(server.url()).get_state_dict("policy")
    assert raised.value.kind == "not_found"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(tssd.TssdConnectionError, match=BUCKET):
        tssd.Store(f"s3://{BUCKET}/x", connect_timeout=1.0).keys()


class Daemon:
    """A daemon whose versions go on to a bucket."""

    def __init__(self, folder: Path, bucket: str, *options: str) -> None:
        program = os.environ.get("TSSD_BIN", "tssd")
        socket = folder / "socket"
        self.process = subprocess.Popen(
            [program, "serve", "--socket", socket, "--bucket", bucket, *options], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        assert bucket in self.said
        self.store = tssd.Store(f"unix:{socket}")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_daemon_brings_there_what_is_to_last(server: Server, tmp_path: Path) -> None:
    url = server.url()
    with Daemon(tmp_path, url) as daemon:
        report = daemon.store.put_state_dict(weights(1), "policy", durability="object")
        assert (report.visible, report.stored, report.transport) == (True, True, "arena")
        assert report.phases["store"] > 0
        assert not daemon.store.put_state_dict(weights(2), "policy").stored
        assert daemon.store.head("policy").version == 2
        # Ordinary archives, for whoever has the bucket alone.
        elsewhere = tssd.Store(url)
        assert (elsewhere.head("policy").version, elsewhere.head("policy").id) == (1, report.id)
        got = elsewhere.get("policy", fqn="large")
        assert np.array_equal(np.asarray(got), weights(1)["large"])
    with Daemon(tmp_path, url) as daemon:
        assert daemon.store.head("policy").version == 1
        got, report = daemon.store.get_state_dict("policy", return_report=True)
        assert report.transport == "arena"
        assert all(np.array_equal(np.asarray(got[name]), value) for name, value in weights(1).items())
        with daemon.store.publish("policy", bucket_bytes=8 << 20, durability="object") as publisher:
            for name, value in weights(2).items():
                publisher.put(name, value)
        assert publisher.report is not None and publisher.report.stored
        assert len([name for name in server.names(url) if "/0-2-" in name and "manifest" not in name]) > 1
        daemon.store.delete("policy")
        assert [name for name in server.names(url) if "/.ledger/" not in name] == []
    assert server.uploads() == 0


def test_a_fill_from_a_bucket_that_hangs_ends(tmp_path: Path) -> None:
    slow = Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", slow.environment["AWS_ENDPOINT_URL"])
        store = tssd.Store(slow.url())
        store.put_state_dict(weights(1), "policy")
        into = {name: np.zeros_like(value) for name, value in weights(1).items() if isinstance(value, np.ndarray)}
        with store.open("policy") as version:
            slow.process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(tssd.TssdTimeoutError):
                store.get_state_dict("policy", into, version=version, strict=False, timeout=0.5)
            assert time.monotonic() - started < 10
            slow.process.send_signal(signal.SIGCONT)
            store.get_state_dict("policy", into, version=version, strict=False)
            assert all(np.array_equal(value, weights(1)[name]) for name, value in into.items())
    slow.stop()


def test_a_put_that_is_not_waited_for_is_visible_first(tmp_path: Path, server: Server) -> None:
    slow = Server()
    url = slow.url()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", slow.environment["AWS_ENDPOINT_URL"])
        with Daemon(tmp_path, url) as daemon:
            slow.process.send_signal(signal.SIGSTOP)
            pending = daemon.store.put_state_dict(weights(1), "policy", durability="object", wait=False, timeout=60)
            assert pending.visible(10) == 1
            assert daemon.store.get_state_dict("policy")["step"] == 1
            with pytest.raises(tssd.TssdTimeoutError):
                pending.result(0.2)
            with pytest.raises(tssd.TssdTimeoutError, match="in memory, and not in the bucket"):
                daemon.store.put_state_dict(weights(2), "policy", durability="object", timeout=0.5)
            with pytest.raises(tssd.TssdTimeoutError, match="is behind"):
                daemon.store.put_state_dict(weights(3), "policy", durability="object", timeout=0.5)
            (status,) = command("status", "--store", daemon.store.url).stdout.splitlines()[-2:-1]
            assert status.startswith("on its way to the bucket: `policy` version 1, writer 0: ")
            slow.process.send_signal(signal.SIGCONT)
            assert pending.result(60).stored and pending.visible() == 1
            assert daemon.store.put_state_dict(weights(3), "policy", durability="object").stored
            assert tssd.Store(url).head("policy").version == 3
    slow.stop()
