"""The functions of torchstore. Each calls the client of the store with the given name."""

from __future__ import annotations

import threading
from typing import Any

import torch

from .._tssd import Store, TensorSlice
from ..aio import _run_in_thread
from ._client import SETTINGS_KEY, LocalClient
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

# Concurrent calls create only one client for each store.
_clients_lock = threading.Lock()


def open_store(store_name: str) -> Store:
    """Connects to the daemon of this name on this host. Starts it if it does not run.

    Raises:
        ValueError: `store_name` is a path.
    """
    if "/" in store_name:
        raise ValueError(f"store_name is a name, and {store_name!r} is a path")
    return Store(f"unix:{store_name}")


def _read_settings(store: Store) -> dict[str, Any] | None:
    if not store.exists(SETTINGS_KEY):
        return None
    settings: dict[str, Any] = store.get_state_dict(SETTINGS_KEY)
    return settings


async def initialize(
    num_storage_volumes: int = 1,
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    mesh: object = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Starts the daemon of a store on this host, or joins it.

    Every process of the same user can then use the store.

    Args:
        num_storage_volumes, strategy, mesh: accepted as in torchstore. One daemon serves a host.
        store_name: letters, digits, "-", "_" and ".".
        allow_pickle: whether any process may put objects that are not typed leaves, as pickles.

    Raises:
        RuntimeError: this process has already initialized the store, the store exists with another `allow_pickle`, or
            there are several volumes and no strategy.
    """
    if num_storage_volumes > 1 and strategy is None:
        raise RuntimeError("Must specify controller strategy if num_storage_volumes > 1")

    def start() -> LocalClient:
        store = open_store(store_name)
        settings = _read_settings(store)
        if settings is not None and store_name in _initialized:
            raise RuntimeError("TorchStore is already initialized")
        if settings is None:
            settings = {"allow_pickle": allow_pickle}
            store.put_state_dict(settings, SETTINGS_KEY)
        if settings["allow_pickle"] is not allow_pickle:
            stored = settings["allow_pickle"]
            raise RuntimeError(f"TorchStore is already initialized, with allow_pickle={stored}")
        return LocalClient(store, allow_pickle)

    _clients[store_name] = await _run_in_thread(start)
    _initialized.add(store_name)


async def shutdown(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Deletes everything in a store. Values that were read stay valid."""

    def clear() -> None:
        with open_store(store_name) as store:
            # The settings are deleted last: ranks that wait for the shutdown poll them.
            keys = sorted(store.keys(), key=lambda key: key == SETTINGS_KEY)
            store.delete_batch(keys)

    try:
        await _run_in_thread(clear)
    finally:
        _initialized.discard(store_name)
        reset_client(store_name)


def reset_client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Drops the client of a store. The next call creates a new one."""
    _clients.pop(store_name, None)


async def client(store_name: str = DEFAULT_TORCHSTORE_NAME) -> LocalClient:
    """Returns the client of a store in this process.

    Raises:
        AssertionError: the store was not initialized.
    """

    def get_or_create() -> LocalClient:
        with _clients_lock:
            if store_name not in _clients:
                store = open_store(store_name)
                settings = _read_settings(store)
                text = f"Please call torchstore.initialize before attempting to use store {store_name!r}"
                assert settings is not None, text
                _clients[store_name] = LocalClient(store, settings["allow_pickle"])
            return _clients[store_name]

    if store_name in _clients:
        return _clients[store_name]
    return await _run_in_thread(get_or_create)


async def put(key: str, value: Any, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Stores a tensor or an object. A DTensor becomes visible when all ranks of its mesh have put it.

    Raises:
        TssdTypeError: the object is not a typed leaf, and pickles are not allowed.
    """
    await (await client(store_name)).put(key, value)


async def put_batch(entries: dict[str, Any], store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Stores several values, each under its key.

    Raises:
        AssertionError: there are no values.
    """
    await (await client(store_name)).put_batch(entries)


async def get(
    key: str,
    inplace_tensor: torch.Tensor | None = None,
    tensor_slice_spec: TensorSlice | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
) -> Any:
    """Gets a value: any object, a tensor, or a slice of a tensor.

    A tensor is returned whole and in the host's memory, or it fills a given tensor.

    Returns:
        The value; `inplace_tensor` if it is given.

    Raises:
        KeyError: the key does not exist, or a part of the value is missing.
        ValueError: shapes differ, or a DTensor is combined with a slice.
        RuntimeError: the global shape of the slice is not that of the stored tensor.
        TypeError: dtypes differ and are not both floating, or the stored value is not a tensor.
    """
    return await (await client(store_name)).get(key, inplace_tensor, tensor_slice_spec)


async def get_batch(
    keys: list[str] | dict[str, torch.Tensor | None], store_name: str = DEFAULT_TORCHSTORE_NAME
) -> dict[str, Any]:
    """Gets several values. If `keys` is a dict, its tensors are filled.

    Raises:
        KeyError: a key does not exist. Nothing was written.
        ValueError, TypeError: as `get`; or there are no keys, or a key is listed twice.
    """
    return await (await client(store_name)).get_batch(keys)


async def delete(key: str, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Deletes a value, an entry of a state dict, or a whole state dict.

    Raises:
        KeyError: the key does not exist.
    """
    await (await client(store_name)).delete(key)


async def delete_batch(keys: list[str], *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> None:
    """Deletes several keys. Keys that do not exist are ignored.

    Raises:
        TypeError: `keys` is not a list.
    """
    await (await client(store_name)).delete_batch(keys)


async def keys(prefix: str | None = None, *, store_name: str = DEFAULT_TORCHSTORE_NAME) -> list[str]:
    """Returns the keys that equal `prefix`, or begin with `prefix` and a dot. None: all keys."""
    return await (await client(store_name)).keys(prefix)


async def exists(key: str, store_name: str = DEFAULT_TORCHSTORE_NAME) -> bool:
    """Returns whether a key exists, with all parts of its value."""
    return await (await client(store_name)).exists(key)


async def put_state_dict(
    state_dict: dict[str, Any] | None,
    key: str,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    direct_rdma: bool = False,
    transfer_dtype: torch.dtype | None = None,
) -> None:
    """Stores a state dict as one version. It becomes visible when all ranks of its meshes have put it.

    Args:
        state_dict: a nested dict. None, with `direct_rdma`: the tensors of the previous call, with their current
            values.
        direct_rdma: whether `state_dict` may be None. A snapshot is stored in either case.
        transfer_dtype: the dtype in which floating tensors are stored.

    Raises:
        AssertionError: the first call for a key has no state dict.
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
    """Gets the newest version of a state dict. All its values come from one put.

    Args:
        user_state_dict: tensors to fill in place, in any sharding. Floating values are cast if the dtype differs.
            None: whole tensors.
        strict: whether both dicts must have the same names. With `direct_rdma`: whether all requested names must be
            stored.
        direct_rdma: whether `user_state_dict` is required, and returned.

    Returns:
        The stored state dict. With `user_state_dict`: the tensors of it, in dicts whose keys are strs.

    Raises:
        RuntimeError: the key does not exist. With `direct_rdma`, this is a KeyError.
        KeyError: entries of the state dict are deleted.
        AssertionError: names differ, or `user_state_dict` is missing with `direct_rdma`.
        TssdKeyError: with `direct_rdma` and `strict`, a requested name is not stored.
        TssdTypeError, TssdValueError: dtypes or shapes differ. Nothing was written.
    """
    store = await client(store_name)
    return await store.get_state_dict(key, user_state_dict, strict, direct_rdma)
