"""Shardings of a state dict: the layout on the ranks of the writers, and on those of the readers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from model import NormalGenerator
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

RANKS = 8
Mesh = list[int] | list[list[int]]


@dataclass(frozen=True)
class Layout:
    """A mesh of ranks, with the placement of tensors in each of its dimensions."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    @property
    def ranks(self) -> list[int]:
        return [rank for row in self.mesh for rank in (row if isinstance(row, list) else [row])]


FSDP4 = Layout([0, 1, 2, 3], (Shard(0),))
FSDP8 = Layout([0, 1, 2, 3, 4, 5, 6, 7], (Shard(0),))
HSDP = Layout([[0, 1], [2, 3]], (Replicate(), Shard(0)))
TP2 = Layout([0, 1], (Shard(1),))
FSDP3 = Layout([0, 1, 2], (Shard(0),))

#: By name: a description, the layout of the writers, and the layout of the readers.
RESHARDS = {
    "fsdp4-tp2": ("FSDP on 4 ranks to TP on 2", FSDP4, TP2),
    "hsdp2x2-tp2": ("HSDP on 2 x 2 ranks to TP on 2", HSDP, TP2),
    "fsdp8-fsdp3": ("FSDP on 8 ranks to FSDP on 3, uneven", FSDP8, FSDP3),
}


def make_matrices(nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields square matrices of about `nbytes` in total. All ranks generate the same values."""
    normal = NormalGenerator()
    count = max(1, nbytes // (2048 * 2048 * 2))
    side = 2048 if count > 1 else 512
    for number in range(count):
        yield f"layers.{number}.weight", normal.fill(torch.empty(side, side, dtype=torch.bfloat16))


def shard_locally(whole: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """Returns the DTensor of a whole tensor. Each rank takes its part locally: no rank sends data."""
    return distribute_tensor(whole, mesh, layout.placements, src_data_rank=None)
