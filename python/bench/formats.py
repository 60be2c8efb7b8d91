"""File formats of state dicts, with their save and load functions. None of them waits for the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import tssd
from model import State, copy_structure
from race import Role
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp


@dataclass(frozen=True)
class Format:
    """A file format for state dicts."""

    name: str
    role: Role
    #: Saves a state dict to a new path.
    save: Callable[[State, Path], object]
    #: Loads the state dict at a path. The second argument is a state dict of the same structure and shapes.
    load: Callable[[Path, State], State]
    #: The required speed of tssd, as a multiple of the speed of this format.
    target: float | None = None
    #: The name of the load function, if it differs from `name`.
    load_name: str = ""

    @property
    def loader_name(self) -> str:
        return self.load_name or self.name

    @property
    def save_and_load_name(self) -> str:
        """The names of the save function and the load function."""
        return f"{self.name}, {self.load_name}" if self.load_name else self.name


def _save_dcp(state: State, path: Path) -> None:
    save_dcp(dict(state), storage_writer=FileSystemWriter(str(path), sync_files=False), no_dist=True)


def _load_dcp(path: Path, source: State) -> State:
    state: State = copy_structure(source, warm=False)
    load_dcp(state, checkpoint_id=str(path), no_dist=True)
    return state


TSSD = Format(
    "tssd",
    "ours",
    lambda state, path: tssd.save_file(state, path, fsync=False),
    lambda path, _: tssd.load_file(path),
)
SAFETENSORS = Format(
    "safetensors",
    "peer",
    lambda state, path: safetensors.torch.save_file(state, path),
    lambda path, _: safetensors.torch.load_file(path),
    target=1,
)
TORCH = Format(
    "torch.save", "peer", torch.save, lambda path, _: torch.load(path), target=1.5, load_name="torch.load"
)
DCP = Format("DCP", "peer", _save_dcp, _load_dcp, target=3)
