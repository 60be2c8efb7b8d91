"""The client of torchstore, on a `Store`.

A value is stored as a version of its key with one leaf, whose name is empty. A state dict is stored as a version with
all its leaves. Each leaf is an entry, with the key `KEY/NAME`.

Two kinds of keys have versions without leaves, whose metadata describes a state dict. `KEY/MAPPING` marks `KEY` as a
state dict. `KEY/NAME` marks an entry as deleted, because a version cannot be changed.
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

from .._errors import TssdError, TssdKeyError, new_exception
from .._options import PutOptions
from .._reports import PutReport
from .._tssd import OpenVersion, Store, TensorShard, TensorSlice, _check_cancelled
from ..aio import _run_in_thread
from ._transport import is_whole, check_target

DELIM = "/"
MAPPING = "MAPPING"

# The key of the settings of the store. Programs cannot use it.
SETTINGS_KEY = ".torchstore"

# Metadata of versions without leaves. The first: the number of the version of KEY from which this entry is deleted. The
# second: KEY is a state dict.
_DELETED_FROM, _STATE_DICT_MARK = "torchstore.deleted", "torchstore.state_dict"

# torchstore accepts leaves whose values differ between ranks. The value of the lowest rank is stored.
_PUT_OPTIONS = PutOptions(on_divergence="lowest")

# The words in which an error of a store says that ranks have not put their parts. Programs that were written for
# torchstore find them, and other words of its errors, in ours.
_PARTIALLY_COMMITTED = "partially committed"

logger = logging.getLogger(__name__)


class LocalClient:
    """The client of one store in this process.

    Args:
        store: the store.
        allow_pickle: whether objects that are not typed leaves are stored, and read, as pickles.
    """

    def __init__(self, store: Store, allow_pickle: bool = False) -> None:
        self._store = store
        self._allow_pickle = allow_pickle
        self._published: dict[str, tuple[dict[str, Any], torch.dtype | None]] = {}
        # The entries of each state dict, by key: the number of the last version that was read, and its names.
        self._entry_names: dict[str, tuple[int, list[str]]] = {}

    async def put(self, key: str, value: Any) -> None:
        """Stores a tensor or an object."""
        await self.put_batch({key: value})

    async def put_batch(self, entries: dict[str, Any]) -> None:
        """Stores several values, each as a version of its key."""
        assert isinstance(entries, dict) and entries, "put_batch requires a non-empty dict"

        def put() -> None:
            for key, value in entries.items():
                _check_cancelled()
                self._put({"": value}, key, None)

        await _run_in_thread(put)

    async def get(
        self,
        key: str,
        inplace_tensor: torch.Tensor | None = None,
        tensor_slice_spec: TensorSlice | None = None,
    ) -> Any:
        """Gets a value, or a slice of a tensor. If a tensor is given, fills and returns it."""
        check_target(inplace_tensor, tensor_slice_spec)
        target: Any = inplace_tensor
        if inplace_tensor is not None and tensor_slice_spec is not None:
            target = TensorShard(inplace_tensor, tensor_slice_spec)
        results = await _run_in_thread(lambda: self._get({key: (target, tensor_slice_spec)}))
        return results[key] if inplace_tensor is None else inplace_tensor

    async def get_batch(self, keys: list[str] | dict[str, torch.Tensor | None]) -> dict[str, Any]:
        """Gets several values. It is an error if any of them is missing.

        Entries of one state dict come from one version.
        """
        if not keys:
            raise ValueError("get_batch requires a non-empty dict or list")
        if not isinstance(keys, (dict, list)):
            raise TypeError(f"get_batch expects list[str] or dict, got {type(keys)}")
        targets = keys if isinstance(keys, dict) else dict.fromkeys(keys)
        if len(targets) != len(keys):
            raise ValueError("get_batch keys must be unique")
        for target in targets.values():
            check_target(target, None)
        return await _run_in_thread(lambda: self._get({key: (target, None) for key, target in targets.items()}))

    async def keys(self, prefix: str | None = None) -> list[str]:
        """Returns the keys. With a prefix: those that equal it, or begin with it and a dot."""
        keys = await _run_in_thread(lambda: self._keys(prefix))
        return [key for key in keys if prefix is None or f"{key}.".startswith(f"{prefix}.")]

    async def delete(self, key: str) -> None:
        """Deletes a value, an entry of a state dict, or a whole state dict.

        Raises:
            KeyError: the key does not exist.
        """

        def delete() -> None:
            with self._open_resolver() as resolver:
                if not resolver.is_state_dict(key):
                    resolver.resolve(key)
            self._delete([key])

        await _run_in_thread(delete)

    async def delete_batch(self, keys: list[str]) -> None:
        """Deletes several keys. Keys that do not exist are ignored."""
        if not isinstance(keys, list):
            raise TypeError(f"delete_batch expects list[str], got {type(keys)}")
        await _run_in_thread(lambda: self._delete(keys))

    async def exists(self, key: str) -> bool:
        """Returns whether a key exists, with all parts of its value."""

        def exists() -> bool:
            with self._open_resolver() as resolver, contextlib.suppress(KeyError):
                resolver.resolve(key)
                return True
            return False

        return await _run_in_thread(exists)

    async def put_state_dict(
        self,
        state_dict: dict[str, Any] | None,
        key: str,
        direct_rdma: bool = False,
        transfer_dtype: torch.dtype | None = None,
    ) -> None:
        """Stores a state dict as one version.

        With `direct_rdma`, None means the tensors of the previous call, with their current values.
        """
        if direct_rdma:
            if state_dict is not None:
                self._published[key] = state_dict, transfer_dtype
            published = self._published.get(key)
            assert published is not None, "state_dict is required on first put_state_dict call with direct_rdma=True"
            state_dict, transfer_dtype = published
        if not isinstance(state_dict, dict):
            raise TypeError(f"a state dict is a dict, not {type(state_dict)}")
        await _run_in_thread(lambda: self._put_state_dict(state_dict, key, transfer_dtype))

    async def get_state_dict(
        self,
        key: str,
        user_state_dict: dict[str, Any] | None = None,
        strict: bool = True,
        direct_rdma: bool = False,
    ) -> dict[str, Any]:
        """Gets a state dict. If another one is given, fills its tensors."""
        assert not direct_rdma or user_state_dict is not None, "user_state_dict is required for direct_rdma mode"
        started = time.perf_counter()
        try:
            result = await _run_in_thread(lambda: self._get_state_dict(key, user_state_dict, strict, direct_rdma))
        except TssdKeyError as error:
            if direct_rdma:
                raise
            text = f"Mapping is missing from the store: there is no matching 'push' call for this key: {key=}; {error}"
            raise RuntimeError(text) from error
        logger.info("get_state_dict[%s] took %.4fs", key, time.perf_counter() - started)
        return result

    # Blocking methods, which run on threads.

    def _open_resolver(self, many: bool = False) -> _KeyResolver:
        return _KeyResolver(self._store, self._entry_names, many)

    def _put(
        self,
        state_dict: dict[str, Any],
        key: str,
        transfer_dtype: torch.dtype | None,
        metadata: dict[str, Any] | None = None,
    ) -> PutReport | None:
        """Puts a version whose writers are the ranks of the meshes of all shards.

        Returns None if the version was replaced or deleted before it became visible.
        """
        if key == SETTINGS_KEY:
            raise ValueError(f"{key!r} is the key of the store's own settings")
        ranks: set[int] = set()
        plain = _normalize(state_dict, ranks)
        try:
            return self._store.put_state_dict(
                plain,
                key,
                writers=sorted(ranks) or None,
                metadata=metadata,
                transfer_dtype=transfer_dtype,
                allow_pickle=self._allow_pickle,
                options=_PUT_OPTIONS,
            )
        except TssdError as error:
            # Of two concurrent puts, either may be the last.
            if error.kind != "overtaken":
                raise
            return None

    def _put_state_dict(
        self, state_dict: dict[str, Any], key: str, transfer_dtype: torch.dtype | None
    ) -> None:
        names, _ = flatten_state_dict(state_dict)
        started = time.perf_counter()
        report = self._put(state_dict, key, transfer_dtype)
        seconds = time.perf_counter() - started
        size = report.bytes if report else 0
        logger.info("put_state_dict[%s] took %.4fs (%.2f GB/s)", key, seconds, size / 1e9 / seconds)
        siblings = self._store.keys(f"{key}{DELIM}")
        if (mark_key := f"{key}{DELIM}{MAPPING}") not in siblings:
            self._put({}, mark_key, None, metadata={_STATE_DICT_MARK: True})
        # The new version replaces entries that were put or deleted by themselves.
        entry_keys = {f"{key}{DELIM}{name}" for name in names}
        self._store.delete_batch([sibling for sibling in siblings if sibling in entry_keys and sibling != mark_key])

    def _get(self, requests: dict[str, tuple[Any, TensorSlice | None]]) -> dict[str, Any]:
        with self._open_resolver(many=len(requests) > 1) as resolver:
            resolved = {key: resolver.resolve(key) for key in requests}
            # All entries of a version are read in one get.
            targets: dict[str, dict[str, Any]] = {}
            names_to_read: dict[str, list[str]] = {}
            for key, (version, name) in resolved.items():
                target, tensor_slice = requests[key]
                if target is not None or tensor_slice is not None:
                    _check_stored_tensor(key, version, name, target, tensor_slice)
                if target is not None:
                    targets.setdefault(version.key, {})[name] = target
                elif tensor_slice is None:
                    names_to_read.setdefault(version.key, []).append(name)
            for key, into in targets.items():
                self._fill(resolver.open(key), into)
            leaves = {key: self._leaves(resolver.open(key), leaf_names) for key, leaf_names in names_to_read.items()}
            results = {}
            for key, (version, name) in resolved.items():
                target, tensor_slice = requests[key]
                if tensor_slice is not None and target is None:
                    results[key] = version.get_tensor(name, tensor_slice)
                else:
                    results[key] = leaves[version.key][name] if target is None else target
            return results

    def _fill(self, version: OpenVersion, into: dict[str, Any]) -> None:
        missing = sorted(into.keys() - set(version.keys()))
        if missing:
            raise TypeError(_not_a_tensor(f"`{missing[0]}` of key `{version.key}`"))
        self._store.get_state_dict(version.key, into, version=version, strict=False, cast=True)

    def _leaves(self, version: OpenVersion, names: list[str]) -> dict[str, Any]:
        """Returns leaves by their flattened names.

        As in torch, a tuple is one leaf, and so is a list without tensors.
        """
        if names == [""]:
            return self._state_dict(version)
        if len(names) == 1 and names[0] in version.keys():
            return {names[0]: version.get_tensor(names[0])}
        outline, mapping = flatten_state_dict(version.to_meta())
        outline.setdefault(MAPPING, mapping)
        to_read = [name for name in names if any(map(_is_placeholder, tree_leaves(outline[name])))]
        patterns = [glob.escape(name) for name in to_read]
        flat, _ = flatten_state_dict(self._state_dict(version, patterns)) if to_read else ({}, None)
        return {name: flat[name] if name in flat else outline[name] for name in names}

    def _state_dict(self, version: OpenVersion, names: Sequence[str] | None = None) -> dict[str, Any]:
        return self._store.get_state_dict(
            version.key, version=version, names=names, allow_pickle=self._allow_pickle
        )

    def _get_state_dict(
        self, key: str, user_state_dict: dict[str, Any] | None, strict: bool, direct: bool
    ) -> dict[str, Any]:
        with self._open_resolver() as resolver:
            version = resolver.open_state_dict(key)
            deleted = sorted(resolver.deleted_entries(key))
            if MAPPING in deleted:
                raise TssdKeyError(f"`{MAPPING}` of key `{key}` is deleted")
            if deleted:
                entries = ", ".join(f"{key}{DELIM}{name}" for name in deleted)
                raise KeyError(f"{_missing(entries)}: deleted")
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
        with self._open_resolver(many=True) as resolver:
            for key in resolver.all_keys:
                # A key that was deleted in the meantime is skipped.
                with contextlib.suppress(KeyError):
                    keys += resolver.expand(key, prefix)
        return list(dict.fromkeys(keys))

    def _delete(self, keys: Iterable[str]) -> None:
        changed: dict[str, int] = {}
        with self._open_resolver() as resolver:
            for key in keys:
                _check_cancelled()
                if resolver.is_state_dict(key):
                    self._delete_state_dict(key, None)
                    continue
                try:
                    version, name = resolver.resolve_entry(key)
                except KeyError:
                    # The key is not an entry. It may be a value, also one of which parts are missing.
                    self._store.delete(key)
                else:
                    self._put({}, key, None, metadata={_DELETED_FROM: int(version)})
                    changed[version.key] = int(version)
        with self._open_resolver() as resolver:
            for key, number in changed.items():
                with contextlib.suppress(KeyError):
                    remaining = set(resolver.entry_names(key)) - resolver.deleted_entries(key)
                    if int(resolver.open(key)) == number and remaining <= {MAPPING}:
                        self._delete_state_dict(key, number, remaining)

    def _delete_state_dict(self, key: str, number: int | None, remaining: Iterable[str] = ()) -> None:
        """Deletes one version or all versions of a state dict, and the versions that describe its entries."""
        with self._open_resolver() as resolver, contextlib.suppress(KeyError):
            entry_names = [name for name in resolver.entry_names(key) if name not in remaining]
            siblings = {f"{key}{DELIM}{name}" for name in entry_names} & set(self._store.keys(f"{key}{DELIM}"))
            self._store.delete(key, number)
            for sibling in siblings:
                with contextlib.suppress(KeyError):
                    self._store.delete(sibling, int(resolver.open(sibling)))


class _KeyResolver:
    """Resolves keys to versions and leaves. Opens each version once, and closes them on exit.

    Args:
        entry_names: the cache of the entry names of state dicts.
        many: whether many keys are resolved. The keys of the store are then listed once, which avoids opening keys
            that do not exist.
    """

    def __init__(self, store: Store, entry_names: dict[str, tuple[int, list[str]]], many: bool = False) -> None:
        self.all_keys: Sequence[str] = store.keys() if many else ()
        self._key_set = set(self.all_keys)
        self._is_key_list_loaded = many
        self._store = store
        self._entry_names = entry_names
        self._opened: dict[str, OpenVersion] = {}
        self._deleted: dict[str, set[str]] = {}

    def __enter__(self) -> _KeyResolver:
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for version in self._opened.values():
            version.close()

    def open(self, key: str) -> OpenVersion:
        """Opens the newest version of a key."""
        if key not in self._opened:
            self._opened[key] = self._store.open(key)
        return self._opened[key]

    def resolve(self, name: str) -> tuple[OpenVersion, str]:
        """Returns the version and the leaf name of a key, which is that of a value or of an entry.

        Raises:
            TssdKeyError: the key is neither. The message gives the reasons.
        """
        try:
            return self._resolve_value(name)
        except TssdKeyError as error:
            reasons = [str(error)]
        if any(_possible_splits(name)):
            try:
                return self.resolve_entry(name)
            except TssdKeyError as error:
                reasons.append(str(error))
        text = "; ".join(dict.fromkeys(reasons))
        is_partial = _PARTIALLY_COMMITTED in text
        fault = f"DTensor '{name}' is only {_PARTIALLY_COMMITTED}" if is_partial else _missing(name)
        raise new_exception("not_found", "", f"{fault}: {text}", None, None, None, None, key=name)

    def _resolve_value(self, name: str) -> tuple[OpenVersion, str]:
        if self._is_key_list_loaded and name not in self._key_set and any(_possible_splits(name)):
            raise TssdKeyError(f"key `{name}`: no version is visible")
        version = self.open(name)
        if _is_value(version):
            return version, ""
        if _STATE_DICT_MARK in _metadata_of(version) and not self.is_state_dict(name.removesuffix(f"{DELIM}{MAPPING}")):
            # The state dict itself is deleted. Only its MAPPING remains.
            return version, MAPPING
        raise TssdKeyError(f"key `{name}` is no value")

    def resolve_entry(self, name: str) -> tuple[OpenVersion, str]:
        """Returns the version of a state dict, and the name of its entry, for the key of an entry.

        Raises:
            TssdKeyError: the key is not that of an entry.
        """
        errors = []
        for key, entry in _possible_splits(name):
            try:
                version = self.open_state_dict(key)
                if entry in self.entry_names(key) and entry not in self._filter_deleted(key, [entry]):
                    return version, entry
                errors.append(f"key `{key}` has no `{entry}`")
            except TssdKeyError as error:
                errors.append(str(error))
        raise TssdKeyError("; ".join(errors))

    def open_state_dict(self, key: str) -> OpenVersion:
        """Opens the newest version of a key, which must be a state dict."""
        version = self.open(key)
        if _is_value(version) or _metadata_of(version).keys() & {_STATE_DICT_MARK, _DELETED_FROM}:
            raise TssdKeyError(f"key `{key}` is no state dict")
        return version

    def is_state_dict(self, key: str) -> bool:
        """Returns whether the newest version of a key is a state dict."""
        with contextlib.suppress(TssdKeyError):
            self.open_state_dict(key)
            return True
        return False

    def entry_names(self, key: str) -> list[str]:
        """Returns the names of the leaves of a state dict, and MAPPING."""
        version = self.open(key)
        number, names = self._entry_names.get(key, (-1, []))
        if number != int(version):
            flat, _ = flatten_state_dict(version.to_meta())
            names = list(dict.fromkeys((*flat, MAPPING)))
            self._entry_names[key] = int(version), names
        return names

    def deleted_entries(self, key: str) -> set[str]:
        """Returns the names of the deleted entries of a state dict."""
        if key not in self._deleted:
            prefix = f"{key}{DELIM}"
            siblings = self.all_keys if self._is_key_list_loaded else self._store.keys(prefix)
            names = {sibling.removeprefix(prefix) for sibling in siblings if sibling.startswith(prefix)}
            if names - {MAPPING}:
                # Any number of other keys may begin with the key of the state dict.
                names &= set(self.entry_names(key))
            self._deleted[key] = self._filter_deleted(key, names)
        return self._deleted[key]

    def _filter_deleted(self, key: str, names: Iterable[str]) -> set[str]:
        deleted = set()
        for name in names:
            with contextlib.suppress(TssdKeyError):
                if _metadata_of(self.open(f"{key}{DELIM}{name}")).get(_DELETED_FROM) == int(self.open(key)):
                    deleted.add(name)
        return deleted

    def expand(self, key: str, prefix: str | None) -> list[str]:
        """Returns the keys of torchstore that a key of the store stands for.

        They are the entries of a state dict, or the key itself. There are none if they cannot have the prefix.
        """
        is_dict = f"{key}{DELIM}{MAPPING}" in self._key_set
        can_match = prefix is None or key.startswith(prefix) or is_dict and prefix.startswith(f"{key}{DELIM}")
        if key == SETTINGS_KEY or not can_match:
            return []
        if is_dict:
            return [f"{key}{DELIM}{name}" for name in self.entry_names(key) if name not in self.deleted_entries(key)]
        # Only a key below that of a state dict may be something else than a value.
        is_below_dict = any(f"{parent}{DELIM}{MAPPING}" in self._key_set for parent, _ in _possible_splits(key))
        if not is_below_dict:
            return [key]
        with contextlib.suppress(TssdKeyError):
            self.resolve(key)
            return [key]
        return []


def _possible_splits(name: str) -> Iterator[tuple[str, str]]:
    """Yields all splits of a key into the key of a state dict and an entry name, the longest key first."""
    parts = name.split(DELIM)
    for end in range(len(parts) - 1, 0, -1):
        yield DELIM.join(parts[:end]), DELIM.join(parts[end:])


def _metadata_of(version: OpenVersion) -> dict[str, Any]:
    return version.metadata() or {}


def _is_value(version: OpenVersion) -> bool:
    """Returns whether a version is a single value, not a state dict."""
    names = version.keys()
    if names:
        return names[0] == "" or names[0].startswith(".") and list(version.to_meta()) == [""]
    return not _metadata_of(version).keys() & {_STATE_DICT_MARK, _DELETED_FROM} and list(version.to_meta()) == [""]


def _is_placeholder(leaf: object) -> bool:
    """Returns whether a leaf of an outline stands for a tensor, or may stand for a pickle."""
    return isinstance(leaf, (torch.Tensor, bytes))


def _check_stored_tensor(
    key: str, version: OpenVersion, name: str, target: Any, tensor_slice: TensorSlice | None
) -> None:
    if name not in version.keys():
        raise TypeError(_not_a_tensor(f"key `{key}`"))
    shape = version.get_slice(name).shape
    if tensor_slice is not None and tensor_slice.global_shape != shape:
        reason = f"its global shape is {tensor_slice.global_shape}, the tensor has shape {shape}"
        text = f"No tensor slices found for key '{key}' that intersect with the requested slice: {reason}"
        raise RuntimeError(text)
    if tensor_slice is None and tuple(target.shape) != shape:
        raise ValueError(f"key `{key}` has shape {shape}, the tensor {tuple(target.shape)}")


def _missing(key: str) -> str:
    return f"Unable to locate {key} in any storage volumes"


def _not_a_tensor(place: str) -> str:
    return f"inplace_tensor or tensor_slice_spec is specified but the value stored is an object: {place}"


def _normalize(value: Any, ranks: set[int]) -> Any:
    """Returns a value without the properties that torchstore does not keep.

    Adds the ranks of the meshes of all shards to `ranks`. A DTensor that is whole on each rank becomes a plain tensor:
    some programs have different values on each rank, or put it on one rank only.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor) and is_whole(value):
            value = value.to_local()
        elif isinstance(value, DTensor):
            ranks.update(value.device_mesh.mesh.flatten().tolist())
        return value.detach() if value.requires_grad or isinstance(value, torch.nn.Parameter) else value
    if isinstance(value, dict):
        # A copy keeps the class and the attributes of the dict.
        copied = copy.copy(value)
        copied.update((key, _normalize(each, ranks)) for key, each in value.items())
        return copied
    if type(value) in (list, tuple):
        return type(value)(_normalize(each, ranks) for each in value)
    return value
