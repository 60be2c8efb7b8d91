"""A client of torchstore on a store.

What is put under a key is a version with one leaf, whose name is empty. A state dict is a version with its leaves,
each of which can be got as `KEY/NAME`. Beside it there is a version of `KEY/MAPPING` without leaves, by which state
dicts are known, and one of each `KEY/NAME` that was deleted: versions do not change, so that is said beside them.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .._errors import TssdError, TssdKeyError
from .._reports import PutReport
from .._tssd import OpenVersion, Store, TensorShard, TensorSlice, _interrupted
from ..aio import _run
from ._transport import is_whole, prove_target

DELIM = "/"
MAPPING = "MAPPING"

# The key that says how the store is used, which is no program's.
SETTINGS = ".torchstore"

# What the metadata of a version says that has no leaves: of which version of KEY this entry is deleted; or that
# KEY is a state dict.
_DELETED, _MARK = "torchstore.deleted", "torchstore.state_dict"

logger = logging.getLogger(__name__)


class LocalClient:
    """A store by name, in this process.

    Args:
        store: the store.
        allow_pickle: whether objects that are no typed leaves are stored as pickles, and read.
    """

    def __init__(self, store: Store, allow_pickle: bool = False) -> None:
        self._store = store
        self._allow_pickle = allow_pickle
        self._published: dict[str, tuple[dict[str, Any], torch.dtype | None]] = {}
        # The names in the version of a state dict that was looked at last.
        self._entries: dict[str, tuple[int, list[str]]] = {}

    async def put(self, key: str, value: Any) -> None:
        """Stores a tensor or an object."""
        await self.put_batch({key: value})

    async def put_batch(self, entries: dict[str, Any]) -> None:
        """Stores several, each as a version of its key."""
        assert isinstance(entries, dict) and entries, "put_batch requires a non-empty dict"

        def put() -> None:
            for key, value in entries.items():
                _interrupted()
                self._put({"": value}, key, None)

        await _run(put)

    async def get(
        self,
        key: str,
        inplace_tensor: torch.Tensor | None = None,
        tensor_slice_spec: TensorSlice | None = None,
    ) -> Any:
        """Gets a value, or a part of a tensor; into a tensor if one is given, which is returned."""
        prove_target(inplace_tensor, tensor_slice_spec)
        target: Any = inplace_tensor
        if inplace_tensor is not None and tensor_slice_spec is not None:
            target = TensorShard(inplace_tensor, tensor_slice_spec)
        results = await _run(lambda: self._get({key: (target, tensor_slice_spec)}))
        return results[key] if inplace_tensor is None else inplace_tensor

    async def get_batch(self, keys: list[str] | dict[str, torch.Tensor | None]) -> dict[str, Any]:
        """Gets several values, of state dicts those of one version; none if one of them is missing."""
        if not keys:
            raise ValueError("get_batch requires a non-empty dict or list")
        if not isinstance(keys, (dict, list)):
            raise TypeError(f"get_batch expects list[str] or dict, got {type(keys)}")
        targets = keys if isinstance(keys, dict) else dict.fromkeys(keys)
        if len(targets) != len(keys):
            raise ValueError("get_batch keys must be unique")
        for target in targets.values():
            prove_target(target, None)
        return await _run(lambda: self._get({key: (target, None) for key, target in targets.items()}))

    async def keys(self, prefix: str | None = None) -> list[str]:
        """The keys; with a prefix, those that begin with its segments, which end at dots."""
        keys = await _run(lambda: self._keys(prefix))
        return [key for key in keys if prefix is None or f"{key}.".startswith(f"{prefix}.")]

    async def delete(self, key: str) -> None:
        """Deletes what a key means: a value, an entry of a state dict, or a whole one.

        Raises:
            KeyError: there is none.
        """

        def delete() -> None:
            with self._names() as names:
                if not names.is_state_dict(key):
                    names.find(key)
            self._delete([key])

        await _run(delete)

    async def delete_batch(self, keys: list[str]) -> None:
        """Deletes several; those that are not there are no error."""
        if not isinstance(keys, list):
            raise TypeError(f"delete_batch expects list[str], got {type(keys)}")
        await _run(lambda: self._delete(keys))

    async def exists(self, key: str) -> bool:
        """Whether there is a value, all of it."""

        def exists() -> bool:
            with self._names() as names, contextlib.suppress(KeyError):
                names.find(key)
                return True
            return False

        return await _run(exists)

    async def put_state_dict(
        self,
        state_dict: dict[str, Any] | None,
        key: str,
        direct_rdma: bool = False,
        transfer_dtype: torch.dtype | None = None,
    ) -> None:
        """Stores a state dict as one version.

        With `direct_rdma`, None stands for the tensors that were given before, as they are now.
        """
        if direct_rdma:
            if state_dict is not None:
                self._published[key] = state_dict, transfer_dtype
            published = self._published.get(key)
            assert published is not None, "the first put_state_dict of a key requires a state_dict"
            state_dict, transfer_dtype = published
        if not isinstance(state_dict, dict):
            raise TypeError(f"a state dict is a dict, not {type(state_dict)}")
        await _run(lambda: self._put_state_dict(state_dict, key, transfer_dtype))

    async def get_state_dict(
        self,
        key: str,
        user_state_dict: dict[str, Any] | None = None,
        strict: bool = True,
        direct_rdma: bool = False,
    ) -> dict[str, Any]:
        """Gets a state dict, into the tensors of another one if it is given."""
        assert not direct_rdma or user_state_dict is not None, "direct_rdma requires a user_state_dict"
        started = time.perf_counter()
        try:
            result = await _run(lambda: self._get_state_dict(key, user_state_dict, strict, direct_rdma))
        except TssdKeyError as error:
            if direct_rdma:
                raise
            raise RuntimeError(f"no state dict is stored under {key!r}: {error}") from error
        logger.info("get_state_dict[%s] took %.4fs", key, time.perf_counter() - started)
        return result

    # What waits, on threads.

    def _names(self, many: bool = False) -> _Names:
        return _Names(self._store, self._entries, many)

    def _put(
        self, state_dict: dict[str, Any], key: str, transfer_dtype: torch.dtype | None, **options: Any
    ) -> PutReport | None:
        """A version of all ranks of the meshes of what is sharded. None if it was replaced, or deleted, before it
        was there."""
        if key == SETTINGS:
            raise ValueError(f"{key!r} is the key of the store's own settings")
        ranks: set[int] = set()
        plain = _plain(state_dict, ranks)
        try:
            report: PutReport = self._store.put_state_dict(
                plain,
                key,
                writers=sorted(ranks) or None,
                divergent="lowest",
                transfer_dtype=transfer_dtype,
                allow_pickle=self._allow_pickle,
                **options,
            )
        except TssdError as error:
            # Of two at a time either may be the last.
            if error.kind != "overtaken":
                raise
            return None
        return report

    def _put_state_dict(
        self, state_dict: dict[str, Any], key: str, transfer_dtype: torch.dtype | None
    ) -> None:
        names, _ = flatten_state_dict(state_dict)
        started = time.perf_counter()
        report = self._put(state_dict, key, transfer_dtype)
        seconds = time.perf_counter() - started
        size = report.bytes if report else 0
        logger.info("put_state_dict[%s] took %.4fs (%.2f GB/s)", key, seconds, size / 1e9 / seconds)
        beside = self._store.keys(f"{key}{DELIM}")
        if (mark := f"{key}{DELIM}{MAPPING}") not in beside:
            self._put({}, mark, None, metadata={_MARK: True})
        # An entry that was put, or deleted, by itself is what the state dict says now.
        entries = {f"{key}{DELIM}{name}" for name in names}
        self._store.delete_batch([own for own in beside if own in entries and own != mark])

    def _get(self, wanted: dict[str, tuple[Any, TensorSlice | None]]) -> dict[str, Any]:
        with self._names(many=len(wanted) > 1) as names:
            found = {key: names.find(key) for key in wanted}
            # Of each version in one go.
            targets: dict[str, dict[str, Any]] = {}
            whole: dict[str, list[str]] = {}
            for key, (version, name) in found.items():
                target, tensor_slice = wanted[key]
                if target is not None or tensor_slice is not None:
                    _prove_fits(key, version, name, target, tensor_slice)
                if target is not None:
                    targets.setdefault(version.key, {})[name] = target
                elif tensor_slice is None:
                    whole.setdefault(version.key, []).append(name)
            for key, into in targets.items():
                self._fill(names.open(key), into)
            leaves = {key: self._leaves(names.open(key), wholes) for key, wholes in whole.items()}
            results = {}
            for key, (version, name) in found.items():
                target, tensor_slice = wanted[key]
                if tensor_slice is not None and target is None:
                    results[key] = version.get_tensor(name, tensor_slice)
                else:
                    results[key] = leaves[version.key][name] if target is None else target
            return results

    def _fill(self, version: OpenVersion, into: dict[str, Any]) -> None:
        others = sorted(into.keys() - set(version.keys()))
        if others:
            raise TypeError(f"`{others[0]}` of key `{version.key}` is no tensor, so none can be filled with it")
        self._store.get_state_dict(version.key, into, version=version, strict=False, cast=True)

    def _leaves(self, version: OpenVersion, names: list[str]) -> dict[str, Any]:
        """Leaves by the names that torch gives them: a tuple is one, and so is a list without tensors."""
        if names == [""]:
            return self._state_dict(version)
        if len(names) == 1 and names[0] in version.keys():
            return {names[0]: version.get_tensor(names[0])}
        outline, mapping = flatten_state_dict(version.to_meta())
        outline.setdefault(MAPPING, mapping)
        lacking = [name for name in names if any(map(_is_outline, tree_leaves(outline[name])))]
        options = {"names": [glob.escape(name) for name in lacking]}
        flat, _ = flatten_state_dict(self._state_dict(version, **options)) if lacking else ({}, None)
        return {name: flat[name] if name in flat else outline[name] for name in names}

    def _state_dict(self, version: OpenVersion, **options: Any) -> dict[str, Any]:
        got: dict[str, Any] = self._store.get_state_dict(
            version.key, version=version, allow_pickle=self._allow_pickle, **options
        )
        return got

    def _get_state_dict(
        self, key: str, user_state_dict: dict[str, Any] | None, strict: bool, direct: bool
    ) -> dict[str, Any]:
        with self._names() as names:
            version = names.state_dict(key)
            deleted = sorted(names.deleted(key))
            if MAPPING in deleted:
                raise TssdKeyError(f"`{MAPPING}` of key `{key}` is deleted")
            if deleted:
                raise KeyError(f"{deleted} of key `{key}` are deleted")
            if user_state_dict is None:
                return self._state_dict(version)
            stored, mapping = flatten_state_dict(version.to_meta())
            own, own_mapping = flatten_state_dict(user_state_dict)
            if strict and not direct:
                differences = {name for name, _ in mapping.items() ^ own_mapping.items()}
                assert not differences, f"{sorted(differences)} differ between key `{key}` and user_state_dict"
            missing = sorted(own.keys() - stored.keys())
            if strict and missing:
                raise TssdKeyError(f"key `{key}` has no {missing}")
            into = {name: own[name] for name in stored if isinstance(own.get(name), torch.Tensor)}
            self._fill(version, into)
            if direct:
                return user_state_dict
            rest = self._leaves(version, [name for name in stored if name not in into])
            values = {name: into[name] if name in into else rest[name] for name in stored}
            result: dict[str, Any] = unflatten_state_dict(values, mapping)
            return result

    def _keys(self, prefix: str | None) -> list[str]:
        keys: list[str] = []
        with self._names(many=True) as names:
            for key in names.known:
                # What is deleted meanwhile is gone.
                with contextlib.suppress(KeyError):
                    keys += names.of(key, prefix)
        return list(dict.fromkeys(keys))

    def _delete(self, keys: Iterable[str]) -> None:
        touched: dict[str, int] = {}
        with self._names() as names:
            for key in keys:
                _interrupted()
                if names.is_state_dict(key):
                    self._delete_state_dict(key, None)
                    continue
                try:
                    version, name = names.entry(key)
                except KeyError:
                    # What is not all there goes, too.
                    self._store.delete(key)
                else:
                    self._put({}, key, None, metadata={_DELETED: int(version)})
                    touched[version.key] = int(version)
        with self._names() as names:
            for key, number in touched.items():
                with contextlib.suppress(KeyError):
                    left = set(names.entries(key)) - names.deleted(key)
                    if int(names.open(key)) == number and left <= {MAPPING}:
                        self._delete_state_dict(key, number, left)

    def _delete_state_dict(self, key: str, number: int | None, left: Iterable[str] = ()) -> None:
        """Deletes a version, or all of a key, with what is said beside it."""
        with self._names() as names, contextlib.suppress(KeyError):
            entries = [name for name in names.entries(key) if name not in left]
            beside = {f"{key}{DELIM}{name}" for name in entries} & set(self._store.keys(f"{key}{DELIM}"))
            self._store.delete(key, number)
            for own in beside:
                with contextlib.suppress(KeyError):
                    self._store.delete(own, int(names.open(own)))


class _Names:
    """What keys mean, in versions that are each opened once.

    Args:
        entries: the names in versions of state dicts, which are remembered.
        many: whether many keys are looked for, most of which may be entries of state dicts.
    """

    def __init__(self, store: Store, entries: dict[str, tuple[int, list[str]]], many: bool = False) -> None:
        self.known: Sequence[str] = store.keys() if many else ()
        self._are_known = set(self.known)
        self._many = many
        self._store = store
        self._entries = entries
        self._opened: dict[str, OpenVersion] = {}
        self._deleted: dict[str, set[str]] = {}

    def __enter__(self) -> _Names:
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for version in self._opened.values():
            version.close()

    def open(self, key: str) -> OpenVersion:
        """The newest version of a key."""
        if key not in self._opened:
            self._opened[key] = self._store.open(key)
        return self._opened[key]

    def find(self, name: str) -> tuple[OpenVersion, str]:
        """The version and the leaf that a key means: a value, or an entry of a state dict.

        Raises:
            TssdKeyError: it means nothing, for this reason.
        """
        try:
            return self._value(name)
        except TssdKeyError as error:
            if not any(_splits(name)):
                raise
            try:
                return self.entry(name)
            except TssdKeyError as other:
                raise TssdKeyError("; ".join(dict.fromkeys((str(error), str(other))))) from None

    def _value(self, name: str) -> tuple[OpenVersion, str]:
        if self._many and name not in self._are_known and any(_splits(name)):
            raise TssdKeyError(f"key `{name}`: no version is visible")
        version = self.open(name)
        if _is_value(version):
            return version, ""
        if _MARK in _said(version) and not self.is_state_dict(name.removesuffix(f"{DELIM}{MAPPING}")):
            # All else of the state dict is deleted.
            return version, MAPPING
        raise TssdKeyError(f"key `{name}` is no value")

    def entry(self, name: str) -> tuple[OpenVersion, str]:
        """The state dict and its entry that a key means.

        Raises:
            TssdKeyError: it means none.
        """
        errors = []
        for key, entry in _splits(name):
            try:
                version = self.state_dict(key)
                if entry in self.entries(key) and entry not in self._deleted_of(key, [entry]):
                    return version, entry
                errors.append(f"key `{key}` has no `{entry}`")
            except TssdKeyError as error:
                errors.append(str(error))
        raise TssdKeyError("; ".join(errors))

    def state_dict(self, key: str) -> OpenVersion:
        """The newest version of a key, if it is a state dict."""
        version = self.open(key)
        if _is_value(version) or _said(version).keys() & {_MARK, _DELETED}:
            raise TssdKeyError(f"key `{key}` is no state dict")
        return version

    def is_state_dict(self, key: str) -> bool:
        """Whether the newest version of a key is a state dict."""
        with contextlib.suppress(TssdKeyError):
            self.state_dict(key)
            return True
        return False

    def entries(self, key: str) -> list[str]:
        """The names of the leaves of a state dict, and MAPPING."""
        version = self.open(key)
        number, names = self._entries.get(key, (-1, []))
        if number != int(version):
            flat, _ = flatten_state_dict(version.to_meta())
            names = list(dict.fromkeys((*flat, MAPPING)))
            self._entries[key] = int(version), names
        return names

    def deleted(self, key: str) -> set[str]:
        """The names of the leaves of a state dict that are deleted."""
        if key not in self._deleted:
            start = f"{key}{DELIM}"
            beside = self.known if self._many else self._store.keys(start)
            names = {own.removeprefix(start) for own in beside if own.startswith(start)}
            if names - {MAPPING}:
                # There may be any number of others.
                names &= set(self.entries(key))
            self._deleted[key] = self._deleted_of(key, names)
        return self._deleted[key]

    def _deleted_of(self, key: str, names: Iterable[str]) -> set[str]:
        deleted = set()
        for name in names:
            with contextlib.suppress(TssdKeyError):
                if _said(self.open(f"{key}{DELIM}{name}")).get(_DELETED) == int(self.open(key)):
                    deleted.add(name)
        return deleted

    def of(self, key: str, prefix: str | None) -> list[str]:
        """The keys that a key of the store stands for, of those that may have the prefix."""
        is_dict = f"{key}{DELIM}{MAPPING}" in self._are_known
        may = prefix is None or key.startswith(prefix) or is_dict and prefix.startswith(f"{key}{DELIM}")
        if key == SETTINGS or not may:
            return []
        if is_dict:
            return [f"{key}{DELIM}{name}" for name in self.entries(key) if name not in self.deleted(key)]
        # Only what is beside a state dict may be something else than a value.
        is_beside = any(f"{start}{DELIM}{MAPPING}" in self._are_known for start, _ in _splits(key))
        if not is_beside:
            return [key]
        with contextlib.suppress(TssdKeyError):
            self.find(key)
            return [key]
        return []


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """The state dict and the entry that a key may mean, the longest key first."""
    parts = name.split(DELIM)
    for end in range(len(parts) - 1, 0, -1):
        yield DELIM.join(parts[:end]), DELIM.join(parts[end:])


def _said(version: OpenVersion) -> dict[str, Any]:
    return version.metadata() or {}


def _is_value(version: OpenVersion) -> bool:
    names = version.keys()
    if names:
        return names[0] == "" or names[0].startswith(".") and list(version.to_meta()) == [""]
    return not _said(version).keys() & {_MARK, _DELETED} and list(version.to_meta()) == [""]


def _is_outline(leaf: object) -> bool:
    """Whether it stands for a tensor, or may stand for a pickle."""
    return isinstance(leaf, (torch.Tensor, bytes))


def _prove_fits(
    key: str, version: OpenVersion, name: str, target: Any, tensor_slice: TensorSlice | None
) -> None:
    if name not in version.keys():
        raise TypeError(f"key `{key}` is no tensor, so none can be filled with it, and it has no slices")
    shape = tuple(version.get_slice(name).get_shape())
    if tensor_slice is not None and tensor_slice.global_shape != shape:
        raise RuntimeError(f"key `{key}` has shape {shape}, not {tensor_slice.global_shape} as the slice says")
    if tensor_slice is None and tuple(target.shape) != shape:
        raise ValueError(f"key `{key}` has shape {shape}, the tensor {tuple(target.shape)}")


def _plain(value: Any, ranks: set[int]) -> Any:
    """The same without what torchstore does not keep, and the ranks of the meshes of what is sharded.

    A DTensor that is whole on each rank is a plain tensor: some programs have another one on each, or put it on one
    rank alone.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor) and is_whole(value):
            value = value.to_local()
        elif isinstance(value, DTensor):
            ranks.update(value.device_mesh.mesh.flatten().tolist())
        return value.detach() if value.requires_grad or isinstance(value, torch.nn.Parameter) else value
    if isinstance(value, dict):
        # Of whatever class it is, and with the attributes that it has.
        same = copy.copy(value)
        same.update((key, _plain(each, ranks)) for key, each in value.items())
        return same
    if type(value) in (list, tuple):
        return type(value)(_plain(each, ranks) for each in value)
    return value
