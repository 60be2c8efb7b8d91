"""Checkpoints of `transformers.Trainer` as archives."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .._errors import TssdError, new_exception
from .._tssd import Store, load_file, save_file
from ..mapping import Mapping
from ._lazy import SHARDS
from ._weights import check_fits, is_sharded, load_module, load_shards, save_shards

_logger = logging.getLogger("transformers.tssd")

MODEL, ADAPTERS, OPTIMIZER = "model.tssd", "adapter_model.tssd", "optimizer.tssd"
SCHEDULER, SCALER = "scheduler.tssd", "scaler.tssd"
# Checkpoints are written here, and renamed when they are complete. Trainer does not search in this folder.
INCOMPLETE = ".incomplete"


@dataclass(frozen=True)
class CheckpointOptions:
    """How `TssdTrainerMixin` writes checkpoints.

    Attributes:
        compression: as for `tssd.save_file`.
        allow_pickle: whether to pickle values that archives cannot hold, such as objects in the state of an optimizer.
        store: a store that gets the weights of each checkpoint, as a new version.
        key: the key of the weights in that store.
        mapping: the stored tensors that those of the model consist of, such as `mapping_of(model)`.
    """

    compression: Literal["none", "auto", "planes", "tiers", "zstd", "zstd-plain"] | None = None
    allow_pickle: bool = False
    store: Store | None = None
    key: str | None = None
    mapping: Mapping | None = None

    def __post_init__(self) -> None:
        if (self.store is None) != (self.key is None):
            raise new_exception("invalid", "", "`store` and `key` belong together", None, "give both", None, None)


class TssdTrainerMixin:
    """Makes a trainer save and resume its checkpoints through archives: `class MyTrainer(TssdTrainerMixin, Trainer)`.

    A folder "checkpoint-N" has the model, the optimizer, the scheduler, the gradient scaler and the random number
    generators in archives. It gets its name when it is complete. Checkpoints that `Trainer` wrote can be resumed too.

    With FSDP2, or a model that `from_pretrained` has distributed, each rank saves its shards. They can be resumed with
    another number of ranks.

    Args:
        checkpoint_options: how checkpoints are written.

    Raises:
        TssdUnsupportedError: the trainer uses FSDP1, DeepSpeed, XLA or SageMaker, which save checkpoints themselves.
    """

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    processing_class: Any
    data_collator: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *rest: Any,
        checkpoint_options: CheckpointOptions | None = None,
        **kwargs: Any,
    ) -> None:
        self.checkpoint_options = checkpoint_options or CheckpointOptions()
        self._staging: Path | None = None
        # Trainer refuses to save the optimizer of a model that `from_pretrained` has sharded. Archives hold it.
        is_distributed = getattr(model, "is_distributed_loading_by_transformers", False)
        refused: Any = args if is_distributed and args is not None and not args.save_only_model else None
        if refused is not None:
            refused.save_only_model = True
        try:
            super().__init__(model, args, *rest, **kwargs)  # type: ignore[call-arg]
        finally:
            if refused is not None:
                refused.save_only_model = False
        self._check_supported()

    def _check_supported(self) -> None:
        from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        for backend, is_used in (
            ("FSDP1", self.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2),
            ("DeepSpeed", self.is_deepspeed_enabled),
            ("XLA", is_torch_xla_available()),
            ("SageMaker", is_sagemaker_mp_enabled()),
        ):
            if is_used:
                text = f"{type(self).__name__} cannot save checkpoints of {backend} as archives"
                advice = 'use FSDP2: fsdp_config={"version": 2}' if backend == "FSDP1" else "use Trainer without it"
                raise new_exception("unsupported", "", text, None, advice, None, None)

    # Saving

    def _get_output_dir(self, trial: Any) -> str:
        if self._staging is not None:
            return str(self._staging)
        folder: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves a checkpoint in another folder, and renames it when all ranks have saved their parts."""
        from transformers.trainer_utils import rotate_checkpoints

        run = Path(self._get_output_dir(trial))
        with self._staged(run):
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            self._publish(run)
        self._mirror()
        folder = run / f"checkpoint-{self.state.global_step}"
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(folder))  # type: ignore[misc]
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(run), self.args.save_total_limit, best, use_mtime=True)

    @contextmanager
    def _staged(self, run: Path) -> Iterator[None]:
        staging = run / INCOMPLETE
        if self.args.should_save and staging.exists():
            shutil.rmtree(staging)
        self.accelerator.wait_for_everyone()
        self._staging = staging
        try:
            yield
        finally:
            self._staging = None

    def _publish(self, run: Path) -> None:
        """Moves a complete checkpoint to its name."""
        name = f"checkpoint-{self.state.global_step}"
        staging, staged, folder = run / INCOMPLETE, run / INCOMPLETE / name, run / name
        self.accelerator.wait_for_everyone()
        # Trainer has searched for the best checkpoint in the other folder.
        best = run / f"checkpoint-{self.state.best_global_step}"
        if best == folder or best.exists():
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(staged / "trainer_state.json"))
            _sync_files(staged)
            if not (folder.exists() and _exchange(staged, folder)):
                if folder.exists():
                    folder.rename(staging / "replaced")
                staged.rename(folder)
            _sync(run)
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _push_from_checkpoint(self, output_dir: str) -> None:
        # `_save_checkpoint` pushes the folder under its name.
        if self._staging is None:
            super()._push_from_checkpoint(output_dir)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model as safetensors, as `Trainer` does. The model of a checkpoint is an archive."""
        if self._staging is None or output_dir is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model = self._unwrapped()
        if is_sharded(model):
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            save_shards(folder / SHARDS, "model", get_model_state_dict(model), self.checkpoint_options.allow_pickle)
        elif self.args.should_save:
            adapters = _adapters(model)
            self._save_archive(adapters or model.state_dict(), folder / (ADAPTERS if adapters else MODEL))
        if self.args.should_save:
            self._save_configuration(model, folder)

    def _save_configuration(self, model: Any, folder: Path) -> None:
        for name, config in getattr(model, "peft_config", {}).items():
            config.save_pretrained(folder if name == "default" else folder / name)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        for part in (getattr(model, "config", None), getattr(model, "generation_config", None), tokenizer):
            save: Any = getattr(part, "save_pretrained", None)
            if save is not None:
                save(folder)
        (folder / "training_args.json").write_text(self.args.to_json_string())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        model = self._unwrapped()
        if is_sharded(model):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            state = get_optimizer_state_dict(model, self._torch_optimizer())
            save_shards(folder / SHARDS, "optimizer", state, self.checkpoint_options.allow_pickle)
        elif self.args.should_save:
            self._save_archive(self.optimizer.state_dict(), folder / OPTIMIZER)
        if self.args.should_save:
            self._save_archive(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _save_scaler(self, output_dir: str) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and self.args.should_save:
            self._save_archive(scaler.state_dict(), Path(output_dir) / SCALER)

    def _save_rng_state(self, output_dir: str) -> None:
        folder = Path(output_dir)
        # Another rank may not have created it yet.
        folder.mkdir(parents=True, exist_ok=True)
        self._save_archive(_random_state(self.args.device.type), folder / self._rng_name())

    def _save_archive(self, state: Any, path: Path) -> None:
        options = self.checkpoint_options
        save_file(state, path, compression=options.compression, allow_pickle=options.allow_pickle)

    def _mirror(self) -> None:
        """Puts the weights of a checkpoint into the store of the options."""
        options, model = self.checkpoint_options, self._unwrapped()
        if options.store is None or options.key is None:
            return
        metadata = {"global_step": self.state.global_step}
        if is_sharded(model):
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            options.store.put_state_dict(
                get_model_state_dict(model), options.key, metadata=metadata, mapping=options.mapping
            )
        elif self.args.process_index == 0:
            state = model.state_dict()
            options.store.put_state_dict(state, options.key, writers=[0], metadata=metadata, mapping=options.mapping)

    # Resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not self._load_weights(folder, self._unwrapped() if model is None else self._unwrapped(model)):
            if not folder.is_dir():
                raise _no_checkpoint(folder, "it does not exist")
            try:
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            except ValueError as error:
                raise _no_checkpoint(folder, f"it has no {MODEL}, and is none of Trainer: {error}") from error

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if not self._load_weights(folder, self._unwrapped()):
            super()._load_best_model()  # type: ignore[misc]

    def _load_weights(self, folder: Path, model: Any) -> bool:
        """Fills the model from a checkpoint. Returns whether the checkpoint has archives."""
        allow_pickle = self.checkpoint_options.allow_pickle
        if (folder / SHARDS).is_dir():
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            load_shards(folder / SHARDS, "model", get_model_state_dict(model), allow_pickle)
        elif (folder / MODEL).exists():
            load_module(model, folder / MODEL, allow_pickle)
        elif (folder / ADAPTERS).exists():
            _load_adapters(model, folder / ADAPTERS)
        else:
            return False
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = Path(checkpoint or "")
        if checkpoint is None or not (folder / SCHEDULER).exists():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        model, allow_pickle = self._unwrapped(), self.checkpoint_options.allow_pickle
        if (folder / SHARDS).is_dir():
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

            optimizer = self._torch_optimizer()
            state = load_shards(folder / SHARDS, "optimizer", get_optimizer_state_dict(model, optimizer), allow_pickle)
            set_optimizer_state_dict(model, optimizer, state)
        elif is_sharded(model):
            text = f"`{folder / OPTIMIZER}` is that of a model that was not sharded, and the model is sharded"
            raise new_exception("unsupported", "", text, None, "resume without FSDP", None, None)
        else:
            self.optimizer.load_state_dict(load_file(folder / OPTIMIZER, allow_pickle=allow_pickle))
        self.lr_scheduler.load_state_dict(load_file(folder / SCHEDULER, allow_pickle=allow_pickle))

    def _load_scaler(self, checkpoint: str | None) -> None:
        path = Path(checkpoint or "") / SCALER
        if checkpoint is None or not path.exists():
            super()._load_scaler(checkpoint)  # type: ignore[misc]
        elif self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(load_file(path))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        path = Path(checkpoint or "") / self._rng_name()
        if checkpoint is None or not path.exists():
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            _set_random_state(load_file(path), self.args.device.type)

    def _rng_name(self) -> str:
        return "rng_state.tssd" if self.args.world_size <= 1 else f"rng_state_{self.args.process_index}.tssd"

    def _unwrapped(self, model: Any = None) -> Any:
        return self.accelerator.unwrap_model(self.model if model is None else model, keep_torch_compile=False)

    def _torch_optimizer(self) -> Any:
        """Returns the optimizer without the wrapper of accelerate."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _adapters(model: Any) -> dict[str, Any]:
    """Returns the adapters of a model of peft. Empty: the model is none."""
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError:
        return {}
    if not isinstance(model, PeftModel):
        return {}
    return {name: get_peft_model_state_dict(model, adapter_name=name) for name in model.peft_config}


def _load_adapters(model: Any, path: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    adapters = load_file(path)
    if adapters.keys() != model.peft_config.keys():
        text = f"the archive has the adapters {sorted(adapters)}, and the model has {sorted(model.peft_config)}"
        raise new_exception("invalid", "", text, None, "add the same adapters to the model", str(path), None)
    for name, state in adapters.items():
        own = get_peft_model_state_dict(model, adapter_name=name)
        check_fits(own, state, f"the adapter `{name}`", path)
    for name, state in adapters.items():
        set_peft_model_state_dict(model, state, adapter_name=name)


def _random_state(device: str) -> dict[str, Any]:
    import numpy as np

    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    if device != "cpu":
        module: Any = torch.get_device_module(device)
        get = getattr(module, "get_rng_state_all", None) or module.get_rng_state
        state[device] = get()
    return state


def _set_random_state(state: dict[str, Any], device: str) -> None:
    import numpy as np

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if device in state and device != "cpu":
        module: Any = torch.get_device_module(device)
        set_state = getattr(module, "set_rng_state_all", None) or module.set_rng_state
        set_state(state[device])


def _no_checkpoint(folder: Path, reason: str) -> TssdError:
    advice = "give the folder of a checkpoint, or True for the last one of output_dir"
    return new_exception("invalid", "", f"`{folder}` is no checkpoint: {reason}", None, advice, None, None)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step, if the system can do so. Otherwise returns False."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    current_folder, exchange = -100, 2
    result = rename(current_folder, os.fsencode(one), current_folder, os.fsencode(other), exchange)
    return bool(result == 0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_files(folder: Path) -> None:
    """Writes all files of a folder to the disk."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)
