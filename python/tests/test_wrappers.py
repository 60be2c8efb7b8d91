"""Tensors that wrap tensors: round trips, fills, and DTensors of them on one rank. The ranks run `wrapper_ranks.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tssd
from equality import same
from processes import Daemon, run_ranks
from scaled import Scaled, is_same, zeros_like
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty registries for one test."""
    from tssd import _classes

    monkeypatch.setattr(_classes, "_contexts", {})
    monkeypatch.setattr(_classes, "_wrappers", {})


def make_scaled() -> Scaled:
    inner = Scaled(torch.tensor([[1], [2]], dtype=torch.int8), torch.tensor(0.5))
    return Scaled(torch.arange(6, dtype=torch.int8).reshape(3, 2).t(), inner, {"dtype": torch.bfloat16, "blocks": (1, 2)})


@pytest.mark.usefixtures("registry")
def test_registered_wrapper_roundtrips(path: Path) -> None:
    assert tssd.register_wrapper(Scaled) is Scaled
    weight = make_scaled()
    tied = weight.data_
    state = {"w": weight, "p": nn.Parameter(make_scaled(), requires_grad=False), "tied": tied}
    tssd.save_file(state, path)
    loaded = tssd.load_file(path)
    got = loaded["w"]
    assert type(got) is Scaled and not isinstance(got, nn.Parameter) and got.context == weight.context
    assert same(got.data_, weight.data_) and same(got.scale.data_, weight.scale.data_)  # type: ignore[attr-defined]
    assert type(got.scale) is Scaled and same(got.scale.scale, weight.scale.scale)  # type: ignore[attr-defined]
    assert isinstance(loaded["p"], nn.Parameter) and not loaded["p"].requires_grad
    assert loaded["tied"].data_ptr() == got.data_.data_ptr()
    with tssd.safe_open(path, "pt") as file:
        assert file.keys()[:2] == ["w.tensors.data_", "w.tensors.scale.tensors.data_"]


@pytest.mark.usefixtures("registry")
def test_wrapper_that_is_not_registered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tssd import _classes

    state = {"model": {"w": make_scaled()}}
    for allow_pickle in (False, True):
        with pytest.raises(tssd.TssdTypeError, match=r"Scaled.*not registered") as caught:
            tssd.save(state, allow_pickle=allow_pickle)
        assert caught.value.fqn == "model.w" and "register_wrapper" in (caught.value.advice or "")
    tssd.register_wrapper(Scaled)
    data = tssd.save(state)
    monkeypatch.setattr(_classes, "_wrappers", {})
    with pytest.raises(tssd.TssdError, match=r"Scaled.*not registered") as missing:
        tssd.load(data)
    assert missing.value.kind == "FeatureMissing" and missing.value.fqn.startswith("model.w")
    with pytest.raises(TypeError, match="__tensor_flatten__"):
        tssd.register_wrapper(nn.Parameter)


@pytest.mark.usefixtures("registry")
def test_context_that_cannot_be_stored_is_refused_by_its_path() -> None:
    tssd.register_wrapper(Scaled)
    weight = make_scaled()
    weight.context = {"hook": lambda: 0}
    with pytest.raises(tssd.TssdTypeError) as caught:
        tssd.save({"w": weight})
    assert caught.value.fqn == "w.context.hook"


@pytest.mark.usefixtures("registry")
def test_wrapper_in_a_store_is_not_cast() -> None:
    tssd.register_wrapper(Scaled)
    store = tssd.Store("memory:")
    store.put_state_dict({"w": make_scaled(), "b": torch.ones(2)}, "key", transfer_dtype=torch.bfloat16)
    got = store.get_state_dict("key")
    assert got["b"].dtype is torch.bfloat16 and got["w"].scale.scale.dtype is torch.float32


@pytest.mark.usefixtures("registry")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "config",
    ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"],
)
def test_torchao_model_roundtrips(config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 32)).to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, config)())
    with pytest.raises(tssd.TssdTypeError, match=r"torchao\..*not registered.*register_torchao"):
        tssd.save(model.state_dict())
    tssd.register_torchao()
    loaded = tssd.load(tssd.save(model.state_dict()))
    weight = model.state_dict()["0.weight"]
    assert type(loaded["0.weight"]) is type(weight)
    names, context = weight.__tensor_flatten__()
    got_names, got_context = loaded["0.weight"].__tensor_flatten__()
    assert names == got_names and context == got_context
    assert all(same(getattr(loaded["0.weight"], name), getattr(weight, name)) for name in names)
    other = nn.Sequential(nn.Linear(64, 32)).to(torch.bfloat16)
    other.load_state_dict(loaded, assign=True)
    batch = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(model(batch), other(batch))


@pytest.mark.usefixtures("registry")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchao_nf4_roundtrips() -> None:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    tssd.register_torchao()
    weight = nf4.to_nf4(torch.randn(512, 64))
    loaded = tssd.load(tssd.save({"w": weight}))["w"]
    assert type(loaded) is type(weight)
    assert torch.equal(loaded.get_original_weight(), weight.get_original_weight())


# ---- Fills ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registry")
def test_get_fills_wrappers_in_place() -> None:
    tssd.register_wrapper(Scaled)
    store = tssd.Store("memory:")
    weight = make_scaled()
    store.put_state_dict({"m": {"w": weight, "b": torch.ones(2)}}, "key")
    store.put("alone", weight)
    into = zeros_like(weight)
    data, version = into.data_, into._version
    store.get_state_dict("key", {"m": {"w": into, "b": torch.zeros(2)}})
    assert is_same(into, weight) and into.data_ is data and into._version > version
    flat = {"m.w": nn.Parameter(zeros_like(weight), requires_grad=False)}
    _, report = store.get_state_dict("key", flat, strict=False, return_report=True)
    assert report.unexpected_keys == ["m.b"] and torch.equal(flat["m.w"].data_, weight.data_)
    for key, fqn in (("alone", None), ("key", "m.w")):
        into = zeros_like(weight)
        assert store.get(key, into, fqn=fqn) is into and is_same(into, weight)
    # The inner tensors still have names of their own.
    inner = torch.zeros(2, 3, dtype=torch.int8)
    store.get_state_dict("key", {"m": {"w": {"tensors": {"data_": inner}}}}, strict=False)
    assert torch.equal(inner, weight.data_)


class OtherScaled(Scaled):
    pass


def with_inner(**changes: Any) -> Scaled:
    """Returns an empty wrapper like that of `make_scaled`, with other inner tensors or another context."""
    weight = zeros_like(make_scaled())
    parts = {"data_": weight.data_, "scale": weight.scale, "context": weight.context}
    data, scale, context = {**parts, **changes}.values()
    return Scaled(data, scale, context)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("strict", [True, False])
def test_get_refuses_to_fill_other_wrappers(strict: bool) -> None:
    tssd.register_wrapper(Scaled)
    tssd.register_wrapper(OtherScaled)
    store = tssd.Store("memory:")
    weight = make_scaled()
    store.put_state_dict({"m": {"w": weight, "plain": torch.ones(2, 3)}}, "key")
    store.put_state_dict({"x": 1}, "empty")
    inner = Scaled(torch.zeros(2, 1, dtype=torch.int8), torch.zeros((), dtype=torch.float64))
    cases: list[tuple[Any, str, str, str]] = [
        (OtherScaled(weight.data_, weight.scale, weight.context), "WrongType", "m.w", "class"),
        (with_inner(context={"dtype": torch.float16, "blocks": (1, 2)}), "WrongType", "m.w", "context"),
        (with_inner(context={"dtype": torch.bfloat16, "blocks": [1, 2]}), "WrongType", "m.w", "context"),
        (with_inner(data_=torch.zeros(3, 2, dtype=torch.int8)), "SliceMismatch", "m.w", "size"),
        (with_inner(data_=torch.zeros(2, 3, dtype=torch.int8)), "SliceMismatch", "m.w", "stride"),
        (with_inner(data_=torch.zeros(3, 2, dtype=torch.int16).t()), "WrongType", "m.w.tensors.data_", "int16"),
        (with_inner(scale=torch.zeros(())), "WrongType", "m.w.tensors.scale", "wraps tensors"),
        (with_inner(scale=inner), "WrongType", "m.w.tensors.scale.tensors.scale", "float64"),
        (torch.zeros(2, 3), "WrongType", "m.w", "wraps tensors"),
    ]
    for into, kind, fqn, words in cases:
        state = {"m": {"w": into, "plain": torch.zeros(2, 3)}}
        with pytest.raises(tssd.TssdError, match=words) as caught:
            store.get_state_dict("key", state, strict=strict, cast=True)
        assert (caught.value.kind, caught.value.fqn) == (kind, fqn), caught.value
        assert not state["m"]["plain"].any(), "nothing was written"
    with pytest.raises(tssd.TssdTypeError, match="wraps none") as plain:
        store.get("key", zeros_like(weight), fqn="m.plain")
    assert plain.value.fqn == "m.plain"
    with pytest.raises(tssd.TssdKeyError):
        store.get("empty", zeros_like(weight), fqn="w")


@pytest.mark.usefixtures("registry")
def test_tensors_in_a_context_are_compared_and_not_filled() -> None:
    tssd.register_wrapper(Scaled)
    store = tssd.Store("memory:")
    weight = with_inner(context={"table": torch.arange(3), "more": [torch.ones(1)]})
    store.put_state_dict({"w": weight}, "key")
    store.get_state_dict("key", {"w": with_inner(context={"table": torch.arange(3), "more": [torch.ones(1)]})})
    with pytest.raises(tssd.TssdTypeError, match="context"):
        store.get_state_dict("key", {"w": with_inner(context={"table": torch.arange(3), "more": [torch.zeros(1)]})})


# ---- DTensors ------------------------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", world_size=1, rank=0)
    try:
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


def shard(weight: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    """Returns a DTensor with this very local tensor: `DTensor.from_local` calls methods that wrappers need not have."""
    from tssd._torch import _new_dtensor

    return _new_dtensor(weight, mesh, placements, shape)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "placements", [[Shard(0), Shard(1)], [Replicate(), Shard(1)], [Replicate(), Replicate()]], ids=str
)
def test_dtensor_of_wrapper_roundtrips(mesh: DeviceMesh, path: Path, placements: list[Placement]) -> None:
    tssd.register_wrapper(Scaled)
    weight = make_scaled()
    sharded = shard(weight, mesh, placements, (2, 3))
    state = {"w": sharded, "p": nn.Parameter(sharded, requires_grad=False)}
    tssd.save_file(state, path)
    loaded = tssd.load_file(path)
    assert is_same(loaded["w"].local, weight) and isinstance(loaded["p"].local, nn.Parameter)
    place = loaded["w"].tensor_slice
    assert (place.offsets, place.local_shape, place.global_shape) == ((0, 0), (2, 3), (2, 3))
    assert (place.coordinates, place.mesh_shape) == ((0, 0), (1, 1))
    got = tssd.TorchStoreStateDict.from_bytes(path.read_bytes()).to_state_dict(mesh)
    assert type(got["w"]) is DTensor and is_same(got["w"]._local_tensor, weight)
    assert isinstance(got["p"], nn.Parameter) and isinstance(got["p"], DTensor) and not got["p"].requires_grad
    for each in got.values():
        assert each.device_mesh == mesh and each.shape == sharded.shape and each.stride() == sharded.stride()
        assert list(each.placements) == placements
    flat = init_device_mesh("cpu", (1,))
    with pytest.raises(tssd.TssdValueError, match="mesh") as caught:
        tssd.TorchStoreStateDict.from_state_dict({"m": {"w": sharded}}).to_state_dict(flat)
    assert caught.value.kind == "MeshMismatch" and caught.value.fqn.startswith("m.w")


@pytest.mark.usefixtures("registry")
def test_dtensor_of_one_part_is_read_whole(mesh: DeviceMesh) -> None:
    tssd.register_wrapper(Scaled)
    store = tssd.Store("memory:")
    weight = make_scaled()
    sharded = shard(weight, mesh, [Shard(0), Replicate()], (2, 3))
    store.put_state_dict({"w": sharded}, "key")
    assert is_same(store.get_state_dict("key")["w"], weight)
    with store.open("key") as version:
        assert version.to_meta()["w"].data_.device.type == "meta"
    into = shard(zeros_like(weight), mesh, [Shard(0), Replicate()], (2, 3))
    store.get_state_dict("key", {"w": into})
    assert is_same(into._local_tensor, weight)
    for other in (zeros_like(weight), shard(zeros_like(weight), mesh, [Shard(1), Replicate()], (2, 3))):
        with pytest.raises(tssd.TssdValueError, match=r"stored as a DTensor with Shard\(0\)") as caught:
            store.get_state_dict("key", {"w": other})
        assert (caught.value.kind, caught.value.fqn) == ("MeshMismatch", "w")


@pytest.mark.usefixtures("registry")
def test_dtensor_of_wrapper_that_cannot_be_stored_is_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_scaled()
    placements: list[Placement] = [Shard(0), Replicate()]
    cases = [
        (shard(weight, mesh, placements, (2, 3)), "not registered"),
        (shard(weight, mesh, [Partial(), Replicate()], (2, 3)), "Partial"),
        (shard(weight, mesh, placements, (4, 3)), "equal parts"),
    ]
    for value, words in cases:
        with pytest.raises(tssd.TssdTypeError, match=words) as caught:
            tssd.save({"m": {"w": value}})
        assert caught.value.fqn == "m.w"
    tssd.register_wrapper(Scaled)
    data = tssd.save({"m": {"w": cases[0][0]}})
    from tssd import _classes

    monkeypatch.setattr(_classes, "_wrappers", {})
    with pytest.raises(tssd.TssdTypeError, match=r"Scaled.*not registered") as missing:
        tssd.load(data)
    assert missing.value.kind == "FeatureMissing" and missing.value.fqn == "m.w"


@pytest.mark.usefixtures("registry")
def test_dtensor_of_wrapper_with_unknown_fields_is_refused(mesh: DeviceMesh) -> None:
    from tssd import _classes, _torch

    tssd.register_wrapper(Scaled)
    parts = _torch.decompose(shard(make_scaled(), mesh, [Shard(0), Replicate()], (2, 3)))
    assert isinstance(parts, _classes.Tagged)
    local = parts.plain["tensors"]["_local_tensor"]
    cases: list[tuple[str, Any, str]] = [
        ("context", None, "FeatureMissing"),
        ("context", [("Shard", -1, 1, 1)], "FeatureMissing"),
        ("context", [("Shard", 2, 1, 1)], "UnknownPlacement"),
        ("context", [("_StridedShard", 0, 0, 1)], "UnknownPlacement"),
        ("context", [("sum", 0, 1, 1)], "PartialPlacement"),
        ("context", [], "FeatureMissing"),
        ("tensors", {"other": local}, "FeatureMissing"),
        ("tensors", {"_local_tensor": torch.ones(1)}, "FeatureMissing"),
    ]
    for field, value, kind in cases:
        changed = _classes.StackedWrapper(parts._replace(plain={**parts.plain, field: value}))
        encoded = tssd.TorchStoreStateDict.from_state_dict({"w": changed})
        for device_mesh in (None, mesh):
            with pytest.raises(tssd.TssdError) as caught:
                encoded.to_state_dict(device_mesh)
            assert (caught.value.kind, caught.value.fqn) == (kind, "w"), (field, value, caught.value)


@pytest.mark.usefixtures("registry")
def test_publish_puts_wrappers(mesh: DeviceMesh) -> None:
    tssd.register_wrapper(Scaled)
    store = tssd.Store("memory:")
    weight = make_scaled()
    placements: list[Placement] = [Shard(0), Replicate()]
    with store.publish("key", writers=1, bucket_bytes=8, transfer_dtype=torch.bfloat16) as publisher:
        publisher.put("alone", weight)
        publisher.put("sharded", shard(weight, mesh, placements, (2, 3)))
    into = {"alone": zeros_like(weight), "sharded": shard(zeros_like(weight), mesh, placements, (2, 3))}
    store.get_state_dict("key", into)
    assert is_same(into["alone"], weight) and is_same(into["sharded"]._local_tensor, weight)


@pytest.mark.parametrize("store_kind", ["daemon", "directory"])
def test_ranks_get_their_wrappers_back(tmp_path: Path, store_kind: str) -> None:
    if store_kind == "directory":
        return run_ranks("wrapper_ranks.py", 4, tmp_path, str(tmp_path / "store"))
    with Daemon(tmp_path / "socket") as url:
        run_ranks("wrapper_ranks.py", 4, tmp_path, url)


def test_ranks_get_their_torchao_weights_back(tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization")
    run_ranks("wrapper_ranks.py", 2, tmp_path, str(tmp_path / "store"), "torchao")
