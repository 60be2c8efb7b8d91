"""One rank of test_distributed.py: python file_ranks.py FOLDER RANKS RANK.

Exits with 0 if all checks hold.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tssd
from equality import same
from sharding import SHAPES, distribute
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

FOLDER, RANKS, RANK = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    half = DeviceMesh("cpu", [1, 3])
    state: dict[str, Any] = {}
    full: dict[str, torch.Tensor] = {}

    placements_1d = [(Shard(0),), (Shard(1),), (Replicate(),)]
    placements_2d = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))
    placements_2d.append((_StridedShard(0, split_factor=2), Shard(0)))
    placements_2d.append((_StridedShard(0, split_factor=3), Replicate()))
    for name, mesh, all_placements in (
        ("flat", flat, placements_1d),
        ("grid", grid, placements_2d),
        ("half", half, placements_1d),
    ):
        for placements, shape in itertools.product(all_placements, SHAPES):
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            key = f"{name} {placements} {shape}"
            full[key] = whole
            state[key] = distribute(whole, mesh, placements)
            is_member = mesh.get_coordinate() is not None
            check_roundtrip(state[key], whole, placements, mesh, is_member)
    for partial in (Partial("sum"), Partial("avg")):
        check_partial_rejected(DTensor.from_local(torch.ones(2, 2), flat, [partial], run_check=False), partial)
    check_fsdp_over_tp(grid, state, full)
    check_declared_offsets(flat)
    tssd.save_file(state, FOLDER / f"{RANK}.tssd")
    if RANK == 0:
        torch.save(full, FOLDER / "full.pt")
    dist.barrier()
    dist.destroy_process_group()


def check_roundtrip(
    dtensor: DTensor, whole: torch.Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh, is_member: bool
) -> None:
    encoded = tssd.TorchStoreStateDict.from_state_dict({"w": dtensor})
    shard = encoded.to_state_dict()["w"]
    assert type(shard) is tssd.TensorShard
    if is_member:
        assert torch.equal(shard.local, dtensor.to_local()), (placements, whole.shape)
    else:
        assert shard.local.shape == (0, 0) and shard.tensor_slice.coordinates is None
    if not isinstance(shard.tensor_slice, list):
        assert tssd.TensorSlice.from_dtensor(dtensor) == shard.tensor_slice
        assert shard.tensor_slice.mesh_shape == tuple(mesh.shape)
        if is_member:
            assert shard.tensor_slice.coordinates == tuple(mesh.get_coordinate() or ())
    else:
        try:
            tssd.TensorSlice.from_dtensor(dtensor)
            raise AssertionError("several boxes are no slice")
        except ValueError as error:
            assert "boxes" in str(error)
    restored = encoded.to_state_dict(device_mesh=mesh)["w"]
    assert isinstance(restored, DTensor)
    assert restored.placements == tuple(placements) and restored.shape == whole.shape
    assert restored.stride() == whole.stride()
    assert torch.equal(restored.to_local(), dtensor.to_local())
    if is_member and not any(isinstance(placement, _StridedShard) for placement in placements):
        assert torch.equal(restored.full_tensor(), whole)


def check_partial_rejected(dtensor: DTensor, placement: Placement) -> None:
    try:
        tssd.save({"a": {"w": dtensor}})
        raise AssertionError("Partial was stored")
    except tssd.TssdValueError as error:
        assert (error.kind, error.fqn) == ("PartialPlacement", "a.w"), error
        assert str(placement.reduce_op) in str(error)  # type: ignore[attr-defined]


def check_fsdp_over_tp(grid: DeviceMesh, state: dict[str, Any], full: dict[str, torch.Tensor]) -> None:
    """Tensor parallelism and then FSDP2 turn the parameters of a module into strided shards."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    expected = {key: value.clone() for key, value in module.state_dict().items()}
    parallelize_module(module, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=grid["dp"])
    optimizer = torch.optim.AdamW(module.parameters())
    parameters = module.state_dict()
    placements = [type(p).__name__ for value in parameters.values() for p in value.placements]
    assert "_StridedShard" in placements
    for key, value in parameters.items():
        assert torch.equal(value.full_tensor(), expected[key])
        state[f"module {key}"] = value.detach().clone()
        full[f"module {key}"] = expected[key]
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state_dict = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    encoded = tssd.TorchStoreStateDict.from_state_dict(state_dict)
    mesh = next(iter(parameters.values())).device_mesh
    restored = encoded.to_state_dict(device_mesh=mesh)
    assert type(restored["model"]) is type(state_dict["model"])
    assert restored["model"]._metadata == state_dict["model"]._metadata
    for key, value in state_dict["model"].items():
        assert restored["model"][key].placements == value.placements
        assert same(restored["model"][key].to_local(), value.to_local())
    for number, moments in state_dict["optimizer"]["state"].items():
        for name, value in moments.items():
            actual = restored["optimizer"]["state"][number][name]
            if isinstance(value, DTensor):
                actual, value = actual.to_local(), value.to_local()
            assert same(actual, value)
    parameter = dict(module.named_parameters())["0.weight"]
    restored_parameter = tssd.TorchStoreStateDict.from_state_dict({"p": parameter}).to_state_dict(mesh)["p"]
    assert isinstance(restored_parameter, nn.Parameter) and isinstance(restored_parameter, DTensor)
    try:
        encoded.to_state_dict(device_mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
        raise AssertionError("a mesh of another shape was taken")
    except tssd.TssdValueError as error:
        assert error.kind == "MeshMismatch", error


def check_declared_offsets(mesh: DeviceMesh) -> None:
    """Local tensors that declare their own offsets, like those of embedding tables."""
    parts = [torch.full((2, 3), float(RANK)), torch.full((1, 3), 9.0)]
    local = LocalShardsWrapper(parts, [(RANK * 3, 0), (RANK * 3 + 2, 0)])
    dtensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((12, 3)), stride=(3, 1)
    )
    loaded = tssd.load(tssd.save({"w": dtensor}))["w"]
    assert [each.offsets for each in loaded.tensor_slice] == [(RANK * 3, 0), (RANK * 3 + 2, 0)]
    assert loaded.tensor_slice[0].global_shape == (12, 3)
    assert torch.equal(loaded.local, torch.cat(parts))
    # A rank may have no part of the tensor.
    empty = DTensor.from_local(
        LocalShardsWrapper([], []), mesh, [Shard(0)], run_check=False, shape=torch.Size((12,)), stride=(1,)
    )
    assert tssd.load(tssd.save({"w": empty, "a": 1})) == {"a": 1}
    try:
        tssd.save({"a": [1, empty]})
        raise AssertionError("a list has a gap")
    except tssd.TssdTypeError as error:
        assert error.fqn == "a.1" and "dict" in error.advice, error


main()
