"""Puts and gets of a store: whole, in place and in parts, with errors, waits and interrupts."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tssd
from equality import same
from processes import Daemon, stop_daemons


@pytest.fixture(params=["memory", "directory", "daemon"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tssd.Store]:
    if request.param == "memory":
        yield tssd.Store("memory:")
    elif request.param == "directory":
        yield tssd.Store(str(tmp_path / "store"))
    else:
        with Daemon(tmp_path / "socket") as url:
            yield tssd.Store(url)


def make_state(step: int) -> dict[str, Any]:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4) + step
    return {
        "model": OrderedDict(weight=weight, tied=weight, bias=np.full(3, step, np.float64)),
        "optimizer": {0: {"step": step, "lr": 0.1}, 1: (None, "x" * 5000, b"bytes")},
        "empty": np.zeros((0, 3), np.int8),
    }


def test_state_dict_roundtrips(store: tssd.Store) -> None:
    for step in (1, 2):
        put_report = store.put_state_dict(make_state(step), "policy", metadata={"run": "7"})
        assert isinstance(put_report, tssd.PutReport)
        assert (put_report.version, put_report.visible, put_report.missing) == (step, True, [])
        got, report = store.get_state_dict("policy", return_report=True)
        assert isinstance(report, tssd.GetReport) and report.version == step and report.id == put_report.id
        assert list(put_report.phases) == ["arrange", "begin", "write", "commit", "store"]
        assert 0 < sum(put_report.phases.values()) <= put_report.seconds
        assert len(put_report.digest) == 32 and report.digest == put_report.digest
        assert report.transport == put_report.transport and report.seconds > 0
        assert report.bytes_needed == 48 + 24 == report.bytes_transferred
        # The long str is verified, too.
        assert report.bytes_verified == 48 + 24 + 5000
        assert list(got) == list(make_state(step))
        for key in ("weight", "tied", "bias"):
            assert np.array_equal(np.asarray(got["model"][key]), make_state(step)["model"][key])
        assert got["optimizer"] == make_state(step)["optimizer"]
    assert store.keys() == ["policy"] and store.keys("x") == []
    assert [int(each) for each in store.versions("policy")] == [2]
    head = store.head("policy")
    assert head is not None and head.writers == [0] and head.version == 2
    assert store.exists("policy") and store.exists("policy", 2) and not store.exists("policy", 1)
    assert store.head("nothing") is None
    assert int(store.pin("policy", "best")) == 2 and store.pins("policy") == {"best": 2}
    store.unpin("policy", "best")
    assert store.delete("policy") == 1 and store.delete("policy") == 0


def test_single_values_roundtrip(store: tssd.Store) -> None:
    array = np.arange(10, dtype=np.int64).reshape(2, 5)
    store.put("array", array)
    assert np.array_equal(np.asarray(store.get("array")), array)
    store.put("number", 7)
    assert store.get("number") == 7
    store.put_state_dict({"a": {"b": array}, "c": "text"}, "dict")
    assert np.array_equal(np.asarray(store.get("dict", fqn="a.b")), array)
    assert store.get("dict", fqn="c") == "text"
    part = tssd.TensorSlice([0, 1], None, [2, 5], [2, 3], [])
    got = store.get("dict", fqn="a.b", tensor_slice=part)
    assert np.array_equal(np.asarray(got), array[:, 1:4])
    # The global shape of this slice differs from that of the tensor.
    other = tssd.TensorSlice([0, 1], None, [3, 5], [2, 3], [])
    with store.open("dict") as opened, pytest.raises(ValueError, match=r"`a.b` has shape \[2, 5\].*\[3, 5\]"):
        opened.get_tensor("a.b", other)
    for wrong in ({}, {"into": np.zeros((2, 3), np.int64)}):
        with pytest.raises(ValueError, match=r"\[3, 5\]"):
            store.get("dict", fqn="a.b", tensor_slice=other, **wrong)
    into = np.zeros((2, 5), np.int64)
    assert store.get("dict", into, fqn="a.b") is into and np.array_equal(into, array)


def test_arrays_are_filled_in_place(store: tssd.Store) -> None:
    store.put_state_dict(make_state(3), "policy")
    fused = np.zeros((3, 8), np.float32)
    tied = fused[:, :4]
    into = {"model": {"weight": tied, "tied": tied, "bias": np.zeros(3)}, "empty": np.zeros((0, 3), np.int8)}
    got, report = store.get_state_dict("policy", into, return_report=True)
    assert got is into
    assert np.array_equal(tied, make_state(3)["model"]["weight"]) and not fused[:, 4:].any()
    assert report.bytes_needed == report.bytes_transferred
    # Shards of two parts, which the put did not have.
    rows = [np.zeros((2, 4), np.float32), np.zeros((1, 4), np.float32)]
    for offset, local in zip((0, 2), rows):
        shard = tssd.TensorShard(local, tssd.TensorSlice([offset, 0], None, [3, 4], list(local.shape), []))
        store.get_state_dict("policy", {"model": {"weight": shard}}, strict=False)
    assert np.array_equal(np.concatenate(rows), make_state(3)["model"]["weight"])


def test_plain_values_are_replaced_in_place(store: tssd.Store) -> None:
    text = "x" * 100_000
    stored = {
        "w": np.ones(3), "step": 7, "name": text, "none": None, "scale": np.float32(0.5),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "more": 1, "pickled": Fraction(1, 3),
        "set": {1, 2},
    }
    store.put_state_dict(stored, "policy", allow_pickle=True)
    weight, groups, inner = np.zeros(3), [{"lr": 1.0, "betas": (0.0, 0.0)}], {"own": "stays"}
    into = {
        "w": weight, "step": 0, "name": "", "none": 3, "scale": 0.0, "groups": groups, "pickled": None, "inner": inner,
        "set": set(),
    }
    assert store.get_state_dict("policy", into) is into and into["w"] is weight and (weight == 1).all()
    assert (into["step"], into["name"], into["none"], into["scale"]) == (7, text, None, 0.5)
    assert into["set"] == {1, 2}
    # Values in tuples, pickled values and names that are not stored stay unchanged. No name is added.
    assert into["groups"] is groups and groups == [{"lr": 0.1, "betas": (0.0, 0.0)}]
    assert into["pickled"] is None and into["inner"] == {"own": "stays"} and "more" not in into
    store.get_state_dict("policy", into, allow_pickle=True)
    assert into["pickled"] == Fraction(1, 3)
    # Nothing is replaced if one tensor does not match.
    into["step"], into["w"] = 0, np.zeros(4)
    with pytest.raises(ValueError, match="shape"):
        store.get_state_dict("policy", into)
    assert into["step"] == 0


def test_mismatches_are_reported_before_any_write(store: tssd.Store) -> None:
    store.put_state_dict(make_state(3), "policy")
    good = np.full((3, 4), 9, np.float32)
    bias, empty = np.zeros(3), np.zeros((0, 3), np.int8)
    whole: dict[str, Any] = {"weight": good, "tied": good, "bias": bias}
    cases: list[tuple[dict[str, Any], bool, type[Exception], str]] = [
        ({"weight": good}, True, ValueError, "`empty` is stored.*`model.bias` is stored.*strict=False"),
        ({**whole, "nothing": good.copy()}, True, KeyError, "`model.nothing` is not stored"),
        ({**whole, "bias": np.zeros(4)}, False, ValueError, r"`model.bias` has shape \[4\], stored \[3\]"),
        ({**whole, "bias": np.zeros(3, np.float32)}, False, TypeError, "float32, stored float64.*cast=True"),
        ({"weight": good, "bias": np.zeros(4), "x": bias}, True, ValueError, "shape.*not stored.*is stored"),
    ]
    for model, strict, error, message in cases:
        into = {"model": model} if "tied" not in model else {"model": model, "empty": empty}
        with pytest.raises(error, match=message) as caught:
            store.get_state_dict("policy", into, strict=strict)
        assert isinstance(caught.value, tssd.TssdError)
        assert (good == 9).all()
    with pytest.raises(ValueError, match="names"):
        store.get_state_dict("policy", {"model": whole}, names=["model.*"])
    frozen = np.zeros((3, 4), np.float32)
    frozen.setflags(write=False)
    with pytest.raises(TypeError, match="read-only"):
        store.get_state_dict("policy", {"model": {"weight": frozen}}, strict=False)


def test_errors_have_classes_and_advice(store: tssd.Store) -> None:
    with pytest.raises(KeyError) as missing:
        store.get_state_dict("nothing")
    assert isinstance(missing.value, tssd.TssdKeyError) and missing.value.key == "nothing"
    with pytest.raises(TypeError, match="put_state_dict\\(state_dict, key\\)"):
        store.put_state_dict("policy", {"a": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError) as caught:
        store.put_state_dict({"a": {"b": object()}}, "policy")
    assert isinstance(caught.value, tssd.TssdTypeError) and caught.value.fqn == "a.b"
    for wrong in ({"durability": "x"}, {"timeout": -1.0}):
        with pytest.raises(ValueError):
            store.put_state_dict({}, "policy", **wrong)  # type: ignore[call-overload]
    for name in ("on_divergence", "replicas", "residency", "require_transport"):
        with pytest.raises(tssd.TssdValueError, match=f'{name} is .*, not "x"'):
            store.put_state_dict({}, "policy", options=tssd.PutOptions(**{name: "x"}))  # type: ignore[arg-type]
    for call in (store.get_state_dict, store.get, store.open):
        with pytest.raises(tssd.TssdValueError, match='require_transport is .*, not "x"'):
            call("policy", require_transport="x")
    numbers: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"version": -1}, ValueError, "version is an int from 0 to 18446744073709551615, not -1"),
        ({"version": 1 << 64}, ValueError, "version is an int from 0"),
        ({"version": "1"}, TypeError, "version is an int, not '1'"),
        ({"writer": -1, "writers": 2}, ValueError, "writer is an int from 0 to 4294967295, not -1"),
        ({"writer": 0, "writers": "2"}, TypeError, "not '2'"),
        ({"writer": 0, "writers": [0, 1.5]}, TypeError, "float"),
        ({"writer": 0, "writers": [0, -1]}, ValueError, "a rank is an int from 0 to 4294967295"),
        ({"writer": 0, "writers": 1 << 40}, ValueError, "at most 1048576 processes"),
        ({"writer": 0, "writers": 0}, ValueError, "nobody would put"),
    ]
    for wrong, error, message in numbers:
        with pytest.raises(error, match=message):
            store.put_state_dict({}, "policy", **wrong)
    for call in (store.exists, store.delete, lambda key, version: store.get_state_dict(key, version=version)):
        with pytest.raises(ValueError, match="version is an int from 0"):
            call("policy", -1)
    with pytest.raises(ValueError, match="version is an int from 0"):
        store.wait_for_version("policy", -1)
    with pytest.raises(ValueError, match="tls is required"):
        store.put_state_dict({}, "policy", options=tssd.PutOptions(require_transport="tls"))
    store.put_state_dict({}, "policy", version=5)
    with pytest.raises(ValueError, match="rewind"):
        store.put_state_dict({"a": 1}, "policy", version=4)
    assert store.put_state_dict({"a": 1}, "policy", version=4, options=tssd.PutOptions(rewind=True)).epoch == 1
    with pytest.raises(ConnectionError):
        tssd.Store("tcp://127.0.0.1:9")
    with pytest.raises(ValueError, match="together"):
        tssd.Store("memory:", ca="ca.pem")


def test_full_disk_is_an_os_error(tmp_path: Path, limit_file_size: Callable[[int], None]) -> None:
    store = tssd.Store(str(tmp_path / "store"))
    limit_file_size(1 << 20)
    with pytest.raises(tssd.TssdOSError) as full:
        store.put_state_dict({"a": np.zeros(2 << 20, np.uint8)}, "policy")
    assert (full.value.errno, full.value.strerror) == (errno.EFBIG, os.strerror(errno.EFBIG))
    file = Path(full.value.filename)
    assert file.parts[: len(tmp_path.parts) + 2] == (*tmp_path.parts, "store", "policy")
    assert file.suffix == ".tssd" and str(file) in str(full.value)
    assert (full.value.kind, full.value.key) == ("io", "policy")


def test_system_error_of_a_daemon_is_an_os_error(
    tmp_path: Path, limit_file_size: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A write beyond the limit also raises a signal, which Python ignores only in its own process.
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec {os.environ.get('TSSD_BIN', 'tssd')} \"$@\"\n")
    command.chmod(0o755)
    monkeypatch.setenv("TSSD_BIN", str(command))
    limit_file_size(16 << 10)
    with Daemon(tmp_path / "socket", "--root", str(tmp_path / "store")) as url:
        store = tssd.Store(url)
        with pytest.raises(tssd.TssdOSError) as full:
            store.put_state_dict({"a": np.zeros(32 << 10, np.uint8)}, "policy")
    # The file is memory of the daemon and has no name.
    assert (full.value.errno, full.value.filename) == (errno.EFBIG, None)
    assert full.value.strerror == os.strerror(errno.EFBIG)


def test_unreachable_stores_are_os_errors(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    missing = tmp_path / "missing"
    cases: tuple[tuple[str, type[OSError], str], ...] = (
        (str(file / "store"), NotADirectoryError, str(file / "store")),
        (str(file), NotADirectoryError, str(file)),
        (f"unix:{missing}", FileNotFoundError, str(missing)),
        ("tcp://127.0.0.1:9", ConnectionRefusedError, "tcp://127.0.0.1:9"),
    )
    for url, builtin, filename in cases:
        with pytest.raises(builtin) as unreachable:
            tssd.Store(url)
        assert isinstance(unreachable.value, tssd.TssdConnectionError), url
        assert unreachable.value.errno and unreachable.value.strerror
        assert unreachable.value.filename == filename


def test_long_names_are_abridged_in_messages(store: tssd.Store) -> None:
    name = "n" * 100_000
    store.put_state_dict({"a": np.zeros(3)}, "policy")
    version = store.open("policy")
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.put_state_dict({"a": 1}, name),
        lambda: store.get_state_dict(name),
        lambda: store.get_state_dict("n" * 1000),
        lambda: store.get_state_dict(b"n" * 100_000),  # type: ignore[arg-type]
        lambda: store.put_state_dict({name: object()}, "policy"),
        lambda: store.put_state_dict({name: 1}, "policy"),
        lambda: store.put_state_dict({"a": 1}, "policy", durability=name),
        lambda: store.put_state_dict({"a": 1}, "policy", options=tssd.PutOptions(on_divergence=name)),
        lambda: store.put_state_dict({"a": 1}, "policy", options=tssd.PutOptions(residency=name)),
        lambda: store.get_state_dict("policy", {name: np.zeros(4)}),
        lambda: store.get_state_dict("policy", require_transport=name),
        lambda: version.get_tensor(name),
        lambda: version.get_slice(name),
        lambda: version[name],
    )
    for number, call in enumerate(calls):
        with pytest.raises((tssd.TssdError, TypeError, ValueError)) as caught:
            call()
        message = str(caught.value)
        assert len(message) <= 2000 and "n" * 201 not in message, number


def test_put_options_are_values() -> None:
    options = tssd.PutOptions(keep_dtype=("norm",), rewind=True)
    assert repr(options) == (
        "PutOptions(on_divergence='error', replicas='primary', keep_dtype=('norm',), require_transport=None, "
        "rewind=True, residency='host', check_finite=False)"
    )
    assert dataclasses.replace(options, rewind=False) == tssd.PutOptions(keep_dtype=("norm",)) != options
    assert pickle.loads(pickle.dumps(options)) == options and len({options, options}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.rewind = False  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        tssd.PutOptions("keep")  # type: ignore[misc]


def test_default_put_options_equal_no_options(store: tssd.Store) -> None:
    reports = [
        store.put_state_dict(make_state(1), "without", transfer_dtype="float16"),
        store.put_state_dict(make_state(1), "with", transfer_dtype="float16", options=tssd.PutOptions()),
    ]
    assert len({(each.version, each.epoch, each.digest, each.bytes, each.transport) for each in reports}) == 1
    assert same(store.get_state_dict("with"), store.get_state_dict("without"))


def test_put_rejects_options_of_wrong_type(store: tssd.Store) -> None:
    cases: list[tuple[Any, str]] = [
        ({"rewind": True}, "options must be a tssd.PutOptions, not a dict; help: PutOptions(rewind=True)"),
        (3, "options must be a tssd.PutOptions, not an int; help"),
        (tssd.PutOptions, "options must be a tssd.PutOptions, not a type; help"),
        (tssd.PutOptions(on_divergence=1), "on_divergence is a str, not 1"),  # type: ignore[arg-type]
        (tssd.PutOptions(replicas=None), "replicas is a str, not None"),  # type: ignore[arg-type]
        (tssd.PutOptions(keep_dtype=3), "not iterable"),  # type: ignore[arg-type]
        (tssd.PutOptions(require_transport=3), "require_transport is a str or None, not 3"),  # type: ignore[arg-type]
        (tssd.PutOptions(rewind="no"), "rewind is a bool, not 'no'"),  # type: ignore[arg-type]
        (tssd.PutOptions(check_finite=1), "check_finite is a bool, not 1"),  # type: ignore[arg-type]
        (tssd.PutOptions(residency=None), "or a tssd.Ring, not None"),  # type: ignore[arg-type]
    ]
    for wrong, text in cases:
        with pytest.raises(TypeError, match=re.escape(text)):
            store.put_state_dict({}, "policy", transfer_dtype="float16", options=wrong)
        with pytest.raises(TypeError, match=re.escape(text)):
            store.put("policy", 1, transfer_dtype="float16", options=wrong)
        with pytest.raises(TypeError, match=re.escape(text)):
            store.publish("policy", transfer_dtype="float16", options=wrong)
    assert store.keys() == []


def test_fields_of_put_options_are_no_keywords(store: tssd.Store) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(tssd.PutOptions)}
    for name, value in {**fields, "divergent": "error", "require": None}.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            store.put_state_dict({}, "policy", **{name: value})
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            store.publish("policy", **{name: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'rewind'"):
        store.put_state_dict({}, "policy", rewind=True)  # type: ignore[call-overload]
    assert store.keys() == []


def test_several_writers_create_one_version(store: tssd.Store) -> None:
    whole = np.arange(20, dtype=np.float32).reshape(5, 4)
    for writer, (start, stop) in enumerate([(0, 3), (3, 5)]):
        slice_ = tssd.TensorSlice([start, 0], None, [5, 4], [stop - start, 4], [])
        shard = tssd.TensorShard(whole[start:stop], slice_)
        report = store.put_state_dict({"w": shard}, "policy", version=1, writer=writer, writers=2, job="run")
        assert report.visible == (writer == 1) and report.missing == [1][writer:]
    got = store.get_state_dict("policy")["w"]
    assert np.array_equal(np.asarray(got), whole)


def test_megatron_replicas_are_stored_once(store: tssd.Store) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    def shard(layer: int, replica_id: Any, data: np.ndarray[Any, Any]) -> tssd.TensorShard[Any]:
        sharded = SimpleNamespace(
            data=data, global_shape=(2, 3, 4), global_offset=(layer, 0, 0), replica_id=replica_id
        )
        return tssd.TensorShard.from_megatron(sharded)

    # Two stages have one layer each, stacked in the global tensor. Each layer has a replica with other bytes.
    puts = []
    for writer in range(4):
        layer, replica = divmod(writer, 2)
        each = shard(layer, (0, replica), whole[layer] + 100 * replica)
        assert each.primary is (replica == 0) and pickle.loads(pickle.dumps(each)).primary is each.primary
        options: dict[str, Any] = {"version": 1, "writer": writer, "writers": 4, "job": "run"}
        puts.append(store.put_state_dict({"w": each}, "policy", **options))
    assert puts[-1].visible and puts[0].bytes > puts[1].bytes and puts[2].bytes > puts[3].bytes
    for writer in range(4):
        layer, replica = divmod(writer, 2)
        each = shard(layer, (0, replica), whole[layer])
        options = {"version": 1, "writer": writer, "writers": 4, "job": "run"}
        options["options"] = tssd.PutOptions(replicas="all")
        assert store.put_state_dict({"w": each}, "replicated", **options).bytes >= puts[0].bytes
    assert np.array_equal(np.asarray(store.get_state_dict("policy")["w"]), whole)
    for replica in (0, 1):
        into = np.zeros((3, 4), np.float32)
        store.get_state_dict("policy", {"w": shard(1, replica, into)}, strict=False)
        assert np.array_equal(into, whole[1])
    for value in (None, SimpleNamespace(key="x", data=whole), SimpleNamespace(data="text", global_shape=(1,))):
        with pytest.raises(TypeError, match="no ShardedTensor"):
            tssd.TensorShard.from_megatron(value)
    for wrong, error, message in [
        ({"data": None}, TypeError, "no data"),
        ({"data": "text"}, TypeError, "no ShardedTensor"),
        ({"replica_id": None}, TypeError, "replica_id"),
        ({"flattened_range": slice(0, 3)}, TypeError, "flattened"),
        ({"global_offset": (2, 0, 0)}, ValueError, "outside"),
        ({"global_shape": (3, 4), "global_offset": (0, 0, 0)}, ValueError, "3 offsets, 2 sizes"),
    ]:
        sharded: dict[str, Any] = {
            "data": whole[0], "global_shape": (2, 3, 4), "global_offset": (0, 0, 0), "replica_id": 0
        }
        with pytest.raises(error, match=message):
            tssd.TensorShard.from_megatron(SimpleNamespace(**{**sharded, **wrong}))


def test_error_names_pending_version_and_writers(store: tssd.Store) -> None:
    store.put_state_dict({"a": 1}, "policy", version=3, writer=0, writers=[0, 2, 3], job="run")
    waiting = "no version is visible, and version 3 is only partially committed: it waits for writers 2-3"
    with pytest.raises(KeyError, match=waiting):
        store.get_state_dict("policy")


def test_wait_ends_with_timeout_or_version(store: tssd.Store) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        store.wait_for_version("policy", 1, timeout=0.2)
    assert time.monotonic() - started < 10
    threading.Timer(0.2, lambda: store.put_state_dict({"a": 1}, "policy", version=7)).start()
    assert int(store.wait_for_version("policy", 3, timeout=20)) == 7
    pending = store.put_state_dict({"a": np.ones(1000)}, "later", wait=False)
    assert isinstance(pending, tssd.PendingPut)
    assert pending.result(timeout=20).visible and pending.result().visible


def test_ctrl_c_interrupts_wait(store: tssd.Store) -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        store.wait_for_version("policy", 1, timeout=60)
    assert time.monotonic() - started < 30
    store.put("policy", 1)
    assert store.get("policy") == 1


def test_result_is_independent_of_later_puts(store: tssd.Store) -> None:
    array = np.arange(4096, dtype=np.float64)
    store.put("array", array)
    first = store.get("array")
    for step in range(3):
        store.put("array", array + step)
    if hasattr(first, "add_"):
        first.add_(1)
        assert first[0] == 1
    else:
        assert np.array_equal(first, array)
    assert np.asarray(store.get("array"))[0] == 2


def test_version_is_published_and_read_tensor_by_tensor(store: tssd.Store) -> None:
    def tensor(number: int) -> Any:
        return np.full((100, 100), number, np.float32)

    with store.publish("policy", version=3, bucket_bytes=50_000, metadata={"step": 3}) as publisher:
        for number in range(5):
            publisher.put(f"layers.{number}.weight", tensor(number))
        publisher.put("epoch", 7)
        publisher.flush()
        assert not store.exists("policy")
    assert publisher.report is not None and publisher.report.visible
    with pytest.raises(RuntimeError, match="stop"):
        with store.publish("policy") as failing:
            failing.put("a", tensor(1))
            raise RuntimeError("stop")
    assert store.head("policy") is not None and int(store.head("policy") or 0) == 3
    with pytest.raises(ValueError, match="finished"):
        failing.put("b", tensor(1))
    opened = store.open("policy")
    store.put_state_dict({"other": 1}, "policy")
    with opened as version:
        assert (int(version), len(version), version.metadata()) == (3, 5, {"step": 3})
        assert version.keys() == [f"layers.{number}.weight" for number in range(5)]
        for number, (name, value) in enumerate(version.items()):
            assert name == version.keys()[number] and np.array_equal(np.asarray(value), tensor(number))
        part = tssd.TensorSlice([1, 2], None, [100, 100], [3, 4], [])
        assert np.asarray(version.get_tensor("layers.2.weight", part)).shape == (3, 4)
        with pytest.raises(KeyError):
            version.get_tensor("nothing")
    with pytest.raises(ValueError, match="closed"):
        version.get_tensor("layers.2.weight")


def test_publish_casts_and_merges_like_put(store: tssd.Store) -> None:
    for writer in (0, 1):
        with store.publish(
            "policy", version=1, writer=writer, writers=2, job="run", transfer_dtype="float16",
            options=tssd.PutOptions(on_divergence="lowest", keep_dtype=["norm"]),
        ) as publisher:  # fmt: skip
            for name in ("w", "norm"):
                publisher.put(name, np.ones(3, np.float32))
            publisher.put("rank", writer)
    got = store.get_state_dict("policy")
    assert [str(np.asarray(got[name]).dtype) for name in ("w", "norm")] == ["float16", "float32"]
    assert got["rank"] == 0
    with pytest.raises(TypeError, match="floating"):
        store.publish("policy", transfer_dtype="int8")
    with pytest.raises(ValueError, match="durability"):
        store.publish("policy", durability="tape")  # type: ignore[arg-type]


def test_array_larger_than_bucket_is_cast_in_parts(store: tssd.Store) -> None:
    wide = np.arange(105, dtype=np.float64).reshape(7, 15) / 7
    arrays = {"rows": wide, "columns": wide.T, "some": wide[1:, ::2], "line": wide.ravel(), "one": np.array(1 / 3)}
    for bucket in (1, 16, 100, 1 << 20):
        with store.publish("policy", bucket_bytes=bucket, transfer_dtype="float16") as publisher:
            publisher.put("step", 7)
            for name, array in arrays.items():
                publisher.put(name, array)
            publisher.put("ints", np.arange(100))
        got = store.get_state_dict("policy")
        assert list(got) == ["step", *arrays, "ints"] and got["step"] == 7
        for name, array in arrays.items():
            assert same(np.asarray(got[name]), array.astype(np.float16)), (name, bucket)
        with (
            pytest.raises(ValueError, match="was added before"),
            store.publish("policy", bucket_bytes=bucket, transfer_dtype="float16") as publisher,
        ):
            publisher.put("rows", wide)
            publisher.put("rows", wide)


def test_subscription_yields_versions_in_order(store: tssd.Store) -> None:
    subscription = store.subscribe("policy")
    for step in (1, 2, 5):
        store.put_state_dict({"a": step}, "policy", version=step)
        assert int(next(subscription)) == step
    subscription.close()
    assert list(subscription) == []


def test_store_is_usable_after_pickle_and_fork(tmp_path: Path) -> None:
    store = tssd.Store(str(tmp_path / "store"))
    store.put("x", 3)
    unpickled = pickle.loads(pickle.dumps(store))
    assert unpickled.url == store.url and unpickled.get("x") == 3
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            os._exit(0 if store.get("x") == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with store:
        assert store.get("x") == 3
    assert store.get("x") == 3 and same(repr(store), f"Store({store.url!r})")


def test_permitted_mismatches_are_reported(store: tssd.Store) -> None:
    store.put_state_dict(make_state(3), "policy")
    extra = np.full(2, 5.0)
    into = {"model": {"weight": np.zeros((3, 4), np.float64), "own": extra}}
    _, report = store.get_state_dict("policy", into, strict=False, cast=True, return_report=True)
    assert report.missing_keys == ["model.own"] and (extra == 5).all()
    assert report.unexpected_keys == ["empty", "model.bias", "model.tied"]
    assert report.cast == ["model.weight"]
    assert np.array_equal(into["model"]["weight"], make_state(3)["model"]["weight"].astype(np.float64))
    with pytest.raises(TypeError, match="only floats"):
        store.get_state_dict("policy", {"model": {"weight": np.zeros((3, 4), int)}}, strict=False, cast=True)


def test_get_returns_only_named_leaves(store: tssd.Store) -> None:
    store.put_state_dict(make_state(3), "policy")
    got = store.get_state_dict("policy", names=["model.[wb]*", "optimizer.0.lr"])
    assert list(got) == ["model", "optimizer"] and list(got["model"]) == ["weight", "bias"]
    assert got["optimizer"] == {0: {"lr": 0.1}}
    # The items of a tuple are named by index.
    assert store.get_state_dict("policy", names="optimizer.1.1")["optimizer"] == {1: make_state(3)["optimizer"][1]}
    got = store.get_state_dict("policy", names=["model", "opt*r.0"])
    assert list(got["model"]) == list(make_state(3)["model"]) and got["optimizer"] == {0: {"step": 3, "lr": 0.1}}
    store.put_state_dict({"[a]": {"x": 1}, "a": {"x": 2}, "b": 3}, "brackets")
    assert store.get_state_dict("brackets", names="[a]") == {"[a]": {"x": 1}}
    assert store.get_state_dict("brackets", names="[ab]") == {"a": {"x": 2}, "b": 3}
    for wrong in (5, ["b", 5]):
        with pytest.raises(TypeError):
            store.get_state_dict("brackets", names=wrong)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="nothing is named 'model.x'"):
        store.get_state_dict("policy", names=["model.weight", "model.x"])
    with store.open("policy", names=["*.weight"]) as opened:
        assert opened.keys() == ["model.weight"] and [name for name, _ in opened.items()] == ["model.weight"]


def test_view_retains_its_version(store: tssd.Store) -> None:
    for step in range(1, 6):
        store.put_state_dict({"w": np.full(100_000, step)}, "policy")
        got, report = store.get_state_dict("policy", return_report=True)
        assert report.bytes_viewed == (0 if store.url == "memory:" else 800_000)
        assert not got["w"].flags.writeable
        if step == 1:
            first = got["w"]
        owned, report = store.get_state_dict("policy", copy=True, return_report=True)
        assert report.bytes_viewed == 0 and (owned["w"] == step).all()
    store.delete("policy")
    store.close()
    assert (first == 1).all() and (got["w"] == 5).all()


def test_lease_retains_its_version(store: tssd.Store) -> None:
    for step in (1, 2):
        store.put_state_dict(make_state(step), "policy")
    with store.wait_for_version("policy", 2) as lease:
        assert (int(lease), lease.version, lease.key) == (2, 2, "policy")
        assert repr(lease) == "OpenVersion('policy', version 2)"
        with pytest.raises(TimeoutError, match="`policy`: no version from 3 on was put within 100ms; the newest is 2"):
            store.wait_for_version("policy", 3, timeout=0.1)
        store.put_state_dict(make_state(3), "policy")
        assert not store.exists("policy", lease)
        got = store.get_state_dict("policy", version=lease)
        assert np.array_equal(np.asarray(got["model"]["weight"]), make_state(2)["model"]["weight"])
        weight = np.zeros((3, 4), np.float32)
        store.get("policy", weight, fqn="model.weight", version=lease)
        assert np.array_equal(weight, make_state(2)["model"]["weight"])
        with store.open("policy", version=lease) as reopened:
            assert reopened.version == 2
        with pytest.raises(ValueError, match="one of key `policy`"):
            store.get_state_dict("other", version=lease)
    assert (int(lease), lease.version) == (2, 2) and repr(lease) == "OpenVersion('policy', version 2, closed)"
    with pytest.raises(ValueError, match="closed"):
        store.get_state_dict("policy", version=lease)
    with pytest.raises(KeyError):
        store.get_state_dict("policy", version=2)


def test_pin_is_removed_at_end_of_block(store: tssd.Store) -> None:
    store.put_state_dict(make_state(1), "policy")
    with store.pin("policy", "best") as pin:
        assert (int(pin), pin.version, pin.label) == (1, 1, "best")
        store.put_state_dict(make_state(2), "policy")
        assert store.pins("policy") == {"best": 1}
        assert store.get_state_dict("policy", version=1)["optimizer"][0]["step"] == 1
    assert store.pins("policy") == {} and not store.exists("policy", 1)


def test_error_names_leaf_with_short_name(store: tssd.Store) -> None:
    with pytest.raises(TypeError, match="in `a`"):
        store.put_state_dict({"a": object()}, "policy")


def test_batches_put_get_and_delete_several_keys(store: tssd.Store) -> None:
    reports = store.put_batch({"a": np.arange(3), "b": 7}, metadata={"step": 1})
    assert [report.version for report in reports] == [1, 1]
    into = np.zeros(3, int)
    assert store.get_batch({"a": into, "b": None}) == {"a": into, "b": 7} and (into == np.arange(3)).all()
    assert list(store.get_batch(["b", "a"])) == ["b", "a"]
    with pytest.raises(KeyError):
        store.get_batch(["a", "nothing"])
    for batch in (store.get_batch, store.delete_batch):
        with pytest.raises(TypeError, match="one str"):
            batch("a")
    assert store.delete_batch(["a", "nothing", "b"]) == 2 and store.keys() == []


def test_transfer_dtype_casts_floats(store: tssd.Store) -> None:
    weight = np.linspace(0, 1, 5, dtype=np.float64)
    arrays = {"weight": weight, "tied": weight, "norm": weight.copy(), "ids": np.arange(3)}
    store.put_state_dict(arrays, "policy", transfer_dtype="float16", options=tssd.PutOptions(keep_dtype=["no*"]))
    got = {name: np.asarray(value) for name, value in store.get_state_dict("policy").items()}
    assert {name: str(value.dtype) for name, value in got.items()} == {
        "weight": "float16",
        "tied": "float16",
        "norm": "float64",
        "ids": "int64",
    }
    assert np.array_equal(got["weight"], weight.astype(np.float16))
    assert np.shares_memory(got["weight"], got["tied"]) and weight.dtype == np.float64
    single = {"w": weight.astype(np.float32), "t": weight.astype(np.float32).reshape(5, 1).T, "e": np.ones((0, 3), np.float32)}
    store.put_state_dict(single, "single", transfer_dtype="float16")
    for name, value in store.get_state_dict("single").items():
        assert np.array_equal(np.asarray(value), single[name].astype(np.float16)), name
    for wrong in ("int8", "nothing"):
        with pytest.raises(TypeError, match="floating"):
            store.put_state_dict(arrays, "policy", transfer_dtype=wrong)


def test_metadata_roundtrips(store: tssd.Store) -> None:
    metadata = {"step": 3, "run": {"id": "x", "lr": [0.1, None]}}
    store.put_state_dict(make_state(3), "policy", metadata=metadata)
    head = store.head("policy")
    assert head is not None and head.metadata == metadata
    with store.open("policy") as opened:
        assert opened.metadata() == metadata
    with pytest.raises(ValueError, match="at most 65536"):
        store.put_state_dict(make_state(3), "policy", metadata={"x": "y" * 70_000})


def test_open_version_returns_slices(store: tssd.Store) -> None:
    whole = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    store.put_state_dict({"w": whole, "n": 1}, "policy")
    with store.open("policy") as opened:
        part = opened.get_slice("w")
        assert (part.get_shape(), part.get_dtype()) == ([3, 4, 5], "int32")
        for index in [(0,), (slice(1, 3), ..., -1), (..., slice(4, None, 2)), (2, slice(0, 0)), (), (-1, -1, -1)]:
            assert np.array_equal(np.asarray(part[index]), whole[index]), index
        for index in [3, (0, 0, 0, 0), (..., ...)]:
            with pytest.raises(IndexError):
                part[index]
        assert (part.shape, str(part.dtype)) == ((3, 4, 5), "int32") and opened.get_slice("w").dtype == part.dtype
        with pytest.raises(KeyError):
            opened.get_slice("x")
        with pytest.raises(TypeError):
            opened.get_slice("n")
        with pytest.raises(TypeError, match="is no index"):
            part[0, "x"]


def test_open_version_is_a_mapping(store: tssd.Store) -> None:
    store.put_state_dict({"w": np.arange(3), "a": {"b": np.ones(2)}, "n": 1, "x": np.zeros(1)}, "policy")
    with store.open("policy", names=["w", "a.b", "n"]) as opened:
        assert isinstance(opened, Mapping) and list(opened) == opened.keys() == ["w", "a.b"] and len(opened) == 2
        assert "w" in opened and not any(name in opened for name in ("x", "n", "a", 1))
        assert same(np.asarray(opened["w"]), np.arange(3)) and same(np.asarray(opened.get("a.b")), np.ones(2))
        assert opened.get("x") is None and opened.get(1, "default") == "default"
        assert same([*map(np.asarray, opened.values())], [np.arange(3), np.ones(2)])
        assert dict(opened).keys() == dict(opened.items()).keys() == {**opened}.keys()
        for name in ("x", "n", 1):
            with pytest.raises(KeyError):
                opened[name]
    with pytest.raises(ValueError, match="closed"):
        opened["w"]


def test_encoded_state_dict_is_stored_decoded(store: tssd.Store) -> None:
    encoded = tssd.TorchStoreStateDict.from_state_dict(make_state(3))
    store.put("policy", encoded)
    got = store.get_state_dict("policy")
    assert got["optimizer"] == make_state(3)["optimizer"] and list(got) == list(make_state(3))
    assert np.array_equal(np.asarray(got["model"]["weight"]), make_state(3)["model"]["weight"])


def test_pending_put_reports_visible_version(store: tssd.Store) -> None:
    pending = store.put_state_dict(make_state(1), "policy", wait=False)
    assert pending.wait_visible(timeout=60) == 1 and store.exists("policy", 1)
    assert pending.result().version == 1
    half = store.put_state_dict({"a": 1}, "two", version=1, writers=2, writer=0, job="j", wait=False)
    with pytest.raises(TimeoutError):
        half.wait_visible(timeout=0.2)
    store.put_state_dict({"b": 2}, "two", version=1, writers=2, writer=1, job="j")
    assert half.wait_visible(timeout=60) == 1


def test_pending_put_takes_options(store: tssd.Store) -> None:
    store.put_state_dict({"a": 1}, "policy", version=5)
    pending = store.put_state_dict({"a": 2}, "policy", version=4, wait=False, options=tssd.PutOptions(rewind=True))
    assert isinstance(pending, tssd.PendingPut)
    report = pending.result(timeout=60)
    assert (report.version, report.epoch, report.visible) == (4, 1, True)
    batch = store.put_batch({"x": 1, "y": 2}, wait=False, options=tssd.PutOptions())
    assert [each.wait_visible(timeout=60) for each in batch] == [1, 1]


def test_file_functions_reject_version_in_directory(tmp_path: Path) -> None:
    tssd.Store(str(tmp_path / "store")).put_state_dict(make_state(1), "policy")
    folder = next((tmp_path / "store").rglob("manifest.tssd")).parent
    for path in (folder, folder / "manifest.tssd"):
        for load in (tssd.load_file, lambda path: tssd.safe_open(path, "np")):
            with pytest.raises(ValueError, match="tssd convert SET -o FILE"):
                load(path)


def test_store_reconnects_to_restarted_daemon(tmp_path: Path) -> None:
    with Daemon(tmp_path / "socket") as url:
        store = tssd.Store(url)
        store.put_state_dict(make_state(1), "policy")
        views = store.get_state_dict("policy")
    with pytest.raises(tssd.TssdConnectionError):
        store.exists("policy")
    with Daemon(tmp_path / "socket"):
        # The versions were in memory and are lost. Views of them stay valid.
        assert not store.exists("policy")
        store.put_state_dict(make_state(2), "policy")
        assert same(store.get_state_dict("policy"), make_state(2))
        assert same(views, make_state(1))


# Waits for a line on stdin, so that all processes start at once. Then puts its number.
PUT_SCRIPT = """
import sys, tssd
number = int(sys.argv[1])
print(flush=True)
sys.stdin.readline()
tssd.Store().put_state_dict({"number": number}, f"from/{number}")
"""


def test_stores_without_url_share_one_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TSSD_STORE", raising=False)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", PUT_SCRIPT, str(number)], **pipes) for number in range(4)]
    try:
        for child in children:
            child.stdout.readline()
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        assert [child.wait(timeout=60) for child in children] == [0] * 4
        store = tssd.Store()
        assert store.keys() == [f"from/{number}" for number in range(4)]
        assert store.get_state_dict("from/3") == {"number": 3}
        store.close()
    finally:
        for child in children:
            child.kill()
            child.communicate()
        assert stop_daemons(tmp_path) == 1
    monkeypatch.setenv("TSSD_STORE", str(tmp_path / "named"))
    assert tssd.Store().keys() == [] and "named" in repr(tssd.Store())


def test_ring_sends_versions_to_open_receivers(tmp_path: Path) -> None:
    small_ring = tssd.PutOptions(residency=tssd.Ring(bucket_bytes=64 << 10, readers=1))
    ring = tssd.PutOptions(residency="ring")
    weight = np.arange(100_000, dtype=np.float32).reshape(1000, 100)
    state = {"model": {"weight": weight, "bias": np.arange(7), "tied": weight}}
    columns = np.zeros((1000, 30), np.float32)
    shard = tssd.TensorShard(columns, tssd.TensorSlice((0, 60), (), (1000, 100), (1000, 30), ()))
    bias = np.zeros(7, np.int64)
    with Daemon(tmp_path / "socket") as url, tssd.Store(url) as writer, tssd.Store(url) as reader:
        with reader.receiver("policy", {"model": {"weight": shard, "bias": bias}}) as receiver:
            with pytest.raises(tssd.TssdKeyError, match="no version has come"):
                receiver.receive(timeout=0.05)
            for step in range(1, 4):
                with ThreadPoolExecutor() as pool:
                    received = pool.submit(receiver.receive)
                    weight += 1
                    if step < 3:
                        report = writer.put_state_dict(state, "policy", options=small_ring)
                    else:
                        with writer.publish("policy", bucket_bytes=64 << 10, options=ring) as publisher:
                            for name, tensor in state["model"].items():
                                publisher.put(f"model.{name}", tensor)
                        report = publisher.report
                    assert (report.version, report.transport) == (step, "shared_memory")
                    got = received.result()
                assert (got.version, got.transport) == (step, "shared_memory") and got.buckets > 6
                assert (columns == weight[:, 60:90]).all() and (bias == np.arange(7)).all()
            with pytest.raises(tssd.TssdValueError, match="is no tensor, and a ring"):
                writer.put_state_dict({"step": 3}, "policy", options=ring)
        # An array that is cast is sent in parts, also as a replica or as several boxes.
        half = {"weight": np.zeros((1000, 100), np.float16)}
        small = weight / 100_000
        halves = [tssd.TensorSlice((row, 0), (), (1000, 100), (500, 100), ()) for row in (500, 0)]
        whole = tssd.TensorSlice((0, 0), (), (1000, 100), (1000, 100), ())
        for sent in (
            small,
            tssd.TensorShard(small, whole, primary=False),
            tssd.TensorShard(np.concatenate([small[500:], small[:500]]), halves),
        ):
            half["weight"].fill(0)
            with reader.receiver("half", half) as receiver, ThreadPoolExecutor() as pool:
                received = pool.submit(receiver.receive)
                with writer.publish(
                    "half", writer=0, writers=1, bucket_bytes=64 << 10, transfer_dtype="float16", options=ring
                ) as publisher:
                    publisher.put("weight", sent)
                assert received.result().buckets > 3
            assert (half["weight"] == small.astype(np.float16)).all()
        assert not reader.exists("policy")
        for wrong, text in [("gpu", "residency is"), (3, "a tssd.Ring"), (tssd.Ring(buckets=0), "has buckets")]:
            with pytest.raises((TypeError, ValueError), match=text):
                options = tssd.PutOptions(residency=wrong)  # type: ignore[arg-type]
                writer.put_state_dict(state, "policy", options=options)
        overlapping = {"a": bias[:4], "b": bias[2:]}
        with reader.receiver("policy", overlapping) as receiver, pytest.raises(tssd.TssdValueError, match="in common"):
            receiver.receive(timeout=0)
    with tssd.Store("memory:") as store, pytest.raises(tssd.TssdUnsupportedError):
        store.receiver("policy", {"bias": bias})


@pytest.mark.parametrize("value", [[1, 2.5], (), (3, [None, "x"])])
def test_single_value_may_be_a_container(store: tssd.Store, value: Any) -> None:
    store.put("k", value)
    assert store.get("k") == value
    with pytest.raises(KeyError):
        store.get("k", fqn="nothing")


def test_rejection_names_key_and_version(store: tssd.Store) -> None:
    with pytest.raises(tssd.TssdTypeError) as caught:
        store.put_state_dict({"a": object()}, "policy", version=3)
    assert (caught.value.key, caught.value.version) == ("policy", 3)
    with pytest.raises(TypeError, match="JSON"):
        store.put_state_dict({"a": 1}, "policy", metadata={"loss": float("inf")})
    store.put_state_dict({"a": np.ones(3, np.float32)}, "policy", transfer_dtype=np.float16)
    assert np.asarray(store.get("policy", fqn="a")).dtype == np.float16
