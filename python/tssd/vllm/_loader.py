"""The load format "tssd": the weights of an engine come from a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import tssd

from ._installer import Installer, whole_tensors


class ModelLoader(BaseModelLoader):
    """Loads exactly the shards of a worker from a version of a store.

    `model_loader_extra_config` has "store", the address as for `tssd.Store`, and "key", the key of the weights. It can
    have "version", a number or a label that pins it, and "timeout" in seconds. Without "version", the newest version is
    loaded.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        unknown = extra.keys() - {"store", "key", "version", "timeout"}
        if unknown or not {"store", "key"} <= extra.keys():
            raise ValueError(
                'load_format="tssd" needs model_loader_extra_config={"store": ADDRESS, "key": KEY}, and takes '
                f'"version" and "timeout", not {sorted(extra)}'
            )
        self._extra = extra

    def _open(self, store: tssd.Store) -> tssd.OpenVersion:
        timeout = self._extra.get("timeout", 300.0)
        return store.open(self._extra["key"], version=self._extra.get("version"), timeout=timeout)

    def download_model(self, model_config: Any) -> None:
        """Does nothing: each worker fetches its shards when it loads them."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fills the model."""
        device = next(model.parameters()).device
        with tssd.Store(self._extra["store"]) as store, self._open(store) as version:
            Installer(model, model_config, device).load(store, version)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterates over the whole tensors of the version. vLLM's `reload_weights` calls it."""
        with tssd.Store(self._extra["store"]) as store, self._open(store) as version:
            yield from whole_tensors(version, version.keys())
