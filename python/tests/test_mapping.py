"""Mappings between the tensors of a process and the stored ones. The oracle is numpy."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tssd
from tssd.mapping import Expression, Mapping, fuse, narrow, shard, stack, transpose

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def store() -> tssd.Store:
    return tssd.Store("memory:")


def numbers(*shape: int, start: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.int32).reshape(shape)


STORED: Arrays = {
    "model.layers.0.self_attn.q_proj.weight": numbers(8, 4),
    "model.layers.0.self_attn.k_proj.weight": numbers(4, 4, start=100),
    "model.layers.0.self_attn.v_proj.weight": numbers(4, 4, start=200),
    "model.layers.0.mlp.experts.0.w1": numbers(6, 4, start=300),
    "model.layers.0.mlp.experts.1.w1": numbers(6, 4, start=400),
    "model.layers.0.mlp.experts.0.w3": numbers(6, 4, start=500),
    "model.layers.0.mlp.experts.1.w3": numbers(6, 4, start=600),
    "model.embed.weight": numbers(10, 4, start=700),
}
MODEL = dict(STORED)
STORED |= {
    "model.layers.0.shared": numbers(1, 4, start=800),
    "model.layers.0.mlp.experts.0.0": numbers(2, start=900),
    "model.layers.0.mlp.experts.1.0": numbers(2, start=910),
}
Q, K, V = (STORED[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
W1 = [STORED[f"model.layers.0.mlp.experts.{expert}.w1"] for expert in range(2)]
W3 = [STORED[f"model.layers.0.mlp.experts.{expert}.w3"] for expert in range(2)]
EMBED = STORED["model.embed.weight"]

LAYER = "model.layers.{n}."
QKV = [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"]
EXPERT = LAYER + "mlp.experts.{e}."

# A rule for a tensor `layers.0.x`, and its expected value.
RULES: dict[str, tuple[str | Expression, np.ndarray[Any, Any]]] = {
    "renamed": ("model.embed.weight", EMBED),
    "fused": (fuse(*QKV), np.concatenate([Q, K, V])),
    "fused in the last dimension": (fuse(QKV[1], QKV[2], dim=-1), np.concatenate([K, V], axis=1)),
    "second tensor-parallel rank": (
        fuse(*(shard(name, 0, 1, 2) for name in QKV)),
        np.concatenate([Q[4:], K[2:], V[2:]]),
    ),
    "column shard": (shard(QKV[0], -1, 1, 2), Q[:, 2:]),
    "stacked": (stack(QKV[1], QKV[2]), np.stack([K, V])),
    "stacked in the last dimension": (stack(QKV[1], QKV[2], dim=-1), np.stack([K, V], axis=-1)),
    "experts": (
        stack(fuse(EXPERT + "w1", EXPERT + "w3"), over="e"),
        np.stack([np.concatenate(pair) for pair in zip(W1, W3)]),
    ),
    "stack of stacks": (
        stack(stack("model.layers.{n}.mlp.experts.{e}.{w}", over="e"), over="w", indices=[0]),
        np.stack([np.stack([numbers(2, start=900), numbers(2, start=910)])]),
    ),
    "stack with a shared part": (
        stack(fuse(EXPERT + "w1", "model.layers.{n}.shared"), over="e"),
        np.stack([np.concatenate([w1, numbers(1, 4, start=800)]) for w1 in W1]),
    ),
    "one expert": (stack(EXPERT + "w1", over="e", indices=[1]), W1[1][None]),
    "shard of the experts": (shard(stack(EXPERT + "w1", over="e"), 0, 1, 2), W1[1][None]),
    "transposed experts": (
        transpose(stack(EXPERT + "w1", over="e"), 1, 2),
        np.stack(W1).transpose(0, 2, 1),
    ),
    "part": (narrow("model.embed.weight", 0, 3, 5), EMBED[3:8]),
    "part across parts": (narrow(fuse(*QKV), 0, 6, 8), np.concatenate([Q, K, V])[6:14]),
    "empty part": (narrow("model.embed.weight", 0, 3, 0), EMBED[3:3]),
    "transposed part": (transpose(narrow(QKV[0], 1, 1, 2), 0, 1), Q[:, 1:3].T),
}


@pytest.mark.parametrize("name", RULES)
def test_get_fills_the_value_of_the_rule(store: tssd.Store, name: str) -> None:
    rule, expected = RULES[name]
    store.put_state_dict(STORED, "policy")
    into = {"layers.0.x": np.full_like(expected, -1, order="C")}
    result, report = store.get_state_dict(
        "policy", into=into, mapping=Mapping({"layers.{n}.x": rule}), strict=False, return_report=True
    )
    np.testing.assert_array_equal(result["layers.0.x"], expected)
    assert report.bytes_needed == report.bytes_transferred == expected.nbytes
    assert report.missing_keys == []


@pytest.mark.parametrize("name", RULES)
def test_get_fills_views_and_shards_of_the_value(store: tssd.Store, name: str) -> None:
    rule, expected = RULES[name]
    store.put_state_dict(STORED, "policy")
    mapping = Mapping({"layers.{n}.x": rule})
    whole = np.full(tuple(2 * size for size in expected.shape), -1, np.int32)
    view = whole[tuple(slice(None, None, 2) for _ in expected.shape)]
    store.get_state_dict("policy", into={"layers.0.x": view}, mapping=mapping, strict=False)
    np.testing.assert_array_equal(view, expected)
    assert np.count_nonzero(whole == -1) == whole.size - expected.size

    random.seed(name)
    for _ in range(8):
        bounds = [sorted(random.choices(range(size + 1), k=2)) for size in expected.shape]
        box = expected[tuple(slice(*pair) for pair in bounds)]
        local = np.full(box.shape, -1, np.int32)
        offsets = [pair[0] for pair in bounds]
        part = tssd.TensorSlice(offsets, None, list(expected.shape), list(box.shape), None)
        into = {"layers.0.x": tssd.TensorShard(local, part)}
        store.get_state_dict("policy", into=into, mapping=mapping, strict=False)
        np.testing.assert_array_equal(local, box)


def make_rule(depth: int) -> tuple[Expression | str, np.ndarray[Any, Any]]:
    """Returns a random rule, and its value."""
    if depth == 0:
        name = random.choice(list(STORED))
        return name, STORED[name]
    rule, value = make_rule(depth - 1)
    dim = random.randrange(-value.ndim, value.ndim)
    size = value.shape[dim]
    kind = random.choice(["fuse", "stack", "narrow", "shard", "transpose"])
    if kind == "fuse":
        return fuse(rule, rule, dim=dim), np.concatenate([value, value], axis=dim)
    if kind == "stack" and value.ndim < 4:
        return stack(rule, rule, rule, dim=dim), np.stack([value] * 3, axis=dim)
    if kind == "narrow":
        start = random.randint(0, size)
        length = random.randint(0, size - start)
        return narrow(rule, dim, start, length), value.take(range(start, start + length), axis=dim)
    if kind == "shard":
        count = random.choice([each for each in range(1, size + 2) if size % each == 0])
        index = random.randrange(count)
        return shard(rule, dim, index, count), np.split(value, count, axis=dim)[index]
    other = random.randrange(value.ndim)
    return transpose(rule, dim, other), value.swapaxes(dim, other)


@pytest.mark.parametrize("seed", range(60))
def test_get_fills_the_value_of_random_rules(store: tssd.Store, seed: int) -> None:
    random.seed(seed)
    store.put_state_dict(STORED, "policy")
    for _ in range(8):
        rule, expected = make_rule(random.randint(1, 5))
        into = {"x": np.full_like(expected, -1)}
        store.get_state_dict("policy", into=into, mapping=Mapping({"x": rule}), strict=False)
        np.testing.assert_array_equal(into["x"], expected)


INTO: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "layers.0.qkv": lambda: np.zeros((16, 4), np.int32),
    "layers.0.w13": lambda: np.zeros((2, 12, 4), np.int32),
    "embed.weight": lambda: np.zeros((10, 4), np.int32),
}
MAPPING = Mapping(
    {
        "layers.{n:int}.qkv": fuse(*QKV, sizes=(2, 1, 1)),
        "layers.{n:int}.w13": stack(fuse(EXPERT + "w1", EXPERT + "w3"), over="e"),
        "{name:path}": "model.{name}",
    }
)


def test_put_stores_the_parts_under_their_names(store: tssd.Store) -> None:
    store.put_state_dict(MODEL, "stored")
    into = {name: make() for name, make in INTO.items()}
    store.get_state_dict("stored", into=into, mapping=MAPPING)

    store.put_state_dict({**into, "step": 3}, "again", mapping=MAPPING)
    again = store.get_state_dict("again")
    assert again.pop("step") == 3
    assert again.keys() == MODEL.keys()
    for name, value in MODEL.items():
        np.testing.assert_array_equal(again[name], value)


@pytest.mark.parametrize("name", [name for name in RULES if "part" not in name])
def test_put_then_get_with_a_rule_gives_the_tensor_back(store: tssd.Store, name: str) -> None:
    rule, expected = RULES[name]
    if name in ("fused", "second tensor-parallel rank"):
        parts = QKV if name == "fused" else [shard(part, 0, 1, 2) for part in QKV]
        rule = fuse(*parts, sizes=(2, 1, 1))
    mapping = Mapping({"layers.{n}.x": rule})
    if name == "shard of the experts":
        pytest.skip("a get of this rule needs all experts")
    if name in ("second tensor-parallel rank", "column shard"):
        # The other shards come from other writers.
        with pytest.raises(tssd.TssdValueError, match="cover"):
            store.put_state_dict({"layers.0.x": expected}, "policy", mapping=mapping)
        return
    store.put_state_dict({"layers.0.x": expected}, "policy", mapping=mapping)
    into = {"layers.0.x": np.zeros_like(expected)}
    store.get_state_dict("policy", into=into, mapping=mapping)
    np.testing.assert_array_equal(into["layers.0.x"], expected)


def test_shards_of_several_writers_make_the_stored_tensors(store: tssd.Store) -> None:
    whole = {name: STORED[name] for name in STORED if "self_attn" in name}
    for rank in range(2):
        local = np.concatenate([np.split(tensor, 2)[rank] for tensor in whole.values()])
        rule = fuse(*(shard(part, 0, rank, 2) for part in QKV), sizes=(2, 1, 1))
        mapping = Mapping({"layers.{n}.qkv": rule})
        store.put_state_dict(
            {"layers.0.qkv": local}, "policy", mapping=mapping, version=1, writers=2, writer=rank, job="j"
        )
    stored = store.get_state_dict("policy")
    assert stored.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(stored[name], tensor)


def test_shard_that_is_the_whole_stays_a_shard(store: tssd.Store) -> None:
    whole = numbers(4, 2)
    for rank, rows in enumerate([4, 0]):
        part = tssd.TensorSlice([4 * rank, 0], None, [4, 2], [rows, 2], None)
        shards = {"x": tssd.TensorShard(whole[:rows], part)}
        store.put_state_dict(shards, "policy", mapping=Mapping({"x": "a"}), version=1, writers=2, writer=rank, job="j")
    np.testing.assert_array_equal(store.get_state_dict("policy")["a"], whole)


def test_targets_may_name_a_stored_tensor_several_times(store: tssd.Store) -> None:
    store.put_state_dict(STORED, "policy")
    name = "model.embed.weight"
    memory = np.zeros((2, 3, 4), np.int32)
    slices = [tssd.TensorSlice([start, 0], None, [10, 4], [3, 4], None) for start in (7, 1)]
    targets = tssd.Targets((name, tssd.TensorShard(local, part)) for local, part in zip(memory, slices))
    result = store.get_state_dict("policy", into=targets, strict=False)
    assert result is targets
    np.testing.assert_array_equal(memory, [EMBED[7:], EMBED[1:4]])
    with pytest.raises(tssd.TssdValueError, match="`absent` is not stored"):
        store.get_state_dict("policy", into=tssd.Targets([("absent", memory)]))
    with pytest.raises(tssd.TssdTypeError, match="absent"):
        store.get_state_dict("policy", into=tssd.Targets([("absent", 3)]))


PROBLEMS: list[tuple[str | Expression, tuple[int, ...], type[tssd.TssdError], str]] = [
    ("absent", (4, 4), tssd.TssdKeyError, "`x`: `absent` is not stored"),
    (stack("absent.{e}", over="e"), (4, 4), tssd.TssdKeyError, r"`x`: `absent\.0` is not stored"),
    ("model.embed.weight", (10, 5), tssd.TssdValueError, r"`x`: it has shape \[10, 5\], its stored parts \[10, 4\]"),
    (fuse("a", "b"), (4, 4), tssd.TssdValueError, r"parts of shapes \[2, 4\], \[2, 5\] do not fit"),
    (stack("a", "b"), (4, 4), tssd.TssdValueError, "cannot be stacked"),
    (shard("a", 0, 0, 3), (4, 4), tssd.TssdValueError, "3 equal shards"),
    (narrow("a", 0, 1, 2), (4, 4), tssd.TssdValueError, r"has no elements 1\.\.3"),
    (transpose("a", 0, 2), (4, 4), tssd.TssdValueError, "no dimension 2"),
    (fuse("a", "c"), (4, 4), tssd.TssdTypeError, "`x`: `a` is stored as int32, `c` as float32"),
]


@pytest.mark.parametrize(("rule", "shape", "error", "text"), PROBLEMS)
def test_get_names_the_tensor_that_does_not_fit(
    store: tssd.Store, rule: str | Expression, shape: tuple[int, ...], error: type[tssd.TssdError], text: str
) -> None:
    parts = {"a": numbers(2, 4), "b": numbers(2, 5), "c": np.zeros((2, 4), np.float32)}
    store.put_state_dict({**STORED, **parts}, "policy")
    into = {"x": np.zeros(shape, np.int32)}
    with pytest.raises(error, match=text):
        store.get_state_dict("policy", into={**parts, **STORED, **into}, mapping=Mapping({"x": rule}))
    assert not into["x"].any()


def test_tensors_without_stored_parts_are_reported_as_missing(store: tssd.Store) -> None:
    store.put_state_dict(STORED, "policy")
    into = {"x": np.zeros((2, 2), np.int32)}
    _, report = store.get_state_dict(
        "policy",
        into=into,
        mapping=Mapping({"x": fuse("absent", "model.embed.weight")}),
        strict=False,
        return_report=True,
    )
    assert report.missing_keys == ["x"]
    assert len(report.unexpected_keys) == len(STORED)


def test_put_names_the_tensor_that_does_not_fit(store: tssd.Store) -> None:
    cases: list[tuple[str | Expression, str]] = [
        (fuse("a", "b", "c"), "`x`: dimension 0 of .* in the proportions"),
        (stack("a", "b", dim=1), "dimension 1 of .* has 2 parts|has 3 parts"),
        (narrow("a", 0, 0, 4), "a rule with narrow cannot put: the size of `a` is not known"),
        (fuse("a", "a"), "two tensors as `a`|`a`"),
        ("kept", "two tensors as `kept`"),
    ]
    for rule, text in cases:
        with pytest.raises(tssd.TssdValueError, match=text):
            store.put_state_dict({"x": numbers(4, 3), "kept": numbers(1)}, "policy", mapping=Mapping({"x": rule}))
    for container, name in (([numbers(2)], "x.0"), ((numbers(2),), "x.0"), (SimpleNamespace(a=numbers(2)), "x.a")):
        with pytest.raises(tssd.TssdValueError, match=f"`{name}` is in no dict"):
            store.put_state_dict({"x": container}, "policy", mapping=Mapping({name: "a"}))
    assert store.keys() == []


def test_invalid_rules_are_refused() -> None:
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: Mapping({"a": "{n}"}), tssd.TssdValueError, "`a` does not have the placeholder `{n}`"),
        (lambda: Mapping({"{n}.{n}": "a"}), tssd.TssdValueError, "twice"),
        (lambda: Mapping({"{n:float}": "a"}), tssd.TssdValueError, "{n:float}"),
        (lambda: Mapping({"a": 3}), TypeError, "not a int"),  # type: ignore[dict-item]
        (lambda: Mapping({"{0}.a": "{0}.b"}), tssd.TssdValueError, "placeholder"),
        (lambda: fuse(), tssd.TssdValueError, "at least one part"),
        (lambda: fuse("a", "b", sizes=(1,)), tssd.TssdValueError, "1 numbers for 2 parts"),
        (lambda: fuse("a", sizes=(0,)), tssd.TssdValueError, "positive"),
        (lambda: stack("a", over="e"), tssd.TssdValueError, "placeholder `{e}`"),
        (lambda: stack("a", indices=[1]), tssd.TssdValueError, "placeholder"),
        (lambda: stack("{e}", over="e", indices=[]), tssd.TssdValueError, "empty"),
        (lambda: shard("a", 0, 2, 2), tssd.TssdValueError, "shard 2 of 2"),
        (lambda: narrow("a", 0, -1, 2), tssd.TssdValueError, "at least 0"),
        (lambda: tssd.Store("memory:").put_state_dict({}, "k", mapping={}), TypeError, "not a dict"),  # type: ignore[call-overload]
        (lambda: tssd.Store("memory:").get_state_dict("k", mapping=Mapping({})), ValueError, "`into`"),  # type: ignore[call-overload]
    ]
    for make, error, text in cases:
        with pytest.raises(error, match=text):
            make()
