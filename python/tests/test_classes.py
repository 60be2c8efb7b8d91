"""Objects of the standard library and of subclasses in archives: classes come back without pickle and without imports."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import pathlib
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import tssd

VECTORS = Path(__file__).parents[2] / "spec/vectors/valid"
UTC = datetime.timezone.utc
OFFSET = datetime.timezone(-datetime.timedelta(hours=5, seconds=30, microseconds=1))

VALUES: list[Any] = [
    Counter({"b": 2, "a": -1}),
    Counter({"a": None}),  # type: ignore[dict-item]
    Counter(),
    defaultdict(list, a=[1]),
    defaultdict(None, a=1),
    {1, "1", (1, "a"), None, 2.5, b"x"},
    set(),
    frozenset([2**70, -1]),
    SimpleNamespace(b=1, a={"x": {2}}),
    deque([1, 2], 3),
    deque([], 0),
    deque("ab"),
    range(10, 0, -2),
    range(2**70),
    slice(1, None, 2),
    datetime.timedelta(-1, 5, 7),
    datetime.timedelta.max,
    datetime.timezone(datetime.timedelta(hours=-3), "home"),
    UTC,
    pathlib.PurePosixPath("/a/b"),
    pathlib.PurePosixPath(),
    pathlib.PureWindowsPath("C:/a"),
    Path("x/../\udce9"),
    datetime.date(2024, 2, 29),
    datetime.time(1, 2, 3, 4),
    datetime.time(1, 2, tzinfo=UTC),
    datetime.datetime.min,
    datetime.datetime(2026, 11, 28, 9, 30, 1, 5, tzinfo=OFFSET),
]


def is_same(left: Any, right: Any) -> bool:
    if type(left) is not type(right) or left != right:
        return False
    if isinstance(left, defaultdict) and left.default_factory is not right.default_factory:
        return False
    if isinstance(left, deque) and left.maxlen != right.maxlen:
        return False
    return not isinstance(left, dict) or list(left) == list(right)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_standard_class_roundtrips(value: Any) -> None:
    loaded = tssd.load(tssd.save({"a": [value, {"b": value}]}), framework="numpy")["a"]
    assert is_same(loaded[0], value) and is_same(loaded[1]["b"], value), loaded


@pytest.mark.parametrize(
    "factory",
    [None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, OrderedDict, Counter, deque],
)
def test_defaultdict_keeps_its_factory(factory: Any) -> None:
    loaded = tssd.load(tssd.save({"a": defaultdict(factory)}), framework="numpy")["a"]
    assert type(loaded) is defaultdict and loaded.default_factory is factory


def test_containers_with_tags_hold_tensors() -> None:
    array = np.arange(3, dtype=np.float32)
    state = {"a": deque([defaultdict(dict, {0: {"exp_avg": array}})], 2)}
    loaded = tssd.load(tssd.save(state), framework="numpy")["a"]
    assert loaded.maxlen == 2 and np.array_equal(loaded[0][0]["exp_avg"], array)


def test_sets_of_equal_elements_have_equal_bytes() -> None:
    names = [f"layer{number}" for number in range(100)]
    assert tssd.save({"a": set(names)}) == tssd.save({"a": set(reversed(names))})


REFUSED: list[tuple[Any, str]] = [
    (defaultdict(lambda: 1), "factory"),
    (datetime.datetime(2026, 1, 1, fold=1), "fold"),
    (datetime.datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")), "time zone"),
    (datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET")), "time zone"),
    (ZoneInfo("UTC"), "ZoneInfo"),
    ({float("nan")}, "NaN"),
    ({object()}, "key"),
    (slice("a"), "slice"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_save_refuses_what_would_lose_information(value: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        tssd.save({"a": [value]})
    error = caught.value
    assert isinstance(error, tssd.TssdError) and error.fqn == ("a.0"), error


def test_path_of_another_system_becomes_pure() -> None:
    if not VECTORS.exists():
        pytest.skip("needs spec/vectors")
    loaded = tssd.load_file(VECTORS / "152-class-strs.tssd", framework="numpy") if has_torch() else {}
    for name, value in loaded.items():
        if name.startswith("pathlib.WindowsPath"):
            assert type(value) is pathlib.PureWindowsPath


def has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None


# ---- Subclasses ----------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 3


class Mode(str, enum.Enum):
    FAST = "fast"


class Number(float):
    def __float__(self) -> float:
        return 7.0


class Config(dict[str, Any]):
    def items(self) -> Any:
        return []


class Ordered(OrderedDict[str, Any]):
    pass


class Names(list[str]):
    pass


class Pair(tuple[int, ...]):
    pass


def test_subclasses_are_stored_as_their_base_and_reported(path: Path) -> None:
    state = {
        "enum": Colour.RED,
        "mode": Mode.FAST,
        "config": Config(x=Number(-0.0)),
        "ordered": Ordered(b=1, a=2),
        "names": [Names(["a"])],
        "pair": Pair((1, 2)),
        "numpy": np.str_("é"),
        "plain": 1,
    }
    report = tssd.save_file(state, path)
    assert report.bytes == path.stat().st_size
    own = {name: cls.split(".")[-1] for name, cls in report.stored_as_base.items()}
    assert own == {
        "enum": "Colour",
        "mode": "Mode",
        "config": "Config",
        "config.x": "Number",
        "ordered": "Ordered",
        "names.0": "Names",
        "pair": "Pair",
        "numpy": "str_",
    }
    loaded = tssd.load_file(path, framework="numpy")
    assert repr(loaded["config"]) == "{'x': -0.0}" and type(loaded["ordered"]) is OrderedDict
    assert [type(value) for value in loaded.values()] == [int, str, dict, OrderedDict, list, tuple, str, int]
    assert type(loaded["names"][0]) is list and loaded["ordered"] == {"b": 1, "a": 2}


def test_keys_of_subclasses_are_stored_as_their_base_and_reported(path: Path) -> None:
    state = {Mode.FAST: {Colour.RED: 1, 2: 3}, "set": {Mode.FAST, "slow"}, "pair": {(Mode.FAST, Number(0.5)): 4}}
    report = tssd.save_file(state, path)
    own = {name: cls.split(".")[-1] for name, cls in report.stored_as_base.items()}
    red = int(Colour.RED)
    assert own == {
        "fast (key)": "Mode",
        f"fast.{red} (key)": "Colour",
        "set.fast (key)": "Mode",
        'pair.("fast", 0.5) (key)': "Mode",
    }
    loaded = tssd.load_file(path, framework="numpy")
    assert loaded == {"fast": {red: 1, 2: 3}, "set": {"fast", "slow"}, "pair": {("fast", 0.5): 4}}
    assert {type(key) for key in loaded} == {str} and type(next(iter(loaded["fast"]))) is int
    pickled = tssd.load(tssd.save(state, allow_pickle=True), framework="numpy", allow_pickle=True)
    assert pickled == loaded


def test_keys_that_are_equal_as_their_base_are_refused() -> None:
    class Own(str):
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            return self is other

    for value in ({Own("a"): 1, Own("a"): 2}, {Own("a"), Own("a")}):
        assert len(value) == 2
        with pytest.raises(tssd.TssdError, match="equal as their base"):
            tssd.save({"v": value})
    with pytest.raises(TypeError, match="cannot be a key"):
        tssd.save({"v": {object(): 1}})


def test_plain_state_dict_reports_nothing(path: Path) -> None:
    assert tssd.save_file({"a": {1, 2}}, path).stored_as_base == {}


def test_root_of_a_subclass_is_stored_as_its_base() -> None:
    assert tssd.load(tssd.save(Config(a=1)), framework="numpy") == {"a": 1}
    for root in (defaultdict(int), Counter()):
        with pytest.raises(TypeError, match="state dict is a dict"):
            tssd.save(root)


def test_pickle_keeps_a_subclass() -> None:
    data = tssd.save({"a": Colour.RED, "b": {1}}, allow_pickle=True)
    loaded = tssd.load(data, framework="numpy", allow_pickle=True)
    assert loaded["a"] is Colour.RED and loaded["b"] == {1}


def test_put_reports_subclasses() -> None:
    store = tssd.Store("memory:")
    report = store.put_state_dict({"a": {"mode": Mode.FAST, "set": {1}}}, "key")
    assert {name: cls.split(".")[-1] for name, cls in report.stored_as_base.items()} == {"a.mode": "Mode"}
    assert store.get_state_dict("key") == {"a": {"mode": "fast", "set": {1}}}


# ---- Registered classes --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Granularity:
    dim: int
    mode: Mode = Mode.FAST

    def __post_init__(self) -> None:
        assert not isinstance(self.dim, str), "loading does not call it"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty registries for one test."""
    from tssd import _classes

    monkeypatch.setattr(_classes, "_contexts", {})
    monkeypatch.setattr(_classes, "_wrappers", {})


@pytest.mark.usefixtures("registry")
def test_registered_class_roundtrips() -> None:
    assert tssd.register_context(Granularity) is Granularity
    tssd.register_context(Mode)
    value = Granularity(-1)
    loaded = tssd.load(tssd.save({"a": [value]}), framework="numpy")["a"][0]
    assert loaded == value and type(loaded) is Granularity and loaded.mode is Mode.FAST
    with pytest.raises(TypeError, match="neither"):
        tssd.register_context(Names)


@pytest.mark.usefixtures("registry")
def test_class_that_is_not_registered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tssd import _classes

    with pytest.raises(tssd.TssdTypeError, match="Granularity"):
        tssd.save({"a": Granularity(-1)})
    tssd.register_context(Granularity)
    tssd.register_context(Mode)
    data = tssd.save({"a": [Granularity(-1)]})
    monkeypatch.setattr(_classes, "_contexts", {})
    with pytest.raises(tssd.TssdError, match=r"Mode.*not registered.*a\.0.*register_context") as caught:
        tssd.load(data, framework="numpy")
    assert caught.value.kind == "FeatureMissing"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("value", ["FAST", {"dim": 1}, {"dim": 1, "mode": "x", "more": 1}, None])
def test_registered_class_with_other_fields_is_refused(value: Any) -> None:
    from tssd import _classes

    tssd.register_context(Granularity)
    plain = {"class": _classes.full_name(Granularity), "value": value}
    assert isinstance(_classes.compose("registered", 0, plain), _classes.Refusal)


HOSTILE = """
import sys
import tssd
before = set(sys.modules)
data = bytearray(open(sys.argv[1], "rb").read())
try:
    tssd.load(bytes(data), framework="numpy")
    print("loaded")
except tssd.TssdError as error:
    print(error.kind, error)
print(sorted(set(sys.modules) - before - {"tssd._classes"}))
"""


@pytest.mark.usefixtures("registry")
def test_names_in_a_file_import_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module that would be imported by its name, and leaves a trace.
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\nclass Evil: pass\n")

    class Evil(enum.Enum):
        A = 1

    Evil.__module__, Evil.__qualname__ = "trap", "Evil"
    tssd.register_context(Evil)
    path = tmp_path / "hostile.tssd"
    tssd.save_file({"a": Evil.A}, path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(tssd.__file__).parents[1]}")
    command = [sys.executable, "-c", HOSTILE, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("FeatureMissing an object of class trap.Evil cannot be loaded"), result
    assert "trap" not in result.stdout.splitlines()[-1], result


# ---- Packed directories --------------------------------------------------------------------------


def test_files_of_a_packed_directory_are_not_in_the_state_dict() -> None:
    path = VECTORS / "154-packed-files.tssd"
    if not path.exists():
        pytest.skip("needs spec/vectors")
    expected = {"config.json": b"{}", "original/params.json": b"", "tokenizer.model": b"t" * 5000}
    assert list(tssd.load_file(path, framework="numpy")) == ["weight"]
    assert list(tssd.load(path.read_bytes(), framework="numpy")) == ["weight"]
    for verify in ("lazy", "eager", "off"):
        with tssd.safe_open(path, "np", verify=verify) as file:  # type: ignore[arg-type]
            assert file.files() == expected and file.keys() == ["weight"]
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"t" * 5000)] ^= 1
    broken = path.name
    with pytest.raises(tssd.TssdCorruptError):
        load_files(bytes(damaged), broken)


def load_files(data: bytes, name: str) -> dict[str, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        with tssd.safe_open(path, "np") as file:
            return file.files()


def test_own_key_named_files_is_kept(path: Path) -> None:
    state = {"a": 1, ".files": {"config.json": b"{}", "x": [1, 2]}}
    tssd.save_file(state, path)
    assert tssd.load_file(path, framework="numpy") == state
    with tssd.safe_open(path, "np") as file:
        assert file.files() == {}
