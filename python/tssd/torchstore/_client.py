"""A client of torchstore on a store.

What is put under a key is a version with one leaf, whose name is empty. A state dict is a version with its leaves,
each of which can be got, and deleted, as `KEY/NAME`; `KEY/MAPPING` says where they are in it.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import logging
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .._errors import TssdError, TssdKeyError
from .._reports import PutReport
from .._tssd import OpenVersion, Store, TensorShard, TensorSlice
from ..aio import _run
from ._transport import is_whole, prove_target

DELIM = "/"
MAPPING = "MAPPING"

# The key that says how the store is used; no key of a program is shown under this name.
SETTINGS = ".torchstore"

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

    async def put(self, key: str, value: Any) -> None:
        """Stores a tensor or an object."""
        await self.put_batch({key: value})

    async def put_batch(self, entries: dict[str, Any]) -> None:
        """Stores several, each as a version of its key."""
        assert isinstance(entries, dict) and entries, "put_batch requires a non-empty dict"

        def put() -> None:
            for key, value in entries.items():
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
        """Deletes what a key means; that of a state dict means all of it.

        Raises:
            KeyError: there is none.
        """

        def delete() -> None:
            with _Names(self._store) as names:
                if not self._store.exists(key):
                    names.entry(key)
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
            with _Names(self._store) as names, contextlib.suppress(KeyError):
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

    def _put(
        self, state_dict: dict[str, Any], key: str, transfer_dtype: torch.dtype | None, **options: Any
    ) -> PutReport | None:
        """A version of all ranks of the meshes of its DTensors. None if it was replaced before it was there."""
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
            # Of two puts at a time either may be the last.
            if error.kind != "superseded":
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
        # An entry that was put, or deleted, by itself is what the state dict says now.
        entries = {f"{key}{DELIM}{name}" for name in (*names, MAPPING)}
        self._store.delete_batch([own for own in self._store.keys(f"{key}{DELIM}") if own in entries])

    def _get(self, wanted: dict[str, tuple[Any, TensorSlice | None]]) -> dict[str, Any]:
        with _Names(self._store, many=len(wanted) > 1) as names:
            found = {key: names.find(key) for key in wanted}
            # Of each version in one go.
            targets: dict[str, dict[str, Any]] = {}
            whole: dict[str, list[str]] = {}
            for key, (version, name) in found.items():
                target, tensor_slice = wanted[key]
                if tensor_slice is not None:
                    _prove_of(version, name, tensor_slice)
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
        with _Names(self._store) as names:
            version = names.state_dict(key)
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
        with _Names(self._store) as names:
            for key in self._store.keys():
                # Only what may have the prefix is opened.
                mine = prefix is None or key.startswith(prefix) or prefix.startswith(f"{key}{DELIM}")
                # What is deleted meanwhile is gone.
                with contextlib.suppress(KeyError):
                    keys += names.of(key) if mine else []
        return list(dict.fromkeys(keys))

    def _delete(self, keys: Iterable[str]) -> None:
        entries: dict[str, set[str]] = {}
        with _Names(self._store) as names:
            for key in keys:
                # What is not all there goes, too.
                self._store.delete(key)
                with contextlib.suppress(KeyError):
                    version, name = names.entry(key)
                    entries.setdefault(version.key, set()).add(name)
            for key, deleted in entries.items():
                self._hide(names, key, deleted)

    def _hide(self, names: _Names, key: str, deleted: set[str]) -> None:
        """Versions do not change: which entries are deleted is said beside them, until all are."""
        left = set(names.entries(key)) - deleted
        if left > {MAPPING}:
            hidden = sorted(deleted | names.hidden(key))
            note = {_DELETED: hidden, "version": int(names.open(key))}
            self._put(note, f"{key}{DELIM}{MAPPING}", None)
        elif left:
            self._put({}, key, None)
        else:
            self._store.delete_batch([key, f"{key}{DELIM}{MAPPING}"])


# The leaf of `KEY/MAPPING`, where there is such a version: the entries of a version of KEY that are deleted.
_DELETED = "torchstore.deleted"


class _Names:
    """What keys mean, in versions that are each opened once.

    Args:
        many: whether many keys are looked for, most of which may be entries of state dicts.
    """

    def __init__(self, store: Store, many: bool = False) -> None:
        self._store = store
        self._known = set(store.keys()) if many else None
        self._opened: dict[str, OpenVersion] = {}
        self._outlines: dict[str, dict[Any, Any]] = {}
        self._entries: dict[str, list[str]] = {}

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
            try:
                return self.entry(name)
            except TssdKeyError as other:
                raise TssdKeyError("; ".join(dict.fromkeys(filter(None, (str(error), str(other)))))) from None

    def _value(self, name: str) -> tuple[OpenVersion, str]:
        if self._known is not None and name not in self._known and any(_splits(name)):
            raise TssdKeyError(f"key `{name}`: no version is visible")
        version = self.open(name)
        if not self._is_value(name):
            raise TssdKeyError(f"key `{name}` is a state dict")
        return version, ""

    def entry(self, name: str) -> tuple[OpenVersion, str]:
        """The state dict and its entry that a key means.

        Raises:
            TssdKeyError: it means none.
        """
        errors = []
        for key, entry in _splits(name):
            try:
                version = self.state_dict(key)
            except TssdKeyError as error:
                errors.append(str(error))
                continue
            if entry in self.entries(key):
                return version, entry
            errors.append(f"key `{key}` has no `{entry}`")
        raise TssdKeyError("; ".join(errors))

    def state_dict(self, key: str) -> OpenVersion:
        """The newest version of a key, if it is a state dict."""
        version = self.open(key)
        if self._is_value(key):
            raise TssdKeyError(f"key `{key}` is no state dict")
        return version

    def entries(self, key: str) -> list[str]:
        """The names of the leaves of a state dict that are not deleted."""
        if key not in self._entries:
            names, _ = flatten_state_dict(self._outline(key))
            hidden = self.hidden(key)
            self._entries[key] = [name for name in (*names, MAPPING) if name not in hidden]
        return self._entries[key]

    def hidden(self, key: str) -> set[str]:
        """The names of the leaves of a state dict that are deleted."""
        with contextlib.suppress(TssdKeyError):
            beside = self._outline(f"{key}{DELIM}{MAPPING}")
            if beside.get("version") == int(self.open(key)):
                return set(beside[_DELETED])
        return set()

    def of(self, key: str) -> list[str]:
        """The keys that a key of the store stands for."""
        if self._is_value(key):
            return [key]
        if key == SETTINGS or _DELETED in self._outline(key):
            return []
        return [f"{key}{DELIM}{name}" for name in self.entries(key)]

    def _outline(self, key: str) -> dict[Any, Any]:
        if key not in self._outlines:
            self._outlines[key] = self.open(key).to_meta()
        return self._outlines[key]

    def _is_value(self, key: str) -> bool:
        # Most values are tensors, and this is quicker.
        return self.open(key).keys() == [""] or list(self._outline(key)) == [""]


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """The state dict and the entry that a key may mean, the longest key first."""
    parts = name.split(DELIM)
    for end in range(len(parts) - 1, 0, -1):
        yield DELIM.join(parts[:end]), DELIM.join(parts[end:])


def _is_outline(leaf: object) -> bool:
    """Whether it stands for a tensor, or may stand for a pickle."""
    return isinstance(leaf, (torch.Tensor, bytes))


def _prove_of(version: OpenVersion, name: str, tensor_slice: TensorSlice) -> None:
    if name not in version.keys():
        raise TypeError(f"`{name}` of key `{version.key}` is no tensor, so it has no slices")
    shape = tuple(version.get_slice(name).get_shape())
    if tensor_slice.global_shape != shape:
        text = f"key `{version.key}` has shape {shape}, not {tensor_slice.global_shape} as the slice says"
        raise RuntimeError(text)


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
