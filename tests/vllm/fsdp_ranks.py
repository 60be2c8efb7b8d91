"""A rank of a trainer: puts the shards of a fully sharded model with `tssd.vllm`, and counts the collectives.

Usage: torchrun ... fsdp_ranks.py CONFIG STORE VERSION
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from models import make_config, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from tssd.vllm import TrainerInit
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory


class NoEngine:
    """The test drives the engine."""

    def init_weight_transfer_engine(self, _info: dict[str, Any]) -> None:
        assert dist.get_rank() == 0


def main() -> None:
    kind, store, version = sys.argv[1], sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model(make_config(kind), seed=version)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trainer = WeightTransferTrainerFactory.trainer_init(
        TrainerInit(store, "policy", rank=dist.get_rank(), timeout=60), client=NoEngine(), source=ModuleSource(model)
    )
    with CommDebugMode() as collectives, torch.no_grad():
        report = trainer.put(version)
    local = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert report.bytes < 1.05 * local + 4096, (report.bytes, local)
    assert collectives.get_total_counts() == 0, collectives.get_comm_counts()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
