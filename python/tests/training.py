"""A model and its optimizer, trained on a mesh."""

from __future__ import annotations

from typing import Any

import torch
from sharding import SHAPES, distributed
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


def mesh(shape: tuple[int, ...]) -> DeviceMesh:
    count = torch.Size(shape).numel()
    names = ("replicate", "shard")[-len(shape) :]
    return DeviceMesh("cpu", torch.arange(count).reshape(shape), mesh_dim_names=names)


class Model(nn.Module):
    """Uneven on every mesh, parameters of its own, and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))
        self.scale = nn.Parameter(torch.rand(10, 10))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(rows @ self.scale)
        return result


def trained(where: DeviceMesh, seed: int) -> dict[str, Any]:
    model = Model(seed)
    fully_shard(model, mesh=where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(4, 10)).sum().backward()
        optimizer.step()
    # Shard is the last placement: with two dimensions, the first one replicates.
    placements = tuple(model.scale.placements)  # type: ignore[arg-type]
    uneven = {}
    for shape in SHAPES:
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + seed
        uneven[str(shape)] = distributed(whole, where, placements)
        uneven[f"columns {shape}"] = distributed(whole, where, (*placements[:-1], Shard(1)))
    parts, optimizers = get_state_dict(model, optimizer)
    nested = {"step": seed, "list": [torch.full((3,), float(seed)), {"name": f"run {seed}"}]}
    return {"model": parts, "optimizer": optimizers, "uneven": uneven, "nested": nested}


def local(state: Any) -> Any:
    """The same with the tensors that are here."""
    if isinstance(state, DTensor):
        return state.to_local().detach().clone()
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return [local(value) for value in state] if isinstance(state, list) else state
