"""Checks that the plug-in fits the Python modules of a newer vLLM, whose engine does not run on CPUs.

Usage: contract.py VERSION STORE FOLDER

It runs with these modules on PYTHONPATH, without the compiled ones: models are loaded and updated, and do not run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import tssd
import tssd.vllm
import vllm
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

# The wheel is for GPUs. Modules take the platform at their import.
vllm.platforms._current_platform = CpuPlatform()

from models import make_config, make_model  # noqa: E402
from tssd.vllm import TrainerInit  # noqa: E402
from tssd.vllm._trainer import local_shard  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.config.load import LoadConfig  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory  # noqa: E402
from vllm.distributed.weight_transfer.base import (  # noqa: E402
    ParamMeta,
    Replicate,
    Shard,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # noqa: E402


def check_registration() -> None:
    """The plug-in registers its three classes, and they implement all that the base classes demand."""
    tssd.vllm.register()
    tssd.vllm.register()
    engine = WeightTransferEngineFactory._registry["tssd"]()
    trainer = WeightTransferTrainerFactory._registry["tssd"]()
    extra = {"store": "unix:x", "key": "policy"}
    loader = type(get_model_loader(LoadConfig(load_format="tssd", model_loader_extra_config=extra)))
    for base, own in [
        (WeightTransferEngine, engine),
        (TrainerWeightTransferEngine, trainer),
        (BaseModelLoader, loader),
    ]:
        assert issubclass(own, base)
        assert own.__abstractmethods__ == frozenset(), own
        for name, method in vars(base).items():
            overridden = vars(own).get(name)
            if name.startswith("_") or overridden is None or not inspect.isfunction(method):
                continue
            expected = list(inspect.signature(method).parameters.values())
            found = list(inspect.signature(overridden).parameters.values())
            assert [(each.name, each.kind) for each in found[: len(expected)]] == [
                (each.name, each.kind) for each in expected
            ], f"{own.__name__}.{name}"
            assert all(each.default is not each.empty for each in found[len(expected) :]), f"{own.__name__}.{name}"
    assert engine.parse_init_info(engine, {"store": "unix:x", "key": "policy"}).timeout == 300.0
    assert engine.parse_update_info(engine, {"version": 7, "stage_only": True}).version == 7


class OwnSource(WeightSource):
    """A source that is no module: a mesh of 2 x 2 ranks that shards and replicates, and a tensor of one rank."""

    def __init__(self, state: dict[str, torch.Tensor], rank: int) -> None:
        self.state, self.rank = state, rank

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        layouts: dict[str, Any] = {
            "q.weight": {"owners": (0, 1, 2, 3), "mesh_shape": (2, 2), "placements": (Replicate(), Shard(0))},
            "gate.weight": {"owners": (0, 1, 2, 3), "mesh_shape": (2, 2), "placements": (Shard(0), Shard(0))},
            "down.weight": {"owners": (0, 1, 2, 3), "mesh_shape": (2, 2), "placements": (Shard(1), Shard(0))},
            "up.weight": {"owners": (2, 3), "placements": (Shard(1),)},
            "k.weight": {"owners": (3,)},
        }
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape), **layouts.get(name, {}))
            for name, tensor in self.state.items()
        ]

    def iter_local(self) -> Iterable[tuple[str, torch.Tensor]]:  # type: ignore[override]
        for meta in self.metadata:
            if meta.owners is not None and self.rank not in meta.owners:
                continue
            tensor = self.state[meta.name]
            if meta.placements is not None:
                at = meta.owners.index(self.rank)  # type: ignore[union-attr]
                coordinates = divmod(at, 2) if len(meta.mesh_shape) == 2 else (at,)  # type: ignore[arg-type]
                for size, coordinate, placement in zip(meta.mesh_shape, coordinates, meta.placements):  # type: ignore[arg-type]
                    if isinstance(placement, Shard):
                        tensor = tensor.chunk(size, placement.dim)[coordinate]
            yield meta.name, tensor


class Engine:
    """The control plane of an engine, which the plug-in's worker side is behind."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.version = worker, None

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.worker.init_transfer_engine(self.worker.parse_init_info(info))

    def start_weight_update(self) -> None:
        self.worker.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        self.worker.receive_weights(self.worker.parse_update_info(info))

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        """Nothing is computed here."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.worker.finish_weight_update()
        self.version = weight_version


def check_transfer(store: str, folder: Path) -> None:
    """A trainer and a worker of the newer vLLM, with its model, its recorder and its reload.

    The parameters are then those of an engine that loads the checkpoint from safetensors.
    """
    # The experts of other models need compiled code.
    config = make_config("llama")
    config.save_pretrained(folder)
    options: Any = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 2}
    weight_transfer = {"backend": "tssd"}
    arguments = EngineArgs(str(folder), skip_tokenizer_init=True, weight_transfer_config=weight_transfer, **options)
    vllm_config = arguments.create_engine_config()
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        initialize_model_parallel(1, 1)

        def load(load_format: str, **extra: Any) -> torch.nn.Module:
            # Each model registers its attention layers.
            vllm_config.compilation_config.static_forward_context.clear()
            loader = get_model_loader(LoadConfig(load_format=load_format, **extra))
            return loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)

        live = load("dummy")
        engine_class = WeightTransferEngineFactory._registry["tssd"]()
        client = Engine(engine_class(vllm_config.weight_transfer_config, vllm_config, torch.device("cpu"), live))
        for seed in (1, 2, 3):
            model = make_model(config, seed)
            model.save_pretrained(folder)
            expected = dict(load("safetensors").named_parameters())
            assert not all(torch.equal(expected[name], each) for name, each in live.named_parameters())
            trainer = WeightTransferTrainerFactory.trainer_init(
                TrainerInit(store, "policy", rank=0, timeout=30), client=client, source=ModuleSource(model)
            )
            trainer.send_weights()
            found = dict(live.named_parameters())
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found), seed
            assert client.version == str(trainer.version)
            extra = {"model_loader_extra_config": {"store": store, "key": "policy"}}
            started = dict(load("tssd", **extra).named_parameters())
            assert all(torch.equal(started[name], expected[name]) for name in expected), seed
            trainer.shutdown()


def check_sources(store: str) -> None:
    """Each rank of a source puts its own part, and each element is put once."""
    with tssd.Store(store) as client:
        names = ["q.weight", "k.weight", "gate.weight", "up.weight", "down.weight", "norm.weight"]
        state = {name: torch.randn(16, 12) for name in names}
        pending, put_bytes = [], 0
        for rank in range(4):
            source = OwnSource(state, rank)
            metas = {meta.name: meta for meta in source.metadata}
            own = {name: local_shard(metas[name], tensor, rank) for name, tensor in source.iter_local()}
            own = {name: tensor for name, tensor in own.items() if tensor is not None}
            put_bytes += sum(getattr(tensor, "local", tensor).nbytes for tensor in own.values())
            put = client.put_state_dict(own, "sources", version=1, writers=4, writer=rank, job="contract", wait=False)
            pending.append(put)
        for put in pending:
            put.result(30)
        loaded = client.get_state_dict("sources")
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], state[name]) for name in state)
        assert put_bytes == sum(tensor.nbytes for tensor in state.values())


def main() -> None:
    version, store, folder = sys.argv[1:]
    assert vllm.__version__ == version
    check_registration()
    check_sources(store)
    check_transfer(store, Path(folder, "model"))
    print("the plug-in fits")


if __name__ == "__main__":
    main()
