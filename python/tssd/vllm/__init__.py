"""TSSD in vLLM: the weight-transfer backend "tssd" and the load format "tssd".

vLLM finds `register` through the entry point group `vllm.general_plugins`. An engine is then configured by

    LLM(model, weight_transfer_config={"backend": "tssd"})
    LLM(model, load_format="tssd", model_loader_extra_config={"store": "unix:rl", "key": "policy"})

and a trainer by `WeightTransferTrainerFactory.trainer_init(tssd.vllm.TrainerInit(...), client=client, source=source)`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ._client import LLMClient

if TYPE_CHECKING:
    from ._trainer import TrainerInit as TrainerInit
    from ._trainer import TrainerTransfer as TrainerTransfer

__all__ = ["LLMClient", "TrainerInit", "TrainerTransfer", "register", "register_trainer"]

_BACKEND = "tssd"
_logger = logging.getLogger("vllm.tssd")


def register() -> None:
    """Registers the backend and the load format. vLLM calls it in each of its processes, possibly several times."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

        if _BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(_BACKEND, "tssd.vllm._engine", "TransferEngine")
        register_trainer()
        if _BACKEND not in _LOAD_FORMAT_TO_MODEL_LOADER:
            from ._loader import ModelLoader

            register_model_loader(_BACKEND)(ModelLoader)
    except ImportError as error:
        # An engine that does not use the plug-in must start with any version of vLLM.
        _logger.warning("tssd does not support this version of vLLM: %s", error)


def register_trainer() -> None:
    """Registers the trainer side of the backend. The import of `TrainerInit` calls it: trainers load no plug-ins."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if _BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(_BACKEND, "tssd.vllm._trainer", "TrainerTransfer")


def __getattr__(name: str) -> Any:
    if name in ("TrainerInit", "TrainerTransfer"):
        from . import _trainer

        register_trainer()
        return getattr(_trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
