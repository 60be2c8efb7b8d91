"""`Accelerator.save_state` and `load_state` with weights in archives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from .._errors import new_exception
from .._tssd import save_file
from ._weights import is_sharded, load_module


class Registration:
    """The hooks of an accelerator. `remove` restores its own format of weights."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


def register(
    accelerator: Any,
    *,
    compression: Literal["none", "auto", "planes", "tiers", "zstd", "zstd-plain"] | None = None,
) -> Registration:
    """Makes an accelerator save and load the weights of its models as archives: `model.tssd`, `model_1.tssd` and so on.

    Tied weights are stored once, and stay tied. `save_state` writes all other parts of the state as before.
    `load_state` reads folders without archives as before.

    Args:
        accelerator: the accelerator.
        compression: as for `tssd.save_file`.

    Raises:
        TssdUnsupportedError: the accelerator uses FSDP, DeepSpeed or Megatron-LM, whose weights no hook receives.
            `save_state` raises it for a model with DTensors, as with tensor parallelism.
    """
    kind = str(accelerator.distributed_type.value)
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        text = f"accelerate gives the weights of {kind} to no hook"
        advice = "put the shards of each rank: tssd.Store.put_state_dict"
        raise new_exception("unsupported", "", text, None, advice, None, None)

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        unwrapped = [accelerator.unwrap_model(model) for model in models]
        if any(is_sharded(model) for model in unwrapped):
            text = "accelerate saves a model as that of one rank, and this one is sharded"
            advice = "put the shards of each rank: tssd.Store.put_state_dict"
            raise new_exception("unsupported", "", text, None, advice, None, None)
        is_writer = accelerator.is_main_process
        if accelerator.project_configuration.save_on_each_node:
            is_writer = accelerator.is_local_main_process
        # An empty list makes accelerate write no weights.
        weights.clear()
        if is_writer:
            for index, model in enumerate(unwrapped):
                save_file(model.state_dict(), _path(output_dir, index), compression=compression)

    def load(models: list[Any], input_dir: str) -> None:
        paths = [_path(input_dir, index) for index in range(len(models))]
        found = [path for path in paths if path.exists()]
        extra = _path(input_dir, len(models))
        if not found:
            return
        if len(found) < len(paths) or extra.exists():
            text = f"`{input_dir}` has not the weights of {len(models)} models"
            advice = "prepare the same models, in the same order, as for the save"
            raise new_exception("NotFound", "", text, None, advice, None, None)
        for model, path in zip(models, paths):
            load_module(accelerator.unwrap_model(model), path)
        models.clear()

    return Registration(
        [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
    )


def _path(folder: str, index: int) -> Path:
    return Path(folder) / ("model.tssd" if index == 0 else f"model_{index}.tssd")
