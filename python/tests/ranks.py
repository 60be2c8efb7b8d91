"""One rank of test_distributed.py: python ranks.py FOLDER RANKS RANK. Exits with 0 if all checks hold."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tssd
from same import same
from sharding import SHAPES, distributed
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

    one = [(Shard(0),), (Shard(1),), (Replicate(),)]
    two = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))
    two.append((_StridedShard(0, split_factor=2), Shard(0)))
    two.append((_StridedShard(0, split_factor=3), Replicate()))
    for name, mesh, all_placements in (("flat", flat, one), ("grid", grid, two), ("half", half, one)):
        for placements, shape in itertools.product(all_placements, SHAPES):
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
            key = f"{name} {placements} {shape}"
            full[key] = whole
            state[key] = distributed(whole, mesh, placements)
            inside = mesh.get_coordinate() is not None
            check(state[key], whole, placements, mesh, inside)
    for refused in (Partial("sum"), Partial("avg")):
        refuse(DTensor.from_local(torch.ones(2, 2), flat, [refused], run_check=False), refused)
    fsdp_and_tp(grid, state, full)
    chunks(flat)
    tssd.save_file(state, FOLDER / f"{RANK}.tssd")
    if RANK == 0:
        torch.save(full, FOLDER / "full.pt")
    dist.barrier()
    dist.destroy_process_group()


def check(
    dtensor: DTensor, whole: torch.Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh, inside: bool
) -> None:
    encoded = tssd.TorchStoreStateDict.from_state_dict({"w": dtensor})
    shard = encoded.to_state_dict()["w"]
    assert type(shard) is tssd.TensorShard
    if inside:
        assert torch.equal(shard.local, dtensor.to_local()), (placements, whole.shape)
    else:
        assert shard.local.shape == (0, 0) and shard.tensor_slice.coordinates is None
    if not isinstance(shard.tensor_slice, list):
        assert tssd.TensorSlice.from_dtensor(dtensor) == shard.tensor_slice
        assert shard.tensor_slice.mesh_shape == tuple(mesh.shape)
        if inside:
            assert shard.tensor_slice.coordinates == tuple(mesh.get_coordinate() or ())
    else:
        try:
            tssd.TensorSlice.from_dtensor(dtensor)
            raise AssertionError("several boxes are no slice")
        except ValueError as error:
            assert "boxes" in str(error)
    again = encoded.to_state_dict(device_mesh=mesh)["w"]
    assert isinstance(again, DTensor)
    assert again.placements == tuple(placements) and again.shape == whole.shape
    assert again.stride() == whole.stride()
    assert torch.equal(again.to_local(), dtensor.to_local())
    if inside and not any(isinstance(placement, _StridedShard) for placement in placements):
        assert torch.equal(again.full_tensor(), whole)


def refuse(dtensor: DTensor, placement: Placement) -> None:
    try:
        tssd.save({"a": {"w": dtensor}})
        raise AssertionError("Partial was stored")
    except tssd.TssdValueError as error:
        assert (error.kind, error.fqn) == ("PartialPlacement", "a.w"), error
        assert str(placement.reduce_op) in str(error)  # type: ignore[attr-defined]


def fsdp_and_tp(grid: DeviceMesh, state: dict[str, Any], full: dict[str, torch.Tensor]) -> None:
    """A module with tensor parallelism, then FSDP2: parameters that are strided shards."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    wanted = {key: value.clone() for key, value in module.state_dict().items()}
    parallelize_module(module, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=grid["dp"])
    optimizer = torch.optim.AdamW(module.parameters())
    found = module.state_dict()
    placements = [type(p).__name__ for value in found.values() for p in value.placements]
    assert "_StridedShard" in placements
    for key, value in found.items():
        assert torch.equal(value.full_tensor(), wanted[key])
        state[f"module {key}"] = value.detach().clone()
        full[f"module {key}"] = wanted[key]
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    both = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    encoded = tssd.TorchStoreStateDict.from_state_dict(both)
    mesh = next(iter(found.values())).device_mesh
    again = encoded.to_state_dict(device_mesh=mesh)
    assert type(again["model"]) is type(both["model"])
    assert again["model"]._metadata == both["model"]._metadata
    for key, value in both["model"].items():
        assert again["model"][key].placements == value.placements
        assert same(again["model"][key].to_local(), value.to_local())
    for number, moments in both["optimizer"]["state"].items():
        for name, value in moments.items():
            mine = again["optimizer"]["state"][number][name]
            if isinstance(value, DTensor):
                mine, value = mine.to_local(), value.to_local()
            assert same(mine, value)
    parameter = dict(module.named_parameters())["0.weight"]
    restored = tssd.TorchStoreStateDict.from_state_dict({"p": parameter}).to_state_dict(mesh)["p"]
    assert isinstance(restored, nn.Parameter) and isinstance(restored, DTensor)
    try:
        encoded.to_state_dict(device_mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
        raise AssertionError("a mesh of another shape was taken")
    except tssd.TssdValueError as error:
        assert error.kind == "MeshMismatch", error


def chunks(mesh: DeviceMesh) -> None:
    """Local tensors that name their own offsets, as those of embedding tables do."""
    parts = [torch.full((2, 3), float(RANK)), torch.full((1, 3), 9.0)]
    local = LocalShardsWrapper(parts, [(RANK * 3, 0), (RANK * 3 + 2, 0)])
    dtensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((12, 3)), stride=(3, 1)
    )
    loaded = tssd.load(tssd.save({"w": dtensor}))["w"]
    assert [each.offsets for each in loaded.tensor_slice] == [(RANK * 3, 0), (RANK * 3 + 2, 0)]
    assert loaded.tensor_slice[0].global_shape == (12, 3)
    assert torch.equal(loaded.local, torch.cat(parts))
    # A rank may have nothing of it.
    nothing = DTensor.from_local(
        LocalShardsWrapper([], []), mesh, [Shard(0)], run_check=False, shape=torch.Size((12,)), stride=(1,)
    )
    assert tssd.load(tssd.save({"w": nothing, "a": 1})) == {"a": 1}
    try:
        tssd.save({"a": [1, nothing]})
        raise AssertionError("a list has a gap")
    except tssd.TssdTypeError as error:
        assert error.fqn == "a.1" and "dict" in error.advice, error


main()
