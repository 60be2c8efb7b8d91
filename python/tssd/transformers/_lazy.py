"""State dicts whose tensors are read when they are indexed, for `from_pretrained(None, config=..., state_dict=...)`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as _Dict
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .._errors import TssdError, TssdKeyError, new_exception
from .._reports import VersionInfo
from .._tssd import OpenVersion, Store, safe_open
from ..mapping import Mapping
from ._slices import MappedSlice, mapped_pieces

# The folder of a checkpoint of `TssdTrainerMixin` in which the ranks save their shards: a store.
SHARDS = "shards"

_Source = str | os.PathLike[str] | safe_open | Store

# Names of dtypes in safetensors, which transformers compares.
_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class LazyTensor:
    """A tensor that is read when it is indexed. An index reads the smallest box that contains it, and no other bytes.

    It has the methods of a slice of safetensors, and those of a tensor that `from_pretrained` calls.
    """

    def __init__(self, state_dict: LazyStateDict, name: str, content: Any, dtype: torch.dtype) -> None:
        self._state_dict = state_dict
        self._content = content
        self.name = name
        self.shape = torch.Size(content.get_shape())
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """The device of the tensors that are read."""
        return torch.device("cpu")

    def get_shape(self) -> list[int]:
        """Returns the shape."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Returns the name of the dtype in safetensors, such as "BF16"."""
        return _DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))

    def is_floating_point(self) -> bool:
        """Returns whether the dtype is one of floating point numbers."""
        return self.dtype.is_floating_point

    def numel(self) -> int:
        """Returns the number of elements."""
        return self.shape.numel()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Reads a part of the tensor. `tensor[...]` reads all of it.

        Raises:
            TssdValueError: the state dict is closed.
        """
        self._state_dict._check_open(self.name)
        part: torch.Tensor = self._content[index]
        return part

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, shape={list(self.shape)}, dtype={self.dtype})"


class LazyStateDict(_Dict[str, LazyTensor]):
    """Names and lazy tensors of an archive, of safetensors files or of a version: see `lazy_state_dict`."""

    def __init__(self, contents: dict[str, Any], description: str, resources: ExitStack) -> None:
        self._description = description
        self._resources: ExitStack | None = resources
        self._tensors = {
            name: LazyTensor(self, name, content, _dtype_of(name, content)) for name, content in contents.items()
        }

    def __getitem__(self, name: str) -> LazyTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise new_exception("NotFound", "", f"{self._description} has no tensor `{name}`", None, "", None, None)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Releases the version or the files. Tensors that were read stay valid."""
        if self._resources is not None:
            self._resources.close()
        self._resources = None

    def __enter__(self) -> LazyStateDict:
        return self

    def __exit__(self, *_error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._resources is not None else ", closed"
        return f"LazyStateDict({self._description}, {len(self)} tensors{state})"

    def _check_open(self, name: str) -> None:
        if self._resources is None:
            text = f"cannot read `{name}`: the state dict of {self._description} is closed"
            raise _invalid(text, "load the model inside the `with` block")


def lazy_state_dict(
    source: _Source,
    key: str | None = None,
    version: int | str | VersionInfo | OpenVersion | None = None,
    mapping: Mapping | None = None,
    *,
    names: str | Sequence[str] | None = None,
    timeout: float | None = None,
) -> LazyStateDict:
    """Returns a mapping of names to tensors that are read when they are indexed.

    `from_pretrained` indexes each tensor once, in threads. With `distributed_config`, each rank indexes its shard, so
    that the store transfers only this shard. The tensors are views of shared memory or of the file, if possible:
    a write to one copies the page.

    Args:
        source: the path of an archive, of a safetensors file, or of a folder with one of them, such as a checkpoint of
            `TssdTrainerMixin`. With `key`, a store or its address. Also an open archive.
        key: the key of the weights in a store.
        version: the version, as for `Store.open`. None: the newest one.
        mapping: the stored tensors that the tensors of this mapping consist of, as for `Store.get_state_dict`. Stored
            tensors that no rule takes keep their names.
        names: patterns of the stored names to select, as for `Store.open`. Only for stores.
        timeout: how many seconds to wait for the store.

    Returns:
        A mapping, which is a context manager. Until it is closed, it leases the version.

    Raises:
        TssdKeyError: the key, the version, or a tensor of a rule does not exist.
        TssdValueError: the arguments do not fit together, or the tensors do not fit a rule.
        TssdOSError: the file cannot be opened.
    """
    with ExitStack() as resources:
        if key is not None:
            if isinstance(source, safe_open):
                raise _invalid(f"`key` has no meaning for {source!r}", "give a store, or its address")
        elif isinstance(source, Store):
            raise _invalid(f"{source!r} has keys, and none is given", "give key=")
        elif (version, names, timeout) != (None, None, None):
            text = f"`version`, `names` and `timeout` have no meaning for {source!r}"
            raise _invalid(text, "give the key= of a store")
        elif not isinstance(source, safe_open) and (Path(source) / SHARDS).is_dir():
            source, key = Path(source) / SHARDS, "model"
        if key is None:
            assert not isinstance(source, Store)
            contents, description = _open_files(source, resources)
        else:
            assert not isinstance(source, safe_open)
            store = source if isinstance(source, Store) else resources.enter_context(Store(os.fspath(source)))
            opened = resources.enter_context(store.open(key, version=version, names=names, timeout=timeout))
            contents = {name: opened.get_slice(name) for name in opened.keys()}
            description = f"version {opened.version} of key `{key}`"
        if mapping is not None:
            contents = _apply(mapping, contents, description)
        return LazyStateDict(contents, description, resources.pop_all())


def _open_files(source: str | os.PathLike[str] | safe_open, resources: ExitStack) -> tuple[dict[str, Any], str]:
    """Returns the slices of the tensors of files, and the name of the files for errors."""
    if isinstance(source, safe_open):
        return {name: source.get_slice(name) for name in source.keys()}, repr(source)
    path = Path(source)
    contents: dict[str, Any] = {}
    for file in _files_of_folder(path) if path.is_dir() else [path]:
        handle = resources.enter_context(_open_file(file))
        contents.update((name, handle.get_slice(name)) for name in handle.keys())
    return contents, f"`{path}`"


def _files_of_folder(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    for name in ("model.tssd", "model.safetensors"):
        if (folder / name).exists():
            return [folder / name]
    advice = "give the path of an archive, or the key= of a store"
    text = f"`{folder}` has no model.tssd, model.safetensors or {index.name}"
    raise new_exception("NotFound", "", text, None, advice, None, None)


def _open_file(path: Path) -> Any:
    if path.suffix != ".safetensors":
        return safe_open(path, "pt")
    import safetensors

    try:
        return safetensors.safe_open(path, "pt")
    except safetensors.SafetensorError as error:
        raise new_exception("NotSafetensors", "F-000", str(error), None, None, str(path), None) from error


def _dtype_of(name: str, content: Any) -> torch.dtype:
    dtype = getattr(content, "dtype", None)
    if dtype is None:
        dtype = _DTYPES.get(content.get_dtype())
    if not isinstance(dtype, torch.dtype):
        text = f"`{name}` is no tensor of torch: its dtype is {content.get_dtype()}"
        raise new_exception("WrongType", "", text, None, "read it with tssd.load_file", None, None)
    return dtype


def _apply(mapping: Mapping, contents: dict[str, Any], description: str) -> dict[str, Any]:
    """Returns the tensors under the names of a mapping."""
    shapes = {name: tuple(content.get_shape()) for name, content in contents.items()}
    mapped, problems = mapped_pieces(mapping, shapes)
    if problems:
        name, kind, text = problems[0]
        raise new_exception(kind, "", f"{description}: {text}", name, "correct the mapping", None, None)
    taken = {piece.stored for _, pieces in mapped.values() for piece in pieces}
    result = {name: content for name, content in contents.items() if name not in taken}
    for name, (shape, pieces) in mapped.items():
        dtypes = {_dtype_of(piece.stored, contents[piece.stored]) for piece in pieces}
        if len(dtypes) != 1:
            text = f"{description}: the parts of `{name}` have the dtypes {sorted(map(str, dtypes))}"
            raise new_exception("WrongType", "", text, name, "correct the mapping", None, None)
        result[name] = MappedSlice(shape, dtypes.pop(), pieces, contents)
    return result


def _invalid(text: str, advice: str) -> TssdError:
    return new_exception("invalid", "", text, None, advice, None, None)
