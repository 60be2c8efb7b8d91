"""TSSD in transformers, accelerate and peft.

    with lazy_state_dict("unix:rl", key="policy") as state_dict:    # or the path of an archive
        model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state_dict)

    class MyTrainer(TssdTrainerMixin, Trainer): ...                 # checkpoints are archives

    register(accelerator)                                           # save_state and load_state: weights are archives
    save_adapter(model, store, "adapter"); hotswap_adapter(model, store, "adapter")
    store.put_state_dict(model.state_dict(), "policy", mapping=mapping_of(model))

The packages are imported only if a function needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._accelerate import register as register
    from ._lazy import LazyStateDict as LazyStateDict
    from ._lazy import LazyTensor as LazyTensor
    from ._lazy import lazy_state_dict as lazy_state_dict
    from ._mapping import mapping_of as mapping_of
    from ._peft import hotswap_adapter as hotswap_adapter
    from ._peft import save_adapter as save_adapter
    from ._trainer import CheckpointOptions as CheckpointOptions
    from ._trainer import TssdTrainerMixin as TssdTrainerMixin

__all__ = [
    "CheckpointOptions",
    "LazyStateDict",
    "LazyTensor",
    "TssdTrainerMixin",
    "hotswap_adapter",
    "lazy_state_dict",
    "mapping_of",
    "register",
    "save_adapter",
]

_MODULES = {
    "CheckpointOptions": "_trainer",
    "LazyStateDict": "_lazy",
    "LazyTensor": "_lazy",
    "TssdTrainerMixin": "_trainer",
    "hotswap_adapter": "_peft",
    "lazy_state_dict": "_lazy",
    "mapping_of": "_mapping",
    "register": "_accelerate",
    "save_adapter": "_peft",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
