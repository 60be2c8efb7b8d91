"""State dicts of a model and its optimizer after training on a mesh."""

from __future__ import annotations

from typing import Any

import torch
from sharding import SHAPES, distribute
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    count = torch.Size(shape).numel()
    names = ("replicate", "shard")[-len(shape) :]
    return DeviceMesh("cpu", torch.arange(count).reshape(shape), mesh_dim_names=names)


class Model(nn.Module):
    """A model with a parameter of its own and buffers, whose dimensions no mesh divides evenly."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))
        self.scale = nn.Parameter(torch.rand(10, 10))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(rows @ self.scale)
        return result


def make_trained_state(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """Trains a model for two steps. Returns its state dict, with uneven shards and nested values added."""
    model = Model(seed)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(4, 10)).sum().backward()
        optimizer.step()
    # The last placement is `Shard`. On a mesh of two dimensions, the first one is `Replicate`.
    placements = tuple(model.scale.placements)  # type: ignore[arg-type]
    uneven = {}
    for shape in SHAPES:
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + seed
        uneven[str(shape)] = distribute(whole, mesh, placements)
        uneven[f"columns {shape}"] = distribute(whole, mesh, (*placements[:-1], Shard(1)))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    nested = {"step": seed, "list": [torch.full((3,), float(seed)), {"name": f"run {seed}"}]}
    return {"model": model_state, "optimizer": optimizer_state, "uneven": uneven, "nested": nested}


def to_local(state: Any) -> Any:
    """Returns the state with each DTensor replaced by a copy of its local tensor."""
    if isinstance(state, DTensor):
        return state.to_local().detach().clone()
    if isinstance(state, dict):
        return {key: to_local(value) for key, value in state.items()}
    return [to_local(value) for value in state] if isinstance(state, list) else state
