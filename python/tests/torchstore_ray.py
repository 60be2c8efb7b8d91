"""A trainer and two generators as Ray actors. Each actor finds the store by its name."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch
import tssd.torchstore as ts


@ray.remote(num_cpus=0)
class Trainer:
    def put(self, step: int) -> None:
        asyncio.run(ts.put_state_dict({"w": torch.full((4,), float(step))}, "policy"))


@ray.remote(num_cpus=0)
class Generator:
    async def get(self) -> Any:
        return (await ts.get_state_dict("policy"))["w"].tolist()


if __name__ == "__main__":
    asyncio.run(ts.initialize(store_name="torchstore"))
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
    trainer, generators = Trainer.remote(), [Generator.remote() for _ in range(2)]
    for step in (1, 2):
        ray.get(trainer.put.remote(step))
        assert ray.get([each.get.remote() for each in generators]) == [[float(step)] * 4] * 2
    ray.shutdown()
    asyncio.run(ts.shutdown())
