"""Tensors cut into DTensors, for the ranks of the tests."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

# Even, uneven, smaller than a mesh, a single element, nothing.
SHAPES = [(8, 4), (10, 3), (3, 7), (1, 1), (0, 5)]


def distributed(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """As distribute_tensor, which knows no strided shards: those are cut by the placements themselves."""
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    local = whole
    here = mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        if here is not None and isinstance(placement, (Shard, _StridedShard)):
            pieces, _ = placement._split_tensor(
                local, mesh.size(dim), with_padding=False, contiguous=True
            )
            local = pieces[here[dim]]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
