"""Reads checkpoints that torch pickled, without executing code in them. `tssd convert` runs it.

    state_dict = load_torch("checkpoint.pt")  # a file of torch.save
    state_dict = load_dcp("checkpoint/")  # a directory of torch.distributed.checkpoint

Only tensors, containers, plain values, and arrays, scalars and random generators of numpy are unpickled:
`torch.load(weights_only=True)` reads the files, and a table lists the classes that DCP's `.metadata` may name. A
generator becomes the dict of its state.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import math
import os
import pathlib
import pickle
import re
import sys
import threading
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from . import _torch_pickle
from ._errors import TssdCorruptError, TssdError, new_exception
from ._tssd import save_file

__all__ = ["convert", "load_dcp", "load_torch"]

_Path = str | os.PathLike[str]

_ADVICE = (
    "load it in a script of your own, after torch.serialization.add_safe_globals([...]) for what you trust, "
    "and tssd.save_file what it gives"
)


def convert(old: _Path, new: _Path) -> None:
    """Writes the content of a file of torch.save, or of a directory of DCP, to a .tssd file.

    Raises:
        TssdError: as `load_torch`, `load_dcp` and `tssd.save_file`.
    """
    loaded = load_dcp(old) if os.path.isdir(old) else load_torch(old)
    save_file(loaded, new, fsync=False)


def load_torch(path: _Path) -> dict[Any, Any]:
    """Returns the state dict in a file of torch.save.

    If the file is a zip file, the tensors are copy-on-write views of it. Otherwise they are in memory.

    Raises:
        TssdFileNotFoundError: the file does not exist.
        TssdValueError: an object in the file is not a tensor, container or plain value, or the root is not a dict.
        TssdCorruptError: the file is damaged.
    """
    try:
        with open(path, "rb") as file:
            # torch can map only zip files.
            is_zip = file.read(4) == b"PK\x03\x04"
    except OSError as error:
        raise _os_error(error, path) from error
    loaded = _unpickle(os.fspath(path), path, is_mapped=is_zip)
    if not isinstance(loaded, dict):
        advice = "save it under a name: {'name': ...}"
        raise new_exception("refused", "", f"it holds a {type(loaded).__name__}, no dict", None, advice, str(path), None)
    return loaded


def load_dcp(path: _Path) -> dict[str, Any]:
    """Returns the state dict in a directory of torch.distributed.checkpoint.

    The tensors are whole, for any number of ranks that wrote them. They are in memory once.

    Raises:
        TssdFileNotFoundError: the directory has no `.metadata`, or a file is missing.
        TssdValueError: an object in the checkpoint is not a tensor, container or plain value.
        TssdCorruptError: the checkpoint is damaged.
        TssdMemoryError: the tensors do not fit into memory.
    """
    metadata = _read_metadata(path)
    try:
        flat = _allocate_targets(metadata, path)
        load(flat, storage_reader=_Reader(path, metadata), planner=_Planner(path), no_dist=True)
        return _unflatten(flat, metadata.planner_data or {})
    except CheckpointException as failed:
        error, _ = failed.failures[0]
        if isinstance(error, TssdError):
            raise error from None
        if isinstance(error, OSError):
            raise _os_error(error, path) from error
        raise _corrupt(path, error) from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise _corrupt(path, error) from error


def _allocate_targets(metadata: Metadata, path: _Path) -> dict[str, Any]:
    """Returns a zeroed tensor to fill for each stored tensor, and None for each entry that is unpickled."""
    targets: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        targets[name] = None
        if isinstance(entry, TensorStorageMetadata):
            element_count = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if element_count != entry.size.numel():
                raise _corrupt(path, f"its files have {element_count} elements of {entry.size.numel()}", name)
            try:
                targets[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise new_exception("LimitExceeded", "", reason, name, None, str(path), None) from error
    return targets


def _unflatten(flat: dict[str, Any], paths: dict[str, Any]) -> dict[str, Any]:
    """Restores the nesting that DCP flattened.

    If several ranks saved the checkpoint, only `paths` is in the order of the saved state dict.
    """
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    names = dict.fromkeys([*(name for name in paths if name in flat), *flat])
    ordered = {name: flat[name] for name in names}
    return unflatten_state_dict(ordered, {name: paths.get(name, (name,)) for name in names})


class _Reader(FileSystemReader):
    """A `FileSystemReader` with given metadata.

    The base class would unpickle any class that `.metadata` names.
    """

    def __init__(self, path: _Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """A `DefaultLoadPlanner` that unpickles byte items safely.

    The base class would unpickle any class that they name.
    """

    def __init__(self, path: _Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = _unpickle(value, self._path, name)


def _unpickle(
    source: str | IO[bytes], path: _Path, fqn: str | None = None, *, is_mapped: bool = False
) -> Any:
    """Returns the object that torch.save wrote, if it contains only tensors, containers and plain values."""
    try:
        return _torch_pickle.load(source, is_mapped=is_mapped)
    except OSError as error:
        raise _os_error(error, path) from error
    except _torch_pickle.UnsupportedObject as error:
        raise new_exception("refused", "", str(error), fqn, _ADVICE, str(path), None) from error
    except pickle.UnpicklingError as error:
        # torch's message is a page long, and its advice would execute code in the file.
        match = re.search(r"[Uu]nsupported (?:global: GLOBAL|GLOBAL|class) (\S+)", str(error))
        if match is None:
            reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
            message = f"it is no pickle that torch reads without running it: {reason}"
            raise new_exception("refused", "", message, fqn, _ADVICE, str(path), None) from error
        raise _disallowed(path, match[1], fqn) from error
    except Exception as error:
        if "TorchScript" in str(error):
            message, advice = "it is a TorchScript archive", "tssd.save_file torch.jit.load(...).state_dict()"
            raise new_exception("refused", "", message, fqn, advice, str(path), None) from error
        raise _corrupt(path, error, fqn) from error


# The classes that DCP's `.metadata` may name, each with its module. Versions of DCP name different modules.
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_OLD_METADATA_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED_CLASSES = {
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    (_OLD_METADATA_MODULE, "MEM_FORMAT_ENCODING"),
    (_OLD_METADATA_MODULE, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
# The metadata contains the path of the checkpoint. The module of its class depends on the version of Python.
_PATH_CLASSES = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}


class _DisallowedClass(Exception):
    """The `.metadata` names a class that is not allowed."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles `.metadata`. Rejects all classes but the allowed ones, without importing their modules."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _ALLOWED_CLASSES:
            return super().find_class(module, name)
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype) or found is torch.Size:
                return found
        if module in ("pathlib", "pathlib._local") and name in _PATH_CLASSES:
            return _PATH_CLASSES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise _DisallowedClass(f"{module}.{name}")


def _read_metadata(path: _Path) -> Metadata:
    file = os.path.join(path, ".metadata")
    try:
        with open(file, "rb") as opened:
            metadata = _MetadataUnpickler(opened).load()
    except OSError as error:
        raise _os_error(error, file) from error
    except _DisallowedClass as error:
        raise _disallowed(file, str(error)) from error
    except Exception as error:
        raise _corrupt(file, error) from error
    if not isinstance(metadata, Metadata):
        raise _corrupt(file, f"it holds a {type(metadata).__name__}, no Metadata of DCP")
    try:
        misplaced = [
            storage.relative_path
            for storage in metadata.storage_data.values()
            if os.path.basename(storage.relative_path) != storage.relative_path
        ]
    except (AttributeError, TypeError) as error:
        raise _corrupt(file, error) from error
    if misplaced:
        raise _corrupt(file, f"it names a file elsewhere, {misplaced[0]}")
    return metadata


def _disallowed(path: _Path, class_name: str, fqn: str | None = None) -> TssdError:
    message = f"{class_name} is no tensor, container or plain value, and is not unpickled"
    return new_exception("refused", "", message, fqn, _ADVICE, str(path), None)


def _corrupt(path: _Path, error: BaseException | str, fqn: str | None = None) -> TssdError:
    # Some messages of torch are a page long.
    text = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    message = text if isinstance(error, str) else f"{type(error).__name__}: {text}".removesuffix(": ")
    return new_exception("corrupt", "", message, fqn, "take another copy of it", str(path), None)


def _os_error(error: OSError, path: _Path) -> TssdError:
    return new_exception("Io", "", str(error), None, None, error.filename or str(path), error.errno)


@dataclasses.dataclass(frozen=True)
class _Reply:
    """The reply to the command if the conversion failed. After a success there is no reply."""

    message: str
    advice: str | None = None
    is_damage: bool = False

    @staticmethod
    def from_error(error: Exception) -> _Reply:
        if isinstance(error, TssdError):
            message, advice = str(error), error.advice
            return _Reply(message.removesuffix(f"; {advice}"), advice, isinstance(error, TssdCorruptError))
        return _Reply(f"{type(error).__name__}: {error}")


def main() -> None:
    """Runs a conversion for `tssd convert`, with the old and the new path as arguments.

    The process exits when its stdin is closed, which happens when the command exits.
    """
    threading.Thread(target=_exit_on_closed_stdin, daemon=True).start()
    old, new = sys.argv[1:]
    try:
        convert(old, new)
    except Exception as error:
        reply = dataclasses.asdict(_Reply.from_error(error))
        # A file name may not be valid Unicode.
        print(json.dumps(reply).encode(errors="replace").decode())


def _exit_on_closed_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
