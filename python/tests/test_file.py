"""Archives in files, without torch."""

from __future__ import annotations

import enum
import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tssd
from equality import same

Point = namedtuple("Point", ["x", "y"])

LEAVES: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": -(2**63),
    "big": 2**200,
    "small": -(2**64),
    "float": -0.0,
    "nan": float("nan"),
    "complex": complex(-0.0, float("inf")),
    "str": "é\0\n",
    "surrogate": "a\ud800b",
    "long": "x" * 10_000,
    "bytes": bytes(range(256)),
    "many bytes": b"y" * 10_000,
}


def load(path: Path, **options: Any) -> Any:
    return tssd.load_file(path, framework="numpy", **options)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_nested_dict_roundtrips(path: Path, backend: str) -> None:
    ordered = OrderedDict(b=1, a=2)
    ordered.move_to_end("b")
    state = {
        **LEAVES,
        1: "int",
        "1": "str",
        None: 0,
        b"k": 0,
        (1, ("a", None)): 0,
        1.5: 0,
        False: 0,
        "empty": [{}, [], (), OrderedDict()],
        "ordered": ordered,
        "point": Point(Point(1, 2), y=[3]),
        "a.b": 1,
        "a": {"b": 2},
    }
    tssd.save_file(state, path)
    assert same(load(path, backend=backend), state)
    assert same(tssd.load(tssd.save(state), framework="numpy"), state)


def test_empty_dict_roundtrips(path: Path) -> None:
    tssd.save_file({}, path)
    assert load(path) == {}
    assert type(tssd.load(tssd.save(OrderedDict()), framework="numpy")) is OrderedDict


DTYPES = "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128 bool"


@pytest.mark.parametrize("name", DTYPES.split())
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_arrays_of_every_dtype_roundtrip(path: Path, name: str, backend: str) -> None:
    array = np.arange(24).astype(name).reshape(2, 3, 4)
    state = {
        "plain": array,
        "turned": array.transpose(2, 0, 1),
        "backwards": array[::-1, :, ::-2],
        "scalar": array[1, 2, 3],
        "no dimensions": array[1, 2, 3, ...],
        "nothing": array[:0],
        "expanded": np.broadcast_to(array[0], (5, 3, 4)),
        "foreign": array.astype(array.dtype.newbyteorder()),
    }
    tssd.save_file(state, path)
    loaded = load(path, backend=backend)
    assert list(loaded) == list(state)
    for key, expected in state.items():
        actual = loaded[key]
        assert type(actual) is type(expected), key
        assert actual.dtype == expected.dtype.newbyteorder("="), key
        np.testing.assert_array_equal(actual, expected)
    assert loaded["expanded"].strides[0] == 0
    assert loaded["turned"].strides == state["turned"].strides


@pytest.mark.parametrize(
    "name",
    "bfloat16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu int4 uint4".split(),
)
def test_arrays_of_ml_dtypes_roundtrip(path: Path, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1, 2, 0, 1]).astype(getattr(ml_dtypes, name))
    tssd.save_file({"a": array}, path)
    assert same(load(path)["a"], array)
    assert same(tssd.load(tssd.save({"a": array}), framework="numpy")["a"], array)


def test_arrays_that_share_memory_share_it_after_load(path: Path) -> None:
    base = np.arange(12, dtype=np.float32)
    tssd.save_file({"all": base, "part": base[4:8].reshape(2, 2), "other": base.copy()}, path)
    loaded = load(path)
    assert np.shares_memory(loaded["all"], loaded["part"])
    assert not np.shares_memory(loaded["all"], loaded["other"])
    assert path.stat().st_size < 4096 + 2 * 256 + 2048


@pytest.mark.parametrize("options", [{}, {"backend": "pread"}, {"verify": "off"}])
def test_loaded_arrays_are_read_only_and_outlive_the_file(path: Path, options: dict[str, Any]) -> None:
    array = np.arange(100_000)
    tssd.save_file({"a": array, "b": array + 1}, path)
    loaded = load(path, **options)["a"]
    path.unlink()
    with pytest.raises(ValueError, match="read-only"):
        loaded[0] = 1
    np.testing.assert_array_equal(loaded, array)


def test_loaded_arrays_survive_replacement_of_file(path: Path) -> None:
    tssd.save_file({"a": np.zeros(100_000)}, path)
    loaded = load(path)["a"]
    tssd.save_file({"a": np.ones(100_000)}, path)
    assert not loaded.any()
    assert load(path)["a"].all()


@pytest.mark.parametrize("compression", ["auto", "planes", "tiers", "zstd", "zstd-plain"])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_compressed_files_roundtrip(path: Path, compression: str, backend: str) -> None:
    array = np.arange(1_000_000, dtype=np.float32)
    state = {"a": array, "part": array[10:20], "text": "x" * 100_000, "bytes": b"y" * 100_000}
    tssd.save_file(state, path, compression=compression, level=3, digest="blake3")
    assert path.stat().st_size < array.nbytes * 7 // 8
    tssd.verify(path)
    assert same(load(path, backend=backend), state)
    with tssd.safe_open(path, "np", backend=backend) as file:
        np.testing.assert_array_equal(file.get_slice("a")[500_000:500_010], array[500_000:500_010])


def test_save_is_deterministic(path: Path) -> None:
    state = {"a": np.arange(1000), "b": LEAVES}
    tssd.save_file(state, path, {"b": "2", "a": "1"}, fsync=False)
    assert path.read_bytes() == tssd.save(state, {"a": "1", "b": "2"})


def test_metadata_roundtrips(path: Path) -> None:
    tssd.save_file({}, path, metadata={"format": "pt", "step": 3, "raw": b"\0"})
    with tssd.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt", "step": 3, "raw": b"\0"}
    tssd.save_file({}, path)
    with tssd.safe_open(path, "np") as file:
        assert file.metadata() is None
    metadata = {"lr": 1.5, "a": [1, {"b": None}], "big": 2**70, "yes": True, "raw": b"\0", "step": 3}
    tssd.save_file({}, path, metadata=metadata)
    with tssd.safe_open(path, "np") as file:
        assert file.metadata() == metadata
    for bad in ({"a": (1,)}, {1: "a"}, {"a": object()}, {"a": {1: 2}}):
        with pytest.raises(TypeError, match="metadata"):
            tssd.save_file({}, path, metadata=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reserved"):
        tssd.save_file({}, path, metadata={"tssd.x": "1"})


class Colour(enum.IntEnum):
    RED = 1


class Masked(np.ndarray[Any, Any]):
    pass


UNTYPED_LEAVES: list[tuple[Any, str]] = [
    (object(), "object"),
    (defaultdict(lambda: 0), "defaultdict"),
    (enum.Enum("Shape", "ROUND").ROUND, "Shape"),  # type: ignore[attr-defined]
    (bytearray(b"x"), "bytearray"),
    (lambda: 0, "function"),
    (np.zeros(2, dtype=object), "object"),
    (np.zeros(2, dtype="U3"), "str"),
    (np.zeros(2, dtype="datetime64[s]"), "datetime64"),
    (np.zeros(2, dtype=[("a", "f4")]), "void"),
    (np.zeros(2, dtype=np.longdouble), "longdouble"),
    (np.ma.masked_array([1, 2]), "MaskedArray"),
    (np.zeros(2).view(Masked), "Masked"),
    (slice("a"), "slice"),
]


@pytest.mark.parametrize(("bad", "name"), UNTYPED_LEAVES, ids=[name for _, name in UNTYPED_LEAVES])
def test_save_rejects_untyped_leaf_with_its_path(path: Path, bad: Any, name: str) -> None:
    path.write_bytes(b"old")
    with pytest.raises(TypeError) as caught:
        tssd.save_file({"a": [{}, {"b": bad}]}, path)
    error = caught.value
    assert isinstance(error, tssd.TssdError)
    assert (error.kind, error.fqn) == ("UntypedLeaf", "a.1.b")
    assert error.advice and error.advice in str(error)
    assert name.split("64")[0] in str(error) or name == "longdouble"
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("key", [frozenset(), (1, object()), np.int64(1), object()])
def test_save_rejects_unsupported_keys(key: Any) -> None:
    with pytest.raises(TypeError, match="key") as caught:
        tssd.save({"a": {key: 1}})
    assert caught.value.fqn == "a"  # type: ignore[attr-defined]


def test_save_rejects_nan_key() -> None:
    with pytest.raises(ValueError, match="NaN") as caught:
        tssd.save({"a": {float("nan"): 1}})
    assert caught.value.kind == "KeyKind"  # type: ignore[attr-defined]


@pytest.mark.parametrize("root", [[], None, 1, np.zeros(2), (), "x"])
def test_save_rejects_root_that_is_not_a_dict(root: Any) -> None:
    with pytest.raises(TypeError, match="dict"):
        tssd.save(root)


def test_deep_nesting_is_rejected_without_crash() -> None:
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    cyclic_dict: dict[str, Any] = {}
    cyclic_dict["a"] = cyclic_dict
    cyclic_list: list[Any] = []
    cyclic_list += [cyclic_list, cyclic_list]
    for bad in (nested, cyclic_dict, cyclic_list):
        with pytest.raises(ValueError, match="64 levels") as caught:
            tssd.save({"x": bad})
        assert caught.value.kind == "TooDeep"  # type: ignore[attr-defined]
    key: tuple[Any, ...] = ()
    for _ in range(10_000):
        key = (key,)
    with pytest.raises(tssd.TssdError):
        tssd.save({key: 1})
    deep: Any = 1
    for _ in range(63):
        deep = [deep]
    assert tssd.load(tssd.save({"x": deep}), framework="numpy") == {"x": deep}


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.value == self.value


@pytest.mark.parametrize("size", [1, 10_000])
def test_pickled_objects_require_allow_pickle(path: Path, size: int) -> None:
    state = {"a": {"b": Opaque(1), "c": {1, 2}, "d": frozenset(range(size))}, "e": np.arange(3)}
    tssd.save_file(state, path, allow_pickle=True)
    with pytest.raises(TypeError, match="allow_pickle") as caught:
        load(path)
    assert caught.value.fqn == "a.b"  # type: ignore[attr-defined]
    assert load(path, allow_pickle=True)["a"] == state["a"]
    data = tssd.save(state, allow_pickle=True)
    assert tssd.load(data, framework="numpy", allow_pickle=True)["a"] == state["a"]
    with pytest.raises(TypeError):
        tssd.load(data, framework="numpy")


def test_file_errors_are_os_errors(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        load(path)
    assert isinstance(missing.value, tssd.TssdError)
    assert missing.value.filename == str(path)
    with pytest.raises(FileNotFoundError):
        tssd.save_file({}, tmp_path / "no" / "x.tssd")
    with pytest.raises(IsADirectoryError) as folder:
        tssd.save_file({}, tmp_path)
    assert (folder.value.errno, folder.value.filename) == (errno.EISDIR, str(tmp_path))
    with pytest.raises(OSError, match="not a regular file") as device:
        tssd.save_file({}, "/dev/null")
    assert (device.value.errno, device.value.filename) == (errno.EINVAL, "/dev/null")
    for read in (load, tssd.verify, tssd.inspect, lambda p: tssd.safe_open(p, "np")):
        with pytest.raises(IsADirectoryError, match="directory"):
            read(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(NotADirectoryError) as below:
        load(path / "x.tssd")
    assert isinstance(below.value, tssd.TssdOSError) and below.value.filename == str(path / "x.tssd")
    with pytest.raises(TypeError):
        tssd.save_file({}, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("read", ["mmap", "pread", "safe_open", "verify", "inspect"])
def test_load_rejects_files_that_are_not_archives(path: Path, read: str) -> None:
    whole = tssd.save({"a": np.arange(1000)})
    for data in (b"", b"x", b"PK\3\4" + bytes(10_000), whole[:-1], whole + b"\0", bytes(5000)):
        path.write_bytes(data)
        with pytest.raises(tssd.TssdCorruptError) as caught:
            if read == "safe_open":
                tssd.safe_open(path, "np")
            elif read in ("verify", "inspect"):
                getattr(tssd, read)(path)
            else:
                load(path, backend=read)
        assert isinstance(caught.value, ValueError)
        assert str(path) in str(caught.value)
    with pytest.raises(tssd.TssdCorruptError):
        tssd.load(whole[:-1], framework="numpy")
    for invalid in (3, "x", None, [1, 2], {1: 2}):
        with pytest.raises(TypeError, match="another object with a buffer"):
            tssd.load(invalid)  # type: ignore[arg-type]


def test_load_accepts_any_buffer() -> None:
    from array import array

    state = {"a": np.arange(1_000_000.0), "b": "x"}
    data = tssd.save(state)
    # The length is a multiple of 8 bytes and exceeds `COPY_CHUNK_BYTES` (4 MiB).
    assert len(data) % 8 == 0 and len(data) > 4 << 20
    words = np.frombuffer(data, np.uint64)
    with_gaps = np.zeros((len(data), 2), np.uint8)
    with_gaps[:, 1] = np.frombuffer(data, np.uint8)
    for buffer in (
        bytearray(data),
        memoryview(data),
        array("Q", data),
        words.reshape(1, -1, 1),
        # `memoryview` does not support this element format.
        words.view(">u8"),
        with_gaps[:, 1],
    ):
        assert same(tssd.load(buffer, framework="numpy"), state), buffer
        assert tssd.TorchStoreStateDict.from_bytes(buffer).to_bytes() == data
    with pytest.raises(tssd.TssdCorruptError):
        tssd.load(bytearray(), framework="numpy")


def test_from_bytes_detects_damage() -> None:
    state = {"a": np.ones(100_000)}
    data = bytearray(tssd.save(state))
    data[data.index(np.float64(1).tobytes()) + 8 * 99_999] ^= 1
    with pytest.raises(tssd.TssdCorruptError) as caught:
        tssd.TorchStoreStateDict.from_bytes(data)
    assert caught.value.fqn == "a"


def test_flipped_byte_is_detected_when_read(path: Path) -> None:
    state = {"a": np.zeros(400_000), "b": np.ones(400_000)}
    tssd.save_file(state, path)
    with tssd.safe_open(path, "np") as file:
        assert file.offset_keys() == ["a", "b"]
    data = bytearray(path.read_bytes())
    at = data.index(np.float64(1).tobytes()) + 8 * 399_999
    data[at] ^= 1
    path.write_bytes(data)
    for backend in ("mmap", "pread"):
        with pytest.raises(tssd.TssdCorruptError) as caught:
            load(path, backend=backend)
        assert (caught.value.kind, caught.value.fqn) == ("ChunkCorrupt", "b")
        assert load(path, backend=backend, verify="off")["b"][399_999] != 1
        with pytest.raises(tssd.TssdCorruptError):
            tssd.safe_open(path, "np", backend=backend, verify="eager")
        with tssd.safe_open(path, "np", backend=backend) as file:
            np.testing.assert_array_equal(file.get_tensor("a"), state["a"])
            with pytest.raises(tssd.TssdCorruptError) as caught:
                file.get_tensor("b")
            assert caught.value.fqn == "b"
            # The damage is in another chunk.
            np.testing.assert_array_equal(file.get_slice("b")[:1000], state["b"][:1000])
            with pytest.raises(tssd.TssdCorruptError):
                file.get_slice("b")[-1:]
    with pytest.raises(tssd.TssdCorruptError):
        tssd.verify(path)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_flipped_byte_of_compressed_file_is_detected(path: Path, backend: str) -> None:
    tssd.save_file({"a": np.arange(1_000_000)}, path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[4096 + 1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(tssd.TssdCorruptError):
        load(path, backend=backend)
    with pytest.raises(tssd.TssdCorruptError) as caught:
        load(path, backend=backend, verify="off")
    assert (caught.value.kind, caught.value.fqn) == ("ChunkCorrupt", "a")
    with tssd.safe_open(path, "np", backend=backend) as file:
        with pytest.raises(tssd.TssdCorruptError):
            file.get_tensor("a")
        assert file.get_slice("a")[-1] == 999_999


def test_load_verifies_padding(path: Path) -> None:
    tssd.save_file({"a": np.zeros(3), "b": np.ones(3)}, path)
    data = bytearray(path.read_bytes())
    data[4096 + 100] = 1
    path.write_bytes(data)
    with pytest.raises(tssd.TssdCorruptError) as caught:
        load(path)
    assert caught.value.kind == "PaddingNotZero"


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_safe_open_reads_tensors_and_slices(path: Path, backend: str) -> None:
    big = np.arange(300_000, dtype=np.int32).reshape(100, 3000)
    state = {"z": big, "a": {"b": np.arange(3), 0: np.float32(2)}, "text": "x", "e": np.zeros((0, 3))}
    tssd.save_file(state, path)
    with tssd.safe_open(path, framework="np", backend=backend) as file:
        assert file.keys() == ["z", "a.b", "a.0", "e"]
        assert same(file.get_tensor("z"), big)
        assert same(file.get_tensor("a.0"), np.float32(2))
        part = file.get_slice("z")
        assert (part.get_shape(), part.get_dtype()) == ([100, 3000], "int32")
        for index in np.s_[
            5, ..., -1, 3:7, ::-1, 1:90:7, :, (5, 7), (slice(None), 3), (Ellipsis, slice(2, 9)),
            (slice(90, 2, -3), slice(None, None, -5)), 100:, (), (-1, -1),
        ]:  # fmt: skip
            np.testing.assert_array_equal(part[index], big[index])
        assert file.get_slice("e")[:, 1].shape == (0,)
        for bad in (100, (0, 0, 0), -101):
            with pytest.raises(IndexError):
                part[bad]
        for bad in ("a", 1.0, np.array([1.0]), {1}, (slice(0, 1), b"x"), np.float64(1)):
            with pytest.raises(TypeError, match="is no index"):
                part[bad]
        with pytest.raises(KeyError) as missing:
            file.get_tensor("a.c")
        assert (missing.value.kind, missing.value.fqn) == ("NotFound", "a.c")  # type: ignore[attr-defined]
        with pytest.raises(TypeError):
            file.get_tensor("text")
        tensor = file.get_tensor("z")
    with pytest.raises(ValueError, match="closed"):
        file.keys()
    path.unlink()
    assert same(tensor, big)


# Indices of an array of shape (6, 5, 4) that are more than ints, slices and `...`.
ARRAY_INDICES = [
    np.int64(2), np.uint8(250 % 6), np.array(-1), (np.int32(1), slice(np.int64(1), np.int64(4))), None,
    (None, 0, ..., None), (2, None, slice(None, None, -2)), True, False, (slice(1, 3), True), np.True_,
    [], [3, 1, 3], [-1, 0], ([2, 4], 1), (1, slice(None), [0, 3]), (slice(1, 5), [0, 4], 2), ([1, 2], [3, 4], [0, -1]),
    (..., [1, 1]), ([0, 5], ..., [2, 3]), range(2, 5), (range(0), slice(2)), ((0, 1), slice(2)),
    np.array([5, 0]), np.array([[1, 2], [3, -6]]), np.array([], np.int64), np.array([1, 2], np.uint8),
    ([0], None, 2), [True, False] * 3, np.arange(6) % 2 == 0, (slice(2, 4), np.arange(5) > 2),
    np.arange(120).reshape(6, 5, 4) % 7 == 0, (0, np.arange(20).reshape(5, 4) > 11), [[0, 1], [2, 3]],
    ([[1], [2]], [0, 4]), (slice(1, 4), [np.int64(1), 2]), np.array([3, 3], ">i4"),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("index", ARRAY_INDICES, ids=repr)
def test_slice_takes_indices_of_numpy(path: Path, backend: str, index: Any) -> None:
    array = np.arange(120, dtype=np.int16).reshape(6, 5, 4)
    tssd.save_file({"a": array}, path)
    with tssd.safe_open(path, "np", backend=backend) as file:
        assert same(file.get_slice("a")[index], array[index])
    with tssd.Store("memory:") as store:
        store.put("a", array)
        with store.open("a") as version:
            assert np.array_equal(np.asarray(version.get_slice("")[index]), array[index])


@pytest.mark.parametrize(
    "index",
    [[6], [0, -7], np.array([1, 6]), (0, 0, 0, 0, None), (..., ..., None), np.ones(5, bool), ([1, 2], [0, 1, 2])],
)
def test_slice_refuses_indices_out_of_range(path: Path, index: Any) -> None:
    tssd.save_file({"a": np.zeros((6, 5, 4))}, path)
    with tssd.safe_open(path, "np") as file, pytest.raises(IndexError):
        file.get_slice("a")[index]


def test_slice_of_list_reads_only_its_range(path: Path) -> None:
    array = np.arange(4 << 20, dtype=np.uint8).reshape(4, 1 << 20)
    tssd.save_file({"a": array}, path)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2 + (1 << 20))
        file.write(b"damaged")
    with tssd.safe_open(path, "np") as opened:
        part = opened.get_slice("a")
        assert np.array_equal(part[[1, 0], :3], array[[1, 0], :3])
        with pytest.raises(tssd.TssdCorruptError):
            part[[0, 3]]


def test_slice_has_shape_and_dtype(path: Path) -> None:
    tssd.save_file({"a": np.zeros((2, 3), np.float16), "s": np.array(1)}, path)
    with tssd.safe_open(path, "np") as file:
        part = file.get_slice("a")
        assert (part.shape, part.dtype) == ((2, 3), np.dtype(np.float16))
        assert (file.get_slice("s").shape, file.get_slice("s")[()], file.get_slice("s")[None]) == ((), 1, [1])


def test_safe_open_is_a_mapping(path: Path) -> None:
    state = {"z": np.arange(3), "a": {"b": np.zeros(2)}, "n": 1}
    tssd.save_file(state, path)
    with tssd.safe_open(path, "np") as file:
        assert isinstance(file, Mapping) and len(file) == 2 and list(file) == file.keys() == ["z", "a.b"]
        assert "z" in file and "a.b" in file and not any(name in file for name in ("n", "a", "x", 1, None))
        assert same(file["z"], state["z"]) and same(file.get("a.b"), np.zeros(2))
        assert file.get("n") is None and file.get(1, "default") == "default"
        for name in ("n", "x", 1):
            with pytest.raises(KeyError):
                file[name]
        assert same(dict(file), {"z": state["z"], "a.b": np.zeros(2)}) and same({**file}, dict(file))
        assert same(dict(file.items()), dict(file)) and len(list(file.values())) == len(file.items()) == 2
        tensors = file.get_tensors()
        assert list(tensors) == file.offset_keys() and all(same(tensors[name], file[name]) for name in file)
    for access in (len, list, lambda closed: "z" in closed, lambda closed: closed["z"], pickle.dumps):
        with pytest.raises(ValueError, match="closed"):
            access(file)


def read_in_worker(handles: dict[str, Any], names: list[str]) -> list[Any]:
    return [handles["file"][name] for name in names] + [handles["slice"][1:, [0]]]


def test_handle_is_pickled_for_spawned_workers(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": np.arange(6).reshape(3, 2), "b": np.ones(2)}
    tssd.save_file(state, path)
    monkeypatch.chdir(path.parent)
    with tssd.safe_open(path.name, "np", backend="pread", verify="eager") as file:
        handles = {"file": file, "slice": file.get_slice("a")}
        # The workers have another current folder.
        monkeypatch.chdir("/")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results = pool.apply(read_in_worker, (handles, ["a", "b"]))
            assert same(results, [*state.values(), state["a"][1:, [0]]])
            # A file of the same content may be another file.
            tssd.save_file(state, path)
            assert same(pool.apply(read_in_worker, (handles, ["b"]))[0], state["b"])


@pytest.mark.parametrize("name", ["file", "slice"])
def test_unpickled_handle_refuses_another_file(path: Path, name: str) -> None:
    tssd.save_file({"a": np.zeros(3)}, path)
    file = tssd.safe_open(path, "np")
    pickled = pickle.dumps(file if name == "file" else file.get_slice("a"))
    # Only one element differs.
    tssd.save_file({"a": np.array([0.0, 1.0, 0.0])}, path)
    with pytest.raises(tssd.TssdValueError, match="it is another file") as caught:
        pickle.loads(pickled)
    assert str(path) in str(caught.value) and caught.value.kind == "FileReplaced"
    assert same(file["a"], np.zeros(3))
    path.unlink()
    with pytest.raises(tssd.TssdFileNotFoundError):
        pickle.loads(pickled)


def test_tensor_of_unknown_dtype_is_listed_and_not_converted() -> None:
    file_name = Path(__file__).parents[2] / "spec/vectors/valid/105-other-dtypes.tssd"
    message = r"dtype float6_e3m2 \(number 0x2000\) is unknown"
    with pytest.raises(TypeError, match=message) as caught:
        load(file_name)
    assert (caught.value.kind, caught.value.fqn) == ("UnsupportedDtype", "tensor")  # type: ignore[attr-defined]
    with tssd.safe_open(file_name, framework="np") as file:
        assert file.keys() == ["tensor", "shard", "empty", "vendor"]
        part = file.get_slice("vendor")
        assert (part.get_shape(), part.get_dtype()) == ([2], "example.q4_0")
        with pytest.raises(TypeError, match="example.q4_0"):
            file.get_tensor("vendor")


def test_safe_open_rejects_ambiguous_fqn(path: Path) -> None:
    tssd.save_file({"a.b": np.zeros(1), "a": {"b": np.ones(1)}}, path)
    with tssd.safe_open(path, "np") as file, pytest.raises(ValueError, match="more than one") as caught:
        file.get_tensor("a.b")
    assert caught.value.kind == "AmbiguousFqn"  # type: ignore[attr-defined]


def test_invalid_options_are_rejected(path: Path) -> None:
    tssd.save_file({}, path)
    for options in ({"backend": "x"}, {"verify": True}, {"verify": "x"}, {"framework": "jax"}):
        with pytest.raises((ValueError, TypeError)):
            tssd.load_file(path, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cuda"):
        load(path, device="cuda")
    for options in ({"compression": "lz4"}, {"digest": "md5"}):
        with pytest.raises(ValueError):
            tssd.save({}, **options)  # type: ignore[arg-type]


def test_save_preserves_symlink_and_permissions(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"old")
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    tssd.save_file({"a": 1}, link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert load(path) == {"a": 1}


def test_save_of_concurrently_modified_dict_is_consistent() -> None:
    state: dict[str, Any] = {f"{i}": np.full(10, i) for i in range(300)}
    ordered: OrderedDict[str, int] = OrderedDict((f"{i}", i) for i in range(300))
    state["ordered"] = ordered
    stop = threading.Event()

    def change() -> None:
        i = 0
        while not stop.is_set():
            i += 1
            state[f"new {i % 50}"] = np.full(10, i)
            state.pop(f"new {(i + 25) % 50}", None)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(50):
            loaded = tssd.load(tssd.save(state), framework="numpy")
            assert {f"{i}" for i in range(300)} <= loaded.keys()
            assert all((loaded[f"{i}"] == i).all() for i in range(300))
    finally:
        stop.set()
        thread.join()


INTERRUPT_SCRIPT = """
import os, signal, sys, threading, time
import numpy as np, tssd
state = {str(i): np.zeros(1 << 24) for i in range(10)}  # zero pages use no memory, and the write takes long
def is_open(name):
    try: return os.readlink("/proc/self/fd/" + name).startswith(sys.argv[1])
    except OSError: return False
def interrupt():
    while not any(map(is_open, os.listdir("/proc/self/fd"))): time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    tssd.save_file(state, sys.argv[1] + "/x.tssd")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_interrupts_save_and_leaves_no_partial_file(path: Path) -> None:
    path.write_bytes(b"old")
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPT_SCRIPT, str(path.parent)], capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "interrupted\n", result.stderr
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == b"old"


KILL_SCRIPT = """
import resource, signal, sys
import numpy as np, tssd
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
if sys.argv[2] == "SIGXFSZ":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
state = {str(i): np.zeros(1 << 24) for i in range(10)}
print("saving", flush=True)
tssd.save_file(state, sys.argv[1])
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGXFSZ"])
def test_killed_save_leaves_no_file(path: Path, name: str) -> None:
    path.write_bytes(b"old")
    for delay in (0.02, 0.1):
        command = [sys.executable, "-c", KILL_SCRIPT, str(path), name]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"saving\n"
            time.sleep(delay)
            if name != "SIGXFSZ":
                process.send_signal(signal.Signals[name])
            assert process.wait(timeout=60) == -signal.Signals[name]
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        assert path.read_bytes() == b"old"
    tssd.save_file({"a": np.zeros(3)}, path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_forked_child_reads_open_files(path: Path, backend: str) -> None:
    array = np.arange(400_000)
    tssd.save_file({"a": array, "b": array * 2}, path)
    loaded = load(path, backend=backend)
    file = tssd.safe_open(path, "np", backend=backend)
    child = os.fork()
    if child == 0:
        ok = same(loaded["a"], array) and same(file.get_tensor("b"), array * 2)
        ok = ok and same(tssd.load(tssd.save({"a": array}), framework="numpy")["a"], array)
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same(file.get_tensor("a"), array)
    assert same(loaded["b"], array * 2)


def test_threads_read_one_file_concurrently(path: Path) -> None:
    state = {f"{i}": np.full(50_000, i) for i in range(16)}
    tssd.save_file(state, path)
    wrong: list[str] = []
    with tssd.safe_open(path, "np") as file:

        def read() -> None:
            for key in state:
                if not same(file.get_tensor(key), state[key]):
                    wrong.append(key)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_inspect_returns_tree(path: Path) -> None:
    tssd.save_file({"a": np.zeros((2, 3), np.float32), "b": [1]}, path, {"k": "v"})
    view = tssd.inspect(path)
    assert view["root"]["dict"][0][0] == {"str": "a"}
    assert view["root"]["dict"][0][1]["tensor"]["dtype"] == "float32"


def test_stored_files_are_not_listed_as_tensors(path: Path) -> None:
    files = {"config.json": b"{}", "sub/empty": b"", "long": bytes(range(256)) * 100}
    tssd.save_file({"a": np.zeros(3, np.float32), ".files": files}, path)
    assert tssd.load_file(path, framework="numpy")[".files"] == files
    with tssd.safe_open(path, framework="numpy") as file:
        assert file.keys() == ["a"] == list(file.offset_keys())
        with pytest.raises(tssd.TssdTypeError):
            file.get_tensor(".files.config.json")


def test_full_disk_is_an_os_error(path: Path, limit_file_size: Callable[[int], None]) -> None:
    tssd.save_file({"a": 1}, path)
    limit_file_size(1 << 20)
    with pytest.raises(tssd.TssdOSError) as full:
        tssd.save_file({"a": np.zeros(2 << 20, np.uint8)}, path)
    assert (full.value.errno, full.value.filename) == (errno.EFBIG, str(path))
    assert full.value.strerror == os.strerror(errno.EFBIG)
    assert load(path) == {"a": 1}


NAME = "n" * 100_000


@pytest.mark.parametrize(
    "fail",
    [
        lambda path: tssd.save_file({NAME: object()}, path),
        lambda path: tssd.save_file({"a": {NAME: object()}}, path),
        lambda path: tssd.save_file({" n" * 50_000: object()}, path),
        lambda path: tssd.save_file({NAME: 1}, path),
        lambda path: tssd.save_file({b"n" * 100_000: 1}, path),
        lambda path: tssd.save_file({NAME: np.zeros(3, object)}, path),
        lambda path: tssd.save_file({"a": type(NAME, (), {})()}, path),
        lambda path: tssd.save_file({"a": {type(NAME, (), {})(): 1}}, path),
        lambda path: tssd.save_file({"a": np.zeros(2, [(NAME, "i4")])}, path),
        lambda path: tssd.save_file({"a": 1}, path, metadata={NAME: object()}),
        lambda path: tssd.save_file({"a": 1}, path, metadata={f"tssd.{NAME}": 1}),
        lambda path: tssd.save_file({"a": 1}, path, compression=NAME),
        lambda path: tssd.save_file({"a": 1}, path.parent / NAME),
        lambda path: load(path.parent / NAME),
        lambda path: load(path, device=NAME),
        lambda path: load(path, verify=NAME),
        lambda path: tssd.load_file(path, framework=NAME),
        lambda path: tssd.load(type(NAME, (), {})()),  # type: ignore[arg-type]
        lambda path: tssd.safe_open(path, "np").get_tensor(NAME),
        lambda path: tssd.safe_open(path, "np")[NAME],
        lambda path: tssd.safe_open(path, "np").get_slice(NAME),
        lambda path: tssd.safe_open(path, "np").get_slice("a")[NAME],
        lambda path: tssd.safe_open(path, "np").get_slice("a")[type(NAME, (), {})()],
        lambda path: tssd.Store(f"http://{NAME}"),
        lambda path: tssd.Store(f"tls://{NAME}"),
        lambda path: tssd.Store(f"unix:{NAME}"),
        lambda path: tssd.Store(str(path.parent / NAME)),
    ],
)
def test_long_names_are_abridged_in_messages(path: Path, fail: Callable[[Path], object]) -> None:
    tssd.save_file({"a": np.zeros(3)}, path)
    with pytest.raises((tssd.TssdError, TypeError, ValueError, LookupError, OSError)) as caught:
        fail(path)
    message = str(caught.value)
    assert len(message) <= 2000 and "n" * 201 not in message
    # The attributes are whole.
    fqn = getattr(caught.value, "fqn", None)
    assert fqn is None or len(fqn) < 10 or len(fqn) >= 100_000
    assert "characters)" in message or "n" * 20 not in message


def test_messages_abridge_as_the_extension_module_does() -> None:
    from tssd import _errors

    assert _errors.abridge(f"a `{'n' * 200}`") == f"a `{'n' * 200}`"
    end = "n" * 90
    assert _errors.abridge(f"a `{'n' * 201}`: 'b'") == f"a `{end}…{end} (201 characters)`: 'b'"
    assert len(_errors.abridge("a b" * 100_000)) < 2000


def test_every_system_error_has_its_class() -> None:
    from tssd import _errors

    for number in errno.errorcode:
        expected = type(OSError(number, ""))
        for kind, base in (("Io", tssd.TssdOSError), ("io", tssd.TssdOSError), ("unreachable", ConnectionError)):
            error = _errors.new_exception(kind, "", "wrong", None, None, "name", number)
            assert isinstance(error, OSError) and isinstance(error, base) and isinstance(error, expected)
            same_error = pickle.loads(pickle.dumps(error))
            assert type(same_error) is type(error) and str(same_error) == str(error)
            for found in (error, same_error):
                details = (found.errno, found.strerror, found.filename)
                assert details == (number, os.strerror(number), "name")
    assert issubclass(tssd.TssdIsADirectoryError, IsADirectoryError)


def test_every_error_kind_has_a_class() -> None:
    from tssd import _errors, _tssd

    kinds = {name: rule for name, rule, _ in _tssd._kinds()}
    assert _errors._FORMAT_KINDS.keys() <= kinds.keys()
    for name, rule in kinds.items():
        error = _errors.new_exception(name, rule, "wrong", None, None, None, 28 if name == "Io" else None)
        assert isinstance(error, tssd.TssdError)
        assert error.kind == name
    assert issubclass(_errors.exception_class("NotFound", "read"), KeyError)
    assert issubclass(_errors.exception_class("ChunkCorrupt", "F-090"), ValueError)
    assert issubclass(_errors.exception_class("LimitExceeded", "read"), MemoryError)
    assert issubclass(tssd.TssdTimeoutError, TimeoutError)
    assert issubclass(tssd.TssdConnectionError, ConnectionError)


def test_tensor_slice_validates_and_pickles() -> None:
    import pickle

    one = tssd.TensorSlice((2, 0), (1,), (4, 3), (2, 3), (2,))
    assert one.offsets == (2, 0) and one.coordinates == (1,) and one.mesh_shape == (2,)
    assert one.global_shape == (4, 3) and one.local_shape == (2, 3)
    restored = eval(repr(one), {"TensorSlice": tssd.TensorSlice})
    assert restored == one and hash(restored) == hash(one) and pickle.loads(pickle.dumps(one)) == one
    assert one != tssd.TensorSlice((0, 0), (0,), (4, 3), (2, 3), (2,))
    for bad in (
        ((3, 0), None, (4, 3), (2, 3), ()),
        ((0,), None, (4, 3), (2, 3), ()),
        ((0, 0), (2,), (4, 3), (2, 3), (2,)),
    ):
        with pytest.raises(ValueError):
            tssd.TensorSlice(*bad)
    with pytest.raises(OverflowError):
        tssd.TensorSlice((-1,), None, (4,), (2,), ())


def test_shards_of_arrays_roundtrip(path: Path) -> None:
    local = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor_slice = tssd.TensorSlice((2, 0), (1,), (4, 3), (2, 3), (2,))
    tssd.save_file(
        {
            "w": tssd.TensorShard(local, tensor_slice),
            "empty": tssd.TensorShard(local[:0], tssd.TensorSlice((4, 0), (1,), (4, 3), (0, 3), (2,))),
        },
        path,
    )
    loaded = load(path)["w"]
    assert type(loaded) is tssd.TensorShard
    assert loaded.tensor_slice == tensor_slice and same(loaded.local, local)
    with tssd.safe_open(path, "np") as file:
        assert file.get_tensor("w").tensor_slice == tensor_slice
        with pytest.raises(TypeError, match="shard"):
            file.get_slice("w")
    with pytest.raises(ValueError, match="shape"):
        tssd.TensorShard(local[:1], tensor_slice)
    with pytest.raises(TypeError):
        tssd.TensorShard([1, 2], tensor_slice)  # type: ignore[type-var]


def test_shard_of_several_boxes_roundtrips(path: Path) -> None:
    whole = np.arange(8 * 6).reshape(8, 6)
    rows, columns = [(0, 2), (4, 2)], [(1, 1), (3, 2)]
    local = np.concatenate([whole[r : r + n] for r, n in rows])
    local = np.concatenate([local[:, c : c + n] for c, n in columns], axis=1)
    slices = [
        tssd.TensorSlice((r, c), None, (8, 6), (m, n), ()) for r, m in rows for c, n in columns
    ]
    tssd.save_file({"w": tssd.TensorShard(local, slices)}, path)
    loaded = load(path)["w"]
    assert loaded.tensor_slice == slices
    np.testing.assert_array_equal(loaded.local, local)
    with pytest.raises(ValueError):
        tssd.TensorShard(local, slices[:3])
    # As many boxes as a grid of two rows and two columns has, but these do not form a grid.
    sizes = [(2, 1), (3, 4), (2, 1), (2, 1)]
    with pytest.raises(ValueError):
        tssd.TensorShard(np.zeros((5, 5)), [tssd.TensorSlice((0, 0), None, (5, 5), size, ()) for size in sizes])
    with pytest.raises(ValueError):
        tssd.TensorShard(local, [])


def test_in_memory_state_dict_roundtrips() -> None:
    import pickle

    state = {"a": np.arange(6.0).reshape(2, 3), "b": {"c": 1, "d": "x" * 10_000}}
    encoded = tssd.TorchStoreStateDict.from_state_dict(state)
    assert encoded.nbytes == len(encoded.to_bytes()) == len(tssd.save(state))
    assert encoded.to_bytes() == tssd.save(state)
    for restored in (tssd.TorchStoreStateDict.from_bytes(encoded.to_bytes()), pickle.loads(pickle.dumps(encoded))):
        assert restored.to_bytes() == encoded.to_bytes()
    flat = encoded.flattened_state_dict
    assert list(flat) == ["a", "b.c", "b.d"]
    reference = flat["a"]
    assert isinstance(reference, tssd.TensorReference)
    assert (reference.dtype, reference.shape, reference.nbytes) == ("float64", (2, 3), 48)
    blob = bytes(np.asarray(encoded.tensor_blob))
    assert reference.offset is not None
    assert blob[reference.offset : reference.offset + 48] == state["a"].tobytes()  # type: ignore[attr-defined]
    assert flat["b.c"] == 1 and flat["b.d"] == "x" * 10_000
    with pytest.raises(ValueError, match="fqn"):
        tssd.TorchStoreStateDict.from_state_dict({"a.b": 1, "a": {"b": 2}}).flattened_state_dict
    with pytest.raises(ValueError):
        tssd.TorchStoreStateDict.from_bytes(b"x")


def test_save_raises_error_of_signal_handler(path: Path) -> None:
    class Stop(Exception):
        pass

    def handler(*_: object) -> None:
        raise Stop

    old = signal.signal(signal.SIGALRM, handler)
    state = {str(i): np.zeros(4_000_000) for i in range(4)}
    try:
        with pytest.raises(Stop):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            while True:
                tssd.save_file(state, path, compression="zstd", fsync=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert {entry.name for entry in path.parent.iterdir()} <= {path.name}
