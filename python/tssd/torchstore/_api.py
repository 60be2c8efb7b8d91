"""The functions of torchstore: each asks the client of a store by its name."""

from __future__ import annotations

import threading
from typing import Any

import torch

from .._tssd import Store, TensorSlice
from ..aio import _run
from ._client import SETTINGS, LocalClient
from ._strategy import TorchStoreStrategy

__all__ = [
    "DEFAULT_TORCHSTORE_NAME",
    "client",
    "delete",
    "delete_batch",
    "exists",
    "get",
    "get_batch",
    "get_state_dict",
    "initialize",
    "keys",
    "put",
    "put_batch",
    "put_state_dict",
    "reset_client",
]

DEFAULT_TORCHSTORE_NAME = "torchstore"

_clients: dict[str, LocalClient] = {}
_initialized: set[str] = set()

# One client of each store is made, however many ask for it at once.
_joining = threading.Lock()


def store_of(store_name: str) -> Store:
    """The daemon of this name on this host, which is started if there is none.

    Raises:
        ValueError: it is no name.
    """
    if "/" in store_name:
        raise ValueError(f"store_name is a name, and {store_name!r} is a path")
    return Store(f"unix:{store_name}")


def _settings(store: Store) -> dict[str, Any] | None:
    if not store.exists(SETTINGS):
        return None
    settings: dict[str, Any] = store.get_state_dict(SETTINGS)
    return settings


async def initialize(
    num_storage_volumes: int = 1,
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    mesh: object = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Starts the daemon of a store on this host, or joins it. Every process of the user then finds it.

    Args:
        num_storage_volumes, strategy, mesh: taken as torchstore takes them; one daemon serves a host.
        store_name: letters, digits, "-", "_" and ".".
        allow_pickle: whether objects that are no typed leaves may be put, as pickles, by any process.

    Raises:
        RuntimeError: this process has initialized it before; it is there, with another `allow_pickle`; there
            are several volumes and no strategy.
    """
    if num_storage_volumes > 1 and strategy is None:
        raise RuntimeError("Must specify controller strategy if num_storage_volumes > 1")

    def start() -> LocalClient:
        store = store_of(store_name)
        settings = _settings(store)
        if settings is not None and store_name in _initialized:
            raise RuntimeError("TorchStore is already initialized")
        if settings is None:
            settings = {"allow_pickle": allow_pickle}
            store.put_state_dict(settings, SETTINGS)
        if settings["allow_pickle"] is not allow_pickle:
            there = settings["allow_pickle"]
            raise RuntimeError(f"TorchStore is already initialized, with allow_pickle={there}")
        return LocalClient(store, allow_pickle)

    _clients[store_name] = await _run(start)
    _initialized.add(store_name)


async def shutdown(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Deletes everything in a store. What was got stays."""

    def clear() -> None:
        with store_of(store_name) as store:
            # The settings last: who waits for the end looks at them.
            keys = sorted(store.keys(), key=lambda key: key == SETTINGS)
            store.delete_batch(keys)

    try:
        await _run(clear)
    finally:
        _initialized.discard(store_name)
        reset_client(store_name)


def reset_client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Forgets the client of a store: the next call makes another one."""
    _clients.pop(store_name, None)


async def client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> LocalClient:
    """The client of a store in this process.

    Raises:
        AssertionError: the store was not initialized.
    """

    def join() -> LocalClient:
        with _joining:
            if store_name not in _clients:
                store = store_of(store_name)
                settings = _settings(store)
                text = f"TorchStore {store_name!r} is not initialized: call initialize first"
                assert settings is not None, text
                _clients[store_name] = LocalClient(store, settings["allow_pickle"])
            return _clients[store_name]

    if store_name in _clients:
        return _clients[store_name]
    return await _run(join)


async def put(key: str, value: Any, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Stores a tensor or an object. That of a DTensor is there when all ranks of its mesh have put theirs.

    Raises:
        TssdTypeError: the object is no typed leaf, and pickles are not allowed.
    """
    await (await client(store_name)).put(key, value)


async def put_batch(entries: dict[str, Any], store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Stores several values by key.

    Raises:
        AssertionError: there are none.
    """
    await (await client(store_name)).put_batch(entries)


async def get(
    key: str,
    inplace_tensor: torch.Tensor | None = None,
    tensor_slice_spec: TensorSlice | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
) -> Any:
    """Gets a value: a tensor as a whole tensor of the host, or a part of it, or into a tensor that is given.

    Returns:
        `inplace_tensor`, if it is given.

    Raises:
        KeyError: there is none, or not all of it.
        ValueError: shapes differ; a DTensor comes with a slice.
        RuntimeError: the slice is one of another tensor.
        TypeError: dtypes differ that are not both floating; what is stored is no tensor.
    """
    return await (await client(store_name)).get(key, inplace_tensor, tensor_slice_spec)


async def get_batch(
    keys: list[str] | dict[str, torch.Tensor | None], store_name: str = DEFAULT_TORCHSTORE_NAME
) -> dict[str, Any]:
    """Gets several values, into tensors where a dict has them.

    Raises:
        KeyError: one is missing; nothing was written.
        ValueError, TypeError: there are no keys, or one twice; as `get`.
    """
    return await (await client(store_name)).get_batch(keys)


async def delete(key: str, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Deletes a value, an entry of a state dict, or a state dict.

    Raises:
        KeyError: there is none.
    """
    await (await client(store_name)).delete(key)


async def delete_batch(keys: list[str], *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Deletes several; what is not there is no error.

    Raises:
        TypeError: it is no list.
    """
    await (await client(store_name)).delete_batch(keys)


async def keys(prefix: str | None = None, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> list[str]:
    """The keys that are `prefix`, or go on from it with a dot; None: all."""
    return await (await client(store_name)).keys(prefix)


async def exists(key: str, store_name: str = DEFAULT_TORCHSTORE_NAME) -> bool:
    """Whether there is such a key, with all its parts."""
    return await (await client(store_name)).exists(key)


async def put_state_dict(
    state_dict: dict[str, Any] | None,
    key: str,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
    transfer_dtype: torch.dtype | None = None,
) -> None:
    """Stores a state dict: one version, which is there when all ranks of its meshes have put theirs.

    Args:
        state_dict: nested; None with `direct_rdma`: the tensors that were given before, as they are now.
        direct_rdma: whether it may be None; what is stored is a snapshot in either case.
        transfer_dtype: the dtype that floating tensors are stored as.

    Raises:
        AssertionError: None was given at first.
        TssdError: as `tssd.Store.put_state_dict`.
    """
    await (await client(store_name)).put_state_dict(state_dict, key, direct_rdma, transfer_dtype)


async def get_state_dict(
    key: str,
    user_state_dict: dict[str, Any] | None = None,
    strict: bool = True,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
) -> dict[str, Any]:
    """Gets the newest version of a state dict, all of it of one put.

    Args:
        user_state_dict: whose tensors are filled in place, in whatever sharding they have; floating ones of
            another dtype are cast. None: whole tensors.
        strict: whether both have the same names; with `direct_rdma`, whether all that are wanted are stored.
        direct_rdma: whether `user_state_dict` is required, and returned.

    Returns:
        The stored state dict; with `user_state_dict` its tensors, in dicts whose keys are text.

    Raises:
        RuntimeError: there is none; KeyError with `direct_rdma`.
        KeyError: entries of it are deleted.
        AssertionError: names differ; there is nothing to fill with `direct_rdma`.
        TssdKeyError: with `direct_rdma` and `strict`, something is not stored.
        TssdTypeError, TssdValueError: dtypes or shapes differ; nothing was written.
    """
    store = await client(store_name)
    return await store.get_state_dict(key, user_state_dict, strict, direct_rdma)
