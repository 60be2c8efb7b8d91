"""Files of torch.save with objects of numpy and of `collections`, read without running what they name."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import tssd
from tssd import _torch_pickle
from tssd.convert import convert, load_dcp, load_torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.skipif(not _torch_pickle._HAS_STAND_INS, reason="torch 2.6 or later"),
]

BIT_GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


def load_value(path: Path, value: Any) -> Any:
    torch.save({"value": value}, path)
    return load_torch(path)["value"]


def change_pickle(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the pickle in a file of torch.save."""
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, content in entries.items():
            file.writestr(name, change(content) if name.endswith("data.pkl") else content)


def draws(generator: np.random.Generator) -> list[Any]:
    small = generator.integers(0, 9, 3, dtype=np.uint32)
    return [*generator.integers(0, 1 << 60, 5), *generator.normal(size=5), *small]


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_generator_continues_from_its_state(tmp_path: Path, name: str) -> None:
    old = np.random.Generator(getattr(np.random, name)(7))
    draws(old)
    torch.save({"generator": old, "bits": old.bit_generator, "state": old.bit_generator.state}, tmp_path / "old.pt")
    convert(tmp_path / "old.pt", tmp_path / "new.tssd")
    loaded = tssd.load_file(tmp_path / "new.tssd")
    expected = draws(old)
    for state in loaded.values():
        new = np.random.Generator(getattr(np.random, name)())
        new.bit_generator.state = state
        assert draws(new) == expected


def test_random_states_continue(tmp_path: Path) -> None:
    random_state = np.random.RandomState(3)
    random_state.normal()
    torch.save({"object": random_state, "tuple": random_state.get_state()}, tmp_path / "old.pt")
    convert(tmp_path / "old.pt", tmp_path / "new.tssd")
    loaded = tssd.load_file(tmp_path / "new.tssd")
    expected = random_state.normal(size=5).tolist()
    for state in loaded.values():
        new = np.random.RandomState()
        new.set_state(state)
        assert new.normal(size=5).tolist() == expected


class OldGenerator:
    """Is pickled as numpy 1.24 pickles a generator."""

    def __init__(self, name: str, constructor: str, state: Any) -> None:
        self.name, self.constructor, self.state = name, constructor, state

    def __reduce__(self) -> Any:
        return getattr(np.random._pickle, self.constructor), (self.name,), self.state


@pytest.mark.parametrize("constructor", ["__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"])
def test_generators_of_numpy_1(tmp_path: Path, constructor: str) -> None:
    state = np.random.PCG64(1).state
    assert load_value(tmp_path / "old.pt", OldGenerator("PCG64", constructor, state)) == state


ARRAYS = [
    np.arange(6, dtype=np.uint32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(2.5),
    np.zeros((0, 3), np.int8),
    np.array([True, False]),
    np.array([1 + 2j, 3], np.complex64),
    np.array([1, 2], ">i4"),
    np.array([1.5], np.float16),
    np.array(["a", "bc"]),
    np.array([b"a", b"bc"]),
]


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_arrays_and_their_dtypes(tmp_path: Path, array: np.ndarray[Any, Any], module: bytes) -> None:
    path = tmp_path / "old.pt"
    torch.save({"array": array, "again": [array, array.dtype], "item": array.flat[0] if array.size else None}, path)
    change_pickle(path, lambda old: re.sub(rb"numpy\._?core\.multiarray", module, old))
    loaded = load_torch(path)
    found = loaded["array"]
    assert found.dtype == array.dtype and found.flags.writeable
    np.testing.assert_array_equal(found, array)
    assert found.flags.f_contiguous == array.flags.f_contiguous
    assert loaded["again"][0] is found and loaded["again"][1] == array.dtype
    if array.size:
        assert loaded["item"] == array.flat[0] and type(loaded["item"]) is type(array.flat[0])


def test_containers_of_the_standard_library(tmp_path: Path) -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    own: defaultdict[str, Any] = defaultdict(int)
    own["own"] = own
    value = {
        "counter": Counter("abca"),
        "default": defaultdict(list, a=[np.float32(1)]),
        "none": defaultdict(None, a=1),
        "ordered": OrderedDict(a=np.int64(2)),
        "deque": deque([1, np.bool_(True)], maxlen=3),
        "tuple": (1, (np.uint8(3),), torch.Size([2])),
        "set": {1, 2},
        "keys": {np.int64(5): "x"},
        "bytes": b"",
    }
    loaded = load_value(tmp_path / "old.pt", value)
    assert loaded == value
    assert [type(item) for item in loaded.values()] == [type(item) for item in value.values()]
    assert loaded["deque"].maxlen == 3 and loaded["default"].default_factory is list
    assert [type(key) for key in loaded["keys"]] == [np.int64]
    found = load_value(tmp_path / "ring.pt", {"ring": ring, "own": own, "one": deque([1])})
    assert found["ring"][1] is found["ring"]
    assert type(found["own"]) is defaultdict and found["own"]["own"] is found["own"]
    factories = [deque, defaultdict, Counter, OrderedDict, int, str]
    loaded = load_value(tmp_path / "factories.pt", [defaultdict(factory) for factory in factories])
    assert [value.default_factory for value in loaded] == factories
    assert load_value(tmp_path / "empty.pt", [np.str_(""), np.bytes_(b"")]) == ["", b""]


def test_checkpoint_of_dcp_with_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    dcp.save({"w": torch.ones(2), "rng": rng, "array": np.arange(3)}, checkpoint_id=tmp_path / "old")
    loaded = load_dcp(tmp_path / "old")
    assert loaded["rng"] == rng.bit_generator.state and loaded["array"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, None], object),
        np.zeros(2, [("a", "<f4")]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.dtype([("a", "<f4")]),
        np.datetime64("2020-01-01"),
        np.zeros(2, "S0") if np.zeros(2, "S0").dtype.itemsize == 0 else np.zeros(2, "M8[D]"),
        int,
        np.ndarray,
        np.dtype,
        deque,
    ],
    ids=str,
)
def test_other_objects_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(tssd.TssdValueError, match="is not supported|a class or a function"):
        load_value(tmp_path / "old.pt", value)


class Call:
    """Is pickled as a call of a function that a file may name."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.call = function, arguments, state

    def __reduce__(self) -> Any:
        return self.call if self.call[2] is not None else self.call[:2]


RECONSTRUCT = np.zeros(1).__reduce__()[0]
SCALAR = np.float32(1).__reduce__()[0]
FLOAT = np.dtype("f4")


@pytest.mark.parametrize(
    "value",
    [
        Call(RECONSTRUCT, (np.ndarray, (0,), b"b")),
        Call(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (2,), FLOAT, False, b"1234")),
        Call(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (-1, -1), FLOAT, False, b"1234")),
        Call(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1 << 62, 4), FLOAT, False, b"")),
        Call(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), "f4", False, b"1234")),
        Call(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1.0,), FLOAT, False, b"1234")),
        Call(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), FLOAT, False, [1])),
        Call(RECONSTRUCT, (np.ndarray, (0,), b"b"), "state"),
        Call(SCALAR, (FLOAT, b"123")),
        Call(SCALAR, ("f4", b"1234")),
        Call(np.dtype, ("U99999999999",)),
        Call(np.dtype, ("f4",), (3, "?", None, None, None, -1, -1, 0)),
        Call(np.dtype, ("f4",), (3, "<", None, ("a",), {"a": 1}, -1, -1, 0)),
        Call(np.random._pickle.__dict__["__bit_generator_ctor"], ("PCG64",)),
        Call(np.random._pickle.__dict__["__generator_ctor"], ("PCG64",)),
        Call(defaultdict, (print,)),
        Call(np.ndarray, (3,)),
        Call(int, ("9",)),
        Call(bytes, (1 << 40,)),
    ],
)
def test_contradictory_objects_are_refused(tmp_path: Path, value: Call) -> None:
    with pytest.raises(tssd.TssdError):
        load_value(tmp_path / "old.pt", value)


def test_load_of_another_caller_gets_no_stand_ins(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    for value in (np.arange(3), np.float32(1), np.random.default_rng(0), deque([1]), defaultdict(int)):
        torch.save({"value": value}, path)
        stand_ins: Any = [(stand_in, name) for name, stand_in in _torch_pickle._STAND_INS.items()]
        # As if another thread were loading.
        with torch.serialization.safe_globals(stand_ins), pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)


def test_threads_load_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"value": [np.arange(3), deque([1])]}, path)
    before = torch.serialization.get_safe_globals()
    with ThreadPoolExecutor(6) as pool:
        loaded = list(pool.map(lambda _: load_torch(path)["value"], range(60)))
    assert all(array.tolist() == [0, 1, 2] and ring == deque([1]) for array, ring in loaded)
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_too_deep_nesting_is_refused(tmp_path: Path) -> None:
    value: list[Any] = [np.float32(1)]
    for _ in range(1500):
        value = [value]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    torch.save({"value": value}, tmp_path / "old.pt")
    sys.setrecursionlimit(limit)
    with pytest.raises(tssd.TssdValueError, match="too deep"):
        load_torch(tmp_path / "old.pt")


@pytest.mark.parametrize("trusted", [[np.dtype], [RECONSTRUCT, np.ndarray, np.dtype, type(np.dtype("u4"))]])
def test_functions_that_the_caller_trusts_do_not_disturb(tmp_path: Path, trusted: list[Any]) -> None:
    with torch.serialization.safe_globals(trusted):
        assert load_value(tmp_path / "old.pt", np.array([1.5])).tolist() == [1.5]
        assert set(trusted) <= set(torch.serialization.get_safe_globals())


def test_functions_that_the_caller_trusts_stay(tmp_path: Path) -> None:
    torch.save({"value": np.float32(1)}, tmp_path / "old.pt")
    trusted = [SCALAR, np.dtype, type(FLOAT)]
    with torch.serialization.safe_globals(trusted):
        assert load_torch(tmp_path / "old.pt")["value"] == np.float32(1)
        assert torch.load(tmp_path / "old.pt", weights_only=True)["value"] == np.float32(1)


def test_names_of_the_pickles_of_this_numpy_are_known() -> None:
    names = set(_torch_pickle._STAND_INS)
    for value in (np.zeros(1), np.float32(1), np.random.RandomState(0), *map(np.random.default_rng, range(2))):
        pickled = io.BytesIO()
        pickle.Pickler(pickled, protocol=2).dump(value)
        found = {
            str(argument).replace(" ", ".")
            for op, argument, _ in pickletools.genops(pickled.getvalue())
            if op.name == "GLOBAL"
        }
        assert found - {"_codecs.encode"} <= names
