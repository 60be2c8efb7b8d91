"""Runs, labels and rollbacks: what a second run replaces, and what a version is called."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tssd
import tssd.aio
from processes import Daemon


def state(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(4, value, dtype=np.float32)}


def value(store: tssd.Store, **options: object) -> float:
    return float(store.get_state_dict("policy", **options)["w"][0])  # type: ignore[call-overload]


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    # A key that is deleted keeps its epoch, so each test has a daemon of its own.
    name = f"unix:runs-{os.getpid()}-{abs(hash(request.node.name))}"
    yield name
    with tssd.Store(name) as store:
        for key in store.keys():
            # A label keeps the data of a version that is deleted, and the daemon then does not exit.
            for label in store.pins(key):
                store.unpin(key, label)
            store.delete(key)


TRAINER = """
import sys
import numpy as np
import tssd

url, value, job = sys.argv[1:]
with tssd.Store(url) as store:
    for step in range(1, 4):
        state = {"w": np.full(4, float(value) + step, dtype=np.float32)}
        store.put_state_dict(state, "policy", version=step, job=job or None, writer=0 if job else None)
"""


def train(url: str, value: float, job: str = "") -> None:
    subprocess.run([sys.executable, "-c", TRAINER, url, str(value), job], check=True)


def test_script_can_run_any_number_of_times(url: str) -> None:
    with tssd.Store(url) as reader:
        seen = None
        for run in range(3):
            train(url, 10 * run)
            newest = reader.head("policy")
            assert newest is not None
            assert (newest.epoch, newest.version) == (run, 3)
            with reader.wait_for_version("policy", 1, timeout=30, after=seen) as opened:
                assert int(opened) == 3
            assert value(reader) == 10 * run + 3
            assert newest.run != (seen.run if seen else None)
            seen = newest


def test_stale_versions_do_not_count(url: str) -> None:
    train(url, 0, job="run-1")
    with tssd.Store(url) as reader:
        assert int(reader.wait_for_version("policy", 1, timeout=0)) == 3, "it is of the first run"
        seen = reader.head("policy")
        assert seen is not None and seen.run == "run-1"
        for options in [{"after": seen}, {"after": "now"}, {"after": (0, 3)}, {"run": "run-2"}]:
            with pytest.raises(tssd.TssdTimeoutError, match="no version from 1 on (after version 3|of run run-2)"):
                reader.wait_for_version("policy", 1, timeout=0.05, **options)  # type: ignore[arg-type]
        train(url, 10, job="run-2")
        for options in [{"after": seen}, {"after": (0, 3)}, {"run": "run-2"}]:
            with reader.wait_for_version("policy", 1, timeout=30, **options) as opened:  # type: ignore[arg-type]
                assert int(opened) == 3
        report = reader.put_state_dict(state(1), "other")
        with pytest.raises(tssd.TssdTimeoutError):
            reader.wait_for_version("other", timeout=0, after=report)


def test_wait_ends_after_restart_of_daemon(tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    with Daemon(socket) as url, tssd.Store(url) as store:
        for step in range(1, 4):
            store.put_state_dict(state(step), "policy")
        store.put_state_dict(state(1), "policy", options=tssd.PutOptions(rewind=True), version=1)
        seen = store.head("policy")
        assert seen is not None and (seen.epoch, seen.version) == (1, 1)
        with pytest.raises(tssd.TssdTimeoutError):
            store.wait_for_version("policy", timeout=0, after=seen)
    with Daemon(socket) as url, tssd.Store(url) as store:
        store.put_state_dict(state(7), "policy")
        with store.wait_for_version("policy", timeout=30, after=seen) as opened:
            assert (opened.epoch, opened.version) == (0, 1)
            with pytest.raises(tssd.TssdTimeoutError):
                store.wait_for_version("policy", timeout=0, after=opened)


def test_wrong_after_is_refused(url: str) -> None:
    with tssd.Store(url) as store:
        with pytest.raises(ValueError, match='after is "now" or a version, not "later"'):
            store.wait_for_version("policy", after="later")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a pair of epoch and number, not 3"):
            store.wait_for_version("policy", after=3)  # type: ignore[arg-type]


def test_connected_run_keeps_its_numbers(url: str) -> None:
    with tssd.Store(url) as first:
        for step in range(1, 4):
            first.put_state_dict(state(step), "policy", version=step)
        pattern = rf"process {os.getpid()} on host .* has put version 3 and is still connected; end that process"
        with tssd.Store(url) as second, pytest.raises(tssd.TssdValueError, match=pattern):
            second.put_state_dict(state(9), "policy", version=1, job="run-2")
    train(url, 10)
    with tssd.Store(url) as store:
        newest = store.head("policy")
        assert newest is not None and (newest.epoch, newest.version) == (1, 3)


def test_process_continues_its_run_after_close(url: str) -> None:
    for step in range(1, 4):
        with tssd.Store(url) as store:
            store.retain("policy", 9)
            store.put_state_dict(state(step), "policy", version=step)
    with tssd.Store(url) as store:
        store.put_state_dict(state(2), "policy", version=2)  # the same contents again
        with pytest.raises(tssd.TssdValueError, match="to version 2 already"):
            store.put_state_dict(state(9), "policy", version=2)
        assert [info.version for info in store.versions("policy")] == [1, 2, 3]


STREAMER = """
import sys
import numpy as np
import tssd

with tssd.Store(sys.argv[1]) as store:
    for step in (1, 2):
        state = {"w": np.full(4, step, dtype=np.float32)}
        store.put_state_dict(state, "policy", version=step, options=tssd.PutOptions(residency="ring"))
"""


def test_ring_takes_numbers_of_an_earlier_run(url: str) -> None:
    into = {"w": np.zeros(4, dtype=np.float32)}
    with tssd.Store(url) as store, store.receiver("policy", into) as receiver:
        for _ in range(2):
            with subprocess.Popen([sys.executable, "-c", STREAMER, url]) as streamer:
                for step in (1, 2):
                    assert receiver.receive(timeout=60).version == step
                    assert into["w"][0] == step
            assert streamer.returncode == 0


def test_waits_for_a_run_open_no_version_of_another(url: str) -> None:
    def put_forever(job: str) -> None:
        with tssd.Store(url) as store:
            while not done.is_set():
                store.put_state_dict({"job": job}, "policy", job=job, writer=0, writers=1)

    done = threading.Event()
    with ThreadPoolExecutor() as pool:
        writer = pool.submit(put_forever, "a")
        try:
            with tssd.Store(url) as store:
                for _ in range(200):
                    with store.wait_for_version("policy", run="a", timeout=30) as opened:
                        assert opened.id and opened.epoch == 0
                        assert store.get_state_dict("policy", version=opened)["job"] == "a"
                        seen = opened
                    with store.wait_for_version("policy", after=seen, timeout=30) as opened:
                        assert int(opened) > int(seen)
        finally:
            done.set()
        writer.result()


def test_directory_names_run_that_is_there(tmp_path: Path) -> None:
    with tssd.Store(str(tmp_path)) as store:
        store.put_state_dict(state(1), "policy", version=3)
    with tssd.Store(str(tmp_path)) as store:
        with pytest.raises(tssd.TssdValueError, match=rf"process {os.getpid()} on host .* has put it"):
            store.put_state_dict(state(2), "policy", version=3)
        with pytest.raises(tssd.TssdValueError, match="has put version 3, which is durable"):
            store.put_state_dict(state(2), "policy", version=1, job="run-2")
        store.put_state_dict(state(1), "policy", version=3)  # the same contents
        assert store.put_state_dict(state(2), "policy").version == 4


@pytest.mark.parametrize("kind", ["memory", "directory", "daemon"])
def test_labels_are_accepted_wherever_versions_are(kind: str, url: str, tmp_path: Path) -> None:
    address = {"memory": "memory:", "directory": str(tmp_path), "daemon": url}[kind]
    with tssd.Store(address) as store:
        store.retain("policy", 9)
        for step in range(1, 4):
            store.put_state_dict(state(step), "policy")
        pin = store.pin("policy", "good", version=2)
        assert (int(pin), pin.label) == (2, "good")
        assert value(store, version="good") == 2
        assert store.get("policy", fqn="w", version="good")[0] == 2
        assert store.get_batch(["policy"], fqn="w", version="good")["policy"][0] == 2
        with store.open("policy", version="good") as opened:
            assert int(opened) == 2
        assert store.exists("policy", "good") and not store.exists("policy", "bad")
        assert int(store.pin("policy", "best", version="good")) == 2
        if kind == "daemon":
            assert store.prefetch("policy", version="good") == 2

        newest = store.rollback("policy", to="good")
        assert (newest.epoch, newest.version) == (1, 4)
        assert [info.version for info in store.versions("policy")] == [1, 3, 4]
        assert value(store) == value(store, version="good") == value(store, version=4) == 2
        with pytest.raises(KeyError, match="number 2"):
            store.get_state_dict("policy", version=2)
        assert store.put_state_dict(state(5), "policy").version == 5
        assert store.rollback("policy", to=newest).version == 6

        assert store.delete("policy", "best") == 1
        assert not store.exists("policy", 6)
        assert value(store, version="good") == 2, "the label still finds it"
        with pytest.raises(KeyError, match="no version has the label `bad`"):
            store.get_state_dict("policy", version="bad")
        for wrong in ["", "17", "a\nb", " good"]:
            with pytest.raises(ValueError, match="not only digits"):
                store.get_state_dict("policy", version=wrong)
            with pytest.raises(ValueError, match="not only digits"):
                store.pin("policy", wrong)
        with pytest.raises(TypeError, match="not None"):
            store.rollback("policy", to=None)  # type: ignore[arg-type]


def test_rollback_is_awaitable() -> None:
    async def check() -> None:
        async with tssd.aio.Store("memory:") as store:
            await store.retain("policy", 3)
            for step in range(1, 3):
                await store.put_state_dict(state(step), "policy")
            await store.pin("policy", "good", version=1)
            newest = await store.rollback("policy", to="good")
            assert newest.version == 3
            async with store.wait_for_version("policy", after=(0, 2)) as opened:
                assert float((await opened.get_tensor("w"))[0]) == 1

    asyncio.run(check())
