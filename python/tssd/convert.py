"""What torch pickles, read without running what it says: `tssd convert` calls this module.

    state_dict = load_torch("checkpoint.pt")  # a file of torch.save
    state_dict = load_dcp("checkpoint/")  # a directory of torch.distributed.checkpoint

Nothing but tensors, containers and plain values is unpickled: `torch.load(weights_only=True)` reads the
files, and a table says what DCP's `.metadata` may name.
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

from ._errors import TssdCorruptError, TssdError, make
from ._tssd import save_file

__all__ = ["convert", "load_dcp", "load_torch"]

_Path = str | os.PathLike[str]

_ADVICE = (
    "load it in a script of your own, after torch.serialization.add_safe_globals([...]) for what you trust, "
    "and tssd.save_file what it gives"
)


def convert(old: _Path, new: _Path) -> None:
    """Writes a .tssd file with what a file of torch.save or a directory of DCP holds.

    Raises:
        TssdError: as `load_torch`, `load_dcp` and `tssd.save_file`.
    """
    loaded = load_dcp(old) if os.path.isdir(old) else load_torch(old)
    save_file(loaded, new, fsync=False)


def load_torch(path: _Path) -> dict[Any, Any]:
    """The state dict in a file of torch.save. Tensors are private views of the file, if it is a zip file, else
    in memory.

    Raises:
        TssdFileNotFoundError: there is no such file.
        TssdValueError: it holds what is no tensor, container or plain value, or is no dict.
        TssdCorruptError: it is damaged.
    """
    try:
        with open(path, "rb") as file:
            # Only these can be mapped.
            is_zip = file.read(4) == b"PK\x03\x04"
    except OSError as error:
        raise _os_error(error, path) from error
    loaded = _unpickled(os.fspath(path), path, is_mapped=is_zip)
    if not isinstance(loaded, dict):
        advice = "save it under a name: {'name': ...}"
        raise make("refused", "", f"it holds a {type(loaded).__name__}, no dict", None, advice, str(path), None)
    return loaded


def load_dcp(path: _Path) -> dict[str, Any]:
    """The state dict in a directory of torch.distributed.checkpoint, whole, however many ranks wrote it. It is
    in memory once.

    Raises:
        TssdFileNotFoundError: there is no `.metadata` in the directory, or a file is missing.
        TssdValueError: it holds what is no tensor, container or plain value.
        TssdCorruptError: it is damaged.
        TssdMemoryError: its tensors do not fit into memory.
    """
    metadata = _metadata(path)
    try:
        flat = _rooms(metadata, path)
        load(flat, storage_reader=_Reader(path, metadata), planner=_Planner(path), no_dist=True)
        return _nested(flat, metadata.planner_data or {})
    except CheckpointException as failed:
        error, _ = failed.failures[0]
        if isinstance(error, TssdError):
            raise error from None
        if isinstance(error, OSError):
            raise _os_error(error, path) from error
        raise _damaged(path, error) from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _rooms(metadata: Metadata, path: _Path) -> dict[str, Any]:
    """A tensor to be filled for each one; None for what is unpickled."""
    rooms: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        rooms[name] = None
        if isinstance(entry, TensorStorageMetadata):
            stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if stored != entry.size.numel():
                raise _damaged(path, f"its files have {stored} elements of {entry.size.numel()}", name)
            try:
                rooms[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
            except RuntimeError as error:
                said = str(error).partition("\n")[0]
                raise make("LimitExceeded", "", said, name, None, str(path), None) from error
    return rooms


def _nested(flat: dict[str, Any], paths: dict[str, Any]) -> dict[str, Any]:
    """What DCP has flattened, as it was. Only `paths` are in the order in which it was saved, if ranks did."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    names = dict.fromkeys([*(name for name in paths if name in flat), *flat])
    ordered = {name: flat[name] for name in names}
    return unflatten_state_dict(ordered, {name: paths.get(name, (name,)) for name in names})


class _Reader(FileSystemReader):
    """DCP's own, which would unpickle whatever `.metadata` says."""

    def __init__(self, path: _Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """DCP's own, which would unpickle whatever byte items say."""

    def __init__(self, path: _Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = _unpickled(value, self._path, name)


def _unpickled(
    source: str | IO[bytes], path: _Path, fqn: str | None = None, *, is_mapped: bool = False
) -> Any:
    """What torch.save has written, if it is tensors, containers and plain values."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
    except OSError as error:
        raise _os_error(error, path) from error
    except pickle.UnpicklingError as error:
        # What torch says is a page, with advice that would run the file.
        found = re.search(r"[Uu]nsupported (?:global: GLOBAL|GLOBAL|class) (\S+)", str(error))
        if found is None:
            said = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
            message = f"it is no pickle that torch reads without running it: {said}"
            raise make("refused", "", message, fqn, _ADVICE, str(path), None) from error
        raise _refused(path, found[1], fqn) from error
    except Exception as error:
        if "TorchScript" in str(error):
            message, advice = "it is a TorchScript archive", "tssd.save_file torch.jit.load(...).state_dict()"
            raise make("refused", "", message, fqn, advice, str(path), None) from error
        raise _damaged(path, error, fqn) from error


# What DCP's `.metadata` is made of, by the module that its versions name.
_DCP = "torch.distributed.checkpoint.metadata"
_OLD_DCP = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = {
    (_DCP, "BytesStorageMetadata"),
    (_DCP, "ChunkStorageMetadata"),
    (_DCP, "Metadata"),
    (_DCP, "MetadataIndex"),
    (_DCP, "StorageMeta"),
    (_DCP, "TensorProperties"),
    (_DCP, "TensorStorageMetadata"),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    (_OLD_DCP, "MEM_FORMAT_ENCODING"),
    (_OLD_DCP, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
# Where a checkpoint was is in it as a path, whose module depends on the version of Python.
_PATHS = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}


class _Foreign(Exception):
    """What `.metadata` must not name."""


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what `.metadata` may have, and refuses to look for anything else."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype) or found is torch.Size:
                return found
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _PATHS[name]
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise _Foreign(f"{module}.{name}")


def _metadata(path: _Path) -> Metadata:
    file = os.path.join(path, ".metadata")
    try:
        with open(file, "rb") as opened:
            metadata = _MetadataUnpickler(opened).load()
    except OSError as error:
        raise _os_error(error, file) from error
    except _Foreign as error:
        raise _refused(file, str(error)) from error
    except Exception as error:
        raise _damaged(file, error) from error
    if not isinstance(metadata, Metadata):
        raise _damaged(file, f"it holds a {type(metadata).__name__}, no Metadata of DCP")
    try:
        outside = [
            each.relative_path
            for each in metadata.storage_data.values()
            if os.path.basename(each.relative_path) != each.relative_path
        ]
    except (AttributeError, TypeError) as error:
        raise _damaged(file, error) from error
    if outside:
        raise _damaged(file, f"it names a file elsewhere, {outside[0]}")
    return metadata


def _refused(path: _Path, what: str, fqn: str | None = None) -> TssdError:
    message = f"{what} is no tensor, container or plain value, and is not unpickled"
    return make("refused", "", message, fqn, _ADVICE, str(path), None)


def _damaged(path: _Path, error: BaseException | str, fqn: str | None = None) -> TssdError:
    # Some of torch's messages are pages.
    said = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    message = said if isinstance(error, str) else f"{type(error).__name__}: {said}".removesuffix(": ")
    return make("corrupt", "", message, fqn, "take another copy of it", str(path), None)


def _os_error(error: OSError, path: _Path) -> TssdError:
    return make("Io", "", str(error), None, None, error.filename or str(path), error.errno)


@dataclasses.dataclass(frozen=True)
class _Reply:
    """What the command is told: nothing if all went well."""

    message: str
    advice: str | None = None
    is_damage: bool = False

    @staticmethod
    def of(error: Exception) -> _Reply:
        if isinstance(error, TssdError):
            message, advice = str(error), error.advice
            return _Reply(message.removesuffix(f"; {advice}"), advice, isinstance(error, TssdCorruptError))
        return _Reply(f"{type(error).__name__}: {error}")


def main() -> None:
    """What `tssd convert` runs, with the old and the new path as arguments. It ends with whoever started it."""
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    old, new = sys.argv[1:]
    try:
        convert(old, new)
    except Exception as error:
        reply = dataclasses.asdict(_Reply.of(error))
        # Names of files may be no Unicode.
        print(json.dumps(reply).encode(errors="replace").decode())


def _end_with_the_command() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
