"""One rank of test_convert.py: python convert_ranks.py FOLDER RANKS RANK PATH.

Saves a checkpoint with DCP.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharding import SHAPES, distribute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

FOLDER, RANKS, RANK, PATH = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))
    state, full = {}, {}
    for placements in (
        (Replicate(), Shard(0)),
        (Shard(0), Shard(1)),
        (_StridedShard(0, split_factor=RANKS // 2), Shard(0)),
    ):
        for rows, columns in SHAPES:
            name = f"{placements} {rows} {columns}"
            full[name] = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
            state[name] = distribute(full[name], mesh, placements)
    plain = {"step": 7, "list": [torch.ones(3), {"name": "run"}]}
    writer = dcp.FileSystemWriter(PATH, thread_count=2)
    dcp.save({"sharded": state, "rest": plain}, storage_writer=writer)
    if RANK == 0:
        torch.save({"sharded": full, "rest": plain}, FOLDER / "full.pt")
    dist.destroy_process_group()


main()
