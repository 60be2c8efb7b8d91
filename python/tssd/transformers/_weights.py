"""The weights of modules in archives, and those of sharded modules in stores in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .._errors import new_exception
from .._tssd import Store, load_file


def load_module(module: torch.nn.Module, path: Path, allow_pickle: bool = False) -> None:
    """Fills a module from an archive. If names or shapes differ, the module stays as it is.

    Raises:
        TssdKeyError: tensors are missing in the archive.
        TssdValueError: the archive has other tensors, or other shapes.
    """
    load_state(module, load_file(path, allow_pickle=allow_pickle), path)


def load_state(module: torch.nn.Module, state: dict[str, Any], path: Path) -> None:
    """Fills a module from a state dict that was read from a path: see `load_module`."""
    check_fits(module.state_dict(), state, type(module).__name__, path)
    if is_sharded(module):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(state)


def check_fits(own: dict[str, Any], state: dict[str, Any], name: str, path: Path) -> None:
    """Checks that a state dict that was read from a path has the names and the shapes of that of a model.

    Args:
        own: the state dict of the model.
        state: the other one.
        name: the name of the model, for errors.
        path: the path.
    """
    advice = "resume with the model that wrote the checkpoint"
    missing = [key for key in own if key not in state]
    if missing:
        text = f"the archive lacks {_listed(missing)}, which {name} has"
        raise new_exception("NotFound", "", text, None, advice, str(path), None)
    unexpected = [key for key in state if key not in own]
    if unexpected:
        text = f"the archive has {_listed(unexpected)}, which {name} lacks"
        raise new_exception("invalid", "", text, None, advice, str(path), None)
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and getattr(state[key], "shape", None) != tensor.shape:
            found = list(getattr(state[key], "shape", ()))
            text = f"`{key}` has shape {found} in the archive, and {list(tensor.shape)} in {name}"
            raise new_exception("SliceMismatch", "", text, key, advice, str(path), None)


def is_sharded(module: torch.nn.Module) -> bool:
    """Returns whether a parameter of a module is a DTensor, as with FSDP2 or tensor parallelism."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def save_shards(folder: Path, key: str, state: dict[str, Any], allow_pickle: bool = False) -> None:
    """Saves the shards of all ranks in a folder. Each rank calls it, and puts what it has: nothing is gathered."""
    with Store(os.fspath(folder)) as store:
        pending = store.put_state_dict(state, key, durability="disk", wait=False, allow_pickle=allow_pickle)
        pending.wait_visible()


def load_shards(folder: Path, key: str, into: dict[str, Any], allow_pickle: bool = False) -> dict[str, Any]:
    """Fills a state dict from the shards in a folder. Each rank reads the parts that it needs, in any sharding."""
    with Store(os.fspath(folder)) as store:
        if not store.exists(key):
            text = f"the folder has no complete `{key}`: a save did not end, or did not save it"
            raise new_exception("not_found", "", text, None, "resume from another checkpoint", str(folder), None)
        return store.get_state_dict(key, into=into, allow_pickle=allow_pickle)


def _listed(names: list[str]) -> str:
    """Returns the first names, for an error."""
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
