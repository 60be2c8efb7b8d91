"""Two ranks of a trainer put four steps. In the second one, the weights of rank 0 are not finite.

Usage: torchrun ... failing_ranks.py STORE
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import tssd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tssd.vllm import TrainerInit
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory


class NoEngine:
    """Nothing is committed."""

    def init_weight_transfer_engine(self, _info: dict[str, Any]) -> None:
        assert dist.get_rank() == 0

    def start_weight_update(self) -> None:
        raise AssertionError("the engine is not asked before the version is visible")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    trainer = WeightTransferTrainerFactory.trainer_init(
        TrainerInit(sys.argv[1], "failing", rank=rank, timeout=3, check_finite=True),
        client=NoEngine(),
        source=ModuleSource(model),
    )
    for step in range(1, 5):
        with torch.no_grad():
            model.weight.to_local().fill_(step)  # type: ignore[operator]
            if step == 2 and rank == 0:
                model.weight.to_local()[0, 1] = torch.nan  # type: ignore[operator]
        try:
            trainer.put()
            has_failed = False
        except tssd.TssdError as error:
            has_failed = True
            assert "NaN" in str(error)
        assert has_failed == (step == 2 and rank == 0)
        if step == 2 and rank == 1:
            # Rank 0 knows that its put has failed. A rank that does not know would wait for the others.
            trainer.is_sender = True
            try:
                trainer.stage()
                raise AssertionError("the version is not visible")
            except TimeoutError:
                trainer.is_sender = False
        dist.barrier()
        if step != 2 and rank == 0:
            with tssd.Store(sys.argv[1]) as store:
                loaded = store.get_state_dict("failing", version=trainer.version)
            assert torch.equal(loaded["weight"], torch.full((4, 4), float(step))), (step, loaded)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
