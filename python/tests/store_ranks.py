"""One rank of test_store_ranks.py: python store_ranks.py FOLDER RANKS RANK URL. Exits with 0 if all checks hold."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tssd
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FOLDER, RANKS, RANK = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

SHAPES = [(8, 4), (10, 3), (3, 7), (1, 1), (0, 5)]

Sharding = tuple[str, tuple[Placement, ...]]


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    store = tssd.Store(sys.argv[4])
    meshes = {
        "flat": init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",)),
        "grid": init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp")),
    }
    shardings: list[Sharding] = [("flat", (Shard(0),)), ("flat", (Shard(1),)), ("flat", (Replicate(),))]
    pairs = itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2)
    shardings += [("grid", pair) for pair in pairs]
    for number, sharding in enumerate(shardings):
        put(store, number + 1, sharding, meshes)
        for other in shardings:
            check(store, other, meshes)
    fsdp_to_tp(store, meshes)
    refuse(store, meshes["flat"])
    dist.barrier()
    dist.destroy_process_group()


def whole(shape: tuple[int, int], version: int) -> torch.Tensor:
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + 1000 * version


def spread(tensor: torch.Tensor, sharding: Sharding, meshes: dict[str, DeviceMesh]) -> DTensor:
    return distribute_tensor(tensor, meshes[sharding[0]], sharding[1], src_data_rank=None)


def put(store: tssd.Store, version: int, sharding: Sharding, meshes: dict[str, DeviceMesh]) -> None:
    state: dict[str, Any] = {str(shape): spread(whole(shape, version), sharding, meshes) for shape in SHAPES}
    state["step"] = version
    report = store.put_state_dict(state, "policy", version=version)
    assert report.version == version
    dist.barrier()
    assert int(store.wait_for_version("policy", version, timeout=60)) == version


def check(store: tssd.Store, sharding: Sharding, meshes: dict[str, DeviceMesh]) -> None:
    head = store.head("policy")
    assert head is not None
    into = {str(shape): spread(torch.full(shape, -1.0), sharding, meshes) for shape in SHAPES}
    got, report = store.get_state_dict("policy", into, return_report=True)
    assert got is into and report.bytes_transferred == report.bytes_needed
    for shape in SHAPES:
        wanted = whole(shape, head.version)
        assert torch.equal(into[str(shape)].full_tensor(), wanted), (sharding, shape)
    if RANK == 0:
        plain = store.get_state_dict("policy")
        assert plain["step"] == head.version
        assert all(torch.equal(plain[str(shape)], whole(shape, head.version)) for shape in SHAPES)
    dist.barrier()


def fsdp_to_tp(store: tssd.Store, meshes: dict[str, DeviceMesh]) -> None:
    """A trainer with FSDP2 and its optimizer; generators with tensor parallelism."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))

    trainer = model()
    fully_shard(trainer, mesh=meshes["flat"])
    optimizer = torch.optim.AdamW(trainer.parameters())
    trainer(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = {"model": trainer.state_dict(), "optimizer": optimizer.state_dict()}
    store.put_state_dict(state, "trainer")
    dist.barrier()
    generator = model()
    parallelize_module(generator, meshes["grid"]["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    store.get_state_dict("trainer", {"model": generator.state_dict()}, strict=False)
    for name, value in trainer.state_dict().items():
        mine = generator.state_dict()[name].full_tensor()
        assert torch.equal(mine, value.full_tensor()), name
    again = store.get_state_dict("trainer")
    for number, moments in state["optimizer"]["state"].items():
        for name, value in moments.items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(again["optimizer"]["state"][number][name], value)
    assert again["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]


def refuse(store: tssd.Store, mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(2, 2), mesh, [Partial("sum")], run_check=False)
    try:
        store.put_state_dict({"a": {"w": partial}}, "partial")
        raise AssertionError("Partial was put")
    except tssd.TssdValueError as error:
        assert (error.kind, error.fqn) == ("PartialPlacement", "a.w"), error
    # A replicated plain leaf that ranks hold differently.
    try:
        shard = distribute_tensor(torch.ones(RANKS), mesh, [Shard(0)], src_data_rank=None)
        state = {"w": shard, "plain": torch.full((2,), float(RANK))}
        report = store.put_state_dict(state, "divergent", version=1)
        assert not report.visible, "it was proven"
    except tssd.TssdValueError as error:
        assert error.kind in ("rejected", "refused") and "plain" in str(error), error
    dist.barrier()
    assert not store.exists("divergent")


main()
