"""Processes of Ray, of which each finds the store."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch
import tssd.torchstore as ts


@ray.remote(num_cpus=0)
class Trainer:
    def put(self, number: int) -> None:
        asyncio.run(ts.put_state_dict({"w": torch.full((4,), float(number))}, "policy"))


@ray.remote(num_cpus=0)
class Generator:
    async def get(self) -> Any:
        return (await ts.get_state_dict("policy"))["w"].tolist()


if __name__ == "__main__":
    asyncio.run(ts.initialize(store_name="torchstore"))
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
    trainer, generators = Trainer.remote(), [Generator.remote() for _ in range(2)]
    for number in (1, 2):
        ray.get(trainer.put.remote(number))
        assert ray.get([each.get.remote() for each in generators]) == [[float(number)] * 4] * 2
    ray.shutdown()
    asyncio.run(ts.shutdown())
