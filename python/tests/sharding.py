"""Shards tensors into DTensors, for the rank scripts of the tests."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

# Divisible by the mesh, not divisible, smaller than the mesh, one element, empty.
SHAPES = [(8, 4), (10, 3), (3, 7), (1, 1), (0, 5)]


def distribute(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Shards a tensor like `distribute_tensor`, but supports strided shards."""
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    local = whole
    coordinate = mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        if coordinate is not None and isinstance(placement, (Shard, _StridedShard)):
            pieces, _ = placement._split_tensor(
                local, mesh.size(dim), with_padding=False, contiguous=True
            )
            local = pieces[coordinate[dim]]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
