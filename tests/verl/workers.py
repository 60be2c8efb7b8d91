"""verl's workers on CPUs. The engine of each is FSDP2, and its model can be filled with weights that tests know."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import torch
from tests.checkpoint_engine.test_utils import CheckpointEngineWorkerTest, MockReplica, TrainingWorkerTest
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, LlamaConfig
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

HERE = Path(__file__).parent


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")
class CpuEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine. verl registers it for GPUs only."""


def weight_of(name: str, shape: Iterable[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns the values of a parameter, which depend on its name and on a seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    return torch.rand(tuple(shape), generator=generator).to(dtype)


class ActorWorker(TrainingWorkerTest):
    def __init__(self, config: Any, checkpoint_engine_config: Any) -> None:
        # As `ActorRolloutRefWorker` does.
        import_external_libs(checkpoint_engine_config.custom_backend_module)
        # verl would name the backend of CPUs twice.
        initialize_global_process_group_ray(backend="cpu:gloo")
        super().__init__(config, checkpoint_engine_config)
        self.fails_at: int | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fill(self, seed: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Fills the model. Returns the names, shapes and dtypes of its state dict."""
        state = self.engine.module.state_dict()
        for name, parameter in state.items():
            whole = weight_of(name, parameter.shape, parameter.dtype, seed)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)
        return [(name, tuple(parameter.shape), parameter.dtype) for name, parameter in state.items()]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_at(self, rank: int, count: int | None) -> None:
        """Has a rank fail after it has put `count` tensors of the next round."""
        self.fails_at = count if rank == torch.distributed.get_rank() else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        if mode == "delta_sharded":
            # As `ActorRolloutRefWorker` does.
            weights = self.engine
        else:
            weights, _ = self.engine.get_per_tensor_param()
            if self.fails_at is not None:
                weights = failing(list(weights), self.fails_at)
        with CommDebugMode() as collectives:
            metrics = await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)
        return {**metrics, "collectives": collectives.get_total_counts()}


def failing(weights: list[Any], count: int) -> Iterable[Any]:
    yield from weights[:count]
    raise OSError("the rank fails")


class RolloutWorker(CheckpointEngineWorkerTest):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_seed(self, expected: list[tuple[str, tuple[int, ...], torch.dtype]], seed: int) -> int:
        """Compares the weights that have been received. Returns how many there are."""
        received = self.server_adapter.received_weights
        assert list(received) == [name for name, _, _ in expected], "names, or their order"
        for name, shape, dtype in expected:
            assert received[name].dtype == dtype
            assert torch.equal(received[name], weight_of(name, shape, dtype, seed)), name
        count = len(received)
        received.clear()
        return count


class Cluster:
    """Actor and rollout workers, and verl's manager of their weight transfers."""

    def __init__(self, folder: Path, engine_config: CheckpointEngineConfig, actors: int, rollouts: int) -> None:
        config = LlamaConfig(
            # FSDP2 divides it into parts of different lengths.
            vocab_size=321,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        override = {"attn_implementation": "sdpa"}
        self.model_config = HFModelConfig(
            path=str(folder), load_tokenizer=False, use_remove_padding=False, override_config=override
        )
        self.engine_config = engine_config
        self.actors = self._start_actors(actors)
        self.actors.reset()
        self.rollouts, replicas = self._start_rollouts(rollouts)
        self.manager = CheckpointEngineManager(config=engine_config, actor_wg=self.actors, replicas=replicas)

    def _start_actors(self, count: int) -> RayWorkerGroup:
        config = TrainingWorkerConfig(
            model_type="language_model",
            model_config=self.model_config,
            engine_config=FSDPEngineConfig(fsdp_size=count, strategy="fsdp2", use_torch_compile=False),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3),
        )
        return self._start(ActorWorker, count, config=config, checkpoint_engine_config=self.engine_config)

    def _start_rollouts(self, count: int) -> tuple[RayWorkerGroup, list[MockReplica]]:
        config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=self.engine_config)
        workers = self._start(RolloutWorker, count, rollout_config=config, model_config=self.model_config)
        replicas = [MockReplica(rank, config, self.model_config) for rank in range(count)]
        for replica in replicas:
            asyncio.run(replica.init_hybrid(workers))
        return workers, replicas

    def _start(self, cls: type, count: int, **arguments: Any) -> RayWorkerGroup:
        pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
        return RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(cls), **arguments), device_name="cpu")


def start_ray(package: str) -> None:
    """Starts Ray. Its workers find this folder and the package under test, and run on CPUs."""
    paths = [str(HERE), package, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
