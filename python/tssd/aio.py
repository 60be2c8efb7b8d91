"""Stores for asyncio: the API of `tssd.Store`, with awaitable methods.

    async with tssd.aio.Store() as store:
        await store.put_state_dict(state_dict, "policy")
        async for info in store.subscribe("policy"):
            ...

Each call runs on its own thread. Cancelling a task ends its call. Once the await has ended, the call no longer writes
to the tensors that it was filling, and nothing remains of a put that was not committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from . import _tssd
from ._reports import GetReport, PutReport, VersionInfo
from ._targets import Targets

if TYPE_CHECKING:
    from typing import TypedDict

    from typing_extensions import Self, Unpack

    from .mapping import Mapping

__all__ = [
    "OpenVersion",
    "PendingPut",
    "Pin",
    "Publisher",
    "Receiver",
    "StagedVersion",
    "Store",
    "Subscription",
    "VersionSlice",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Wrapped = TypeVar("_Wrapped")
_Opened = TypeVar("_Opened")
_Leased = TypeVar("_Leased", _tssd.OpenVersion, _tssd.StagedVersion)
_Into = TypeVar("_Into")
_IntoDict = TypeVar("_IntoDict", bound=dict[Any, Any] | Targets)


async def _run_in_thread(call: Callable[[], _R]) -> _R:
    """Runs a blocking call on its own thread. Ends the call if the task is cancelled."""
    cancel = _tssd._Cancel()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_R] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        # After the join, the thread holds no references. A thread that holds torch tensors when the interpreter exits
        # aborts the process.
        thread.join()
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run_call() -> None:
        result, error = None, None
        try:
            result = cancel.run(call)
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, error)

    # Not a thread pool: blocked calls could fill it, and the call that they wait for would never run.
    thread = threading.Thread(target=run_call, name="tssd", daemon=True)
    thread.start()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancel.cancel()
        # The thread may still use the caller's tensors, so wait for it even if the task is cancelled again.
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        future.exception()
        raise


def _unwrap_version(options: dict[str, Any]) -> dict[str, Any]:
    """Replaces an `OpenVersion` that is passed as `version=` by the `tssd.OpenVersion` that it wraps."""
    version = options.get("version")
    return {**options, "version": version._wrapped} if isinstance(version, OpenVersion) else options


class _Wrapper(Generic[_Wrapped]):
    """Base class of wrappers around objects with blocking methods."""

    def __init__(self, wrapped: _Wrapped) -> None:
        self._wrapped = wrapped


def _awaitable(
    method: Callable[Concatenate[_Wrapped, _P], _R],
) -> Callable[Concatenate[_Wrapper[_Wrapped], _P], Coroutine[Any, Any, _R]]:
    """Returns the async version of a blocking method."""

    async def call(wrapper: _Wrapper[_Wrapped], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        options: dict[str, Any] = _unwrap_version(kwargs)
        return await _run_in_thread(lambda: method(wrapper._wrapped, *args, **options))

    functools.update_wrapper(call, method)
    return call


def _wrap_result(result: Any) -> Any:
    if isinstance(result, list):
        return [_wrap_result(each) for each in result]
    return PendingPut(result) if isinstance(result, _tssd.PendingPut) else result


class _OpenContext(Generic[_R]):
    """An object that is being opened: await it, or use it as an async context manager."""

    def __init__(self, coroutine: Coroutine[Any, Any, _R]) -> None:
        self._coroutine = coroutine
        self._opened: Any = None

    def __await__(self) -> Generator[Any, None, _R]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> _R:
        self._opened = await self
        opened: _R = await self._opened.__aenter__()
        return opened

    async def __aexit__(self, *error: Any) -> None:
        await self._opened.__aexit__(*error)


def _awaitable_open(
    method: Callable[Concatenate[_Wrapped, _P], _R], wrapper_class: Callable[[_R], _Opened]
) -> Callable[Concatenate[_Wrapper[_Wrapped], _P], _OpenContext[_Opened]]:
    """Returns the async version of a blocking method that opens an object."""

    def call(wrapper: _Wrapper[_Wrapped], /, *args: _P.args, **kwargs: _P.kwargs) -> _OpenContext[_Opened]:
        async def open_wrapped() -> _Opened:
            options: dict[str, Any] = _unwrap_version(kwargs)
            return wrapper_class(await _run_in_thread(lambda: method(wrapper._wrapped, *args, **options)))

        return _OpenContext(open_wrapped())

    functools.update_wrapper(call, method)
    return call


class VersionSlice(_Wrapper[_tssd.VersionSlice]):
    """A tensor of an open version, which is read in parts: see `tssd.VersionSlice`."""

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor, in elements."""
        return self._wrapped.get_shape()

    def get_dtype(self) -> str:
        """Returns the dtype by its name in torch, such as "bfloat16"."""
        return self._wrapped.get_dtype()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, in elements."""
        return self._wrapped.shape

    @property
    def dtype(self) -> Any:
        """The dtype of what is read, as torch or numpy has it."""
        return self._wrapped.dtype

    __getitem__ = _awaitable(_tssd.VersionSlice.__getitem__)


class _LeasedVersion(_Wrapper[_Leased]):
    """A version that is leased until it is closed."""

    @property
    def key(self) -> str:
        """The key."""
        return self._wrapped.key

    @property
    def version(self) -> int:
        """The version number. It stays available after `close`."""
        return self._wrapped.version

    @property
    def epoch(self) -> int:
        """The number of rewinds and rollbacks of the key before the version. It stays available after `close`."""
        return self._wrapped.epoch

    @property
    def id(self) -> str:
        """The identity of the version, 32 hex digits. It stays available after `close`."""
        return self._wrapped.id

    async def close(self) -> None:
        """Releases the version. Tensors that were read stay valid."""
        await _run_in_thread(self._wrapped.close)

    def __int__(self) -> int:
        return self.version

    def __index__(self) -> int:
        return self.version

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class OpenVersion(_LeasedVersion[_tssd.OpenVersion]):
    """An open version, which is read tensor by tensor: see `tssd.OpenVersion`."""

    def keys(self) -> list[str]:
        """Returns the fqns of the tensors, in the order of the state dict."""
        return self._wrapped.keys()

    def metadata(self) -> dict[str, Any] | None:
        """Returns the `metadata` of the put. None if there was none."""
        return self._wrapped.metadata()

    get_tensor = _awaitable(_tssd.OpenVersion.get_tensor)
    to_meta = _awaitable(_tssd.OpenVersion.to_meta)

    def get_slice(self, name: str) -> VersionSlice:
        """Returns a handle that reads parts of one tensor: `await opened.get_slice(name)[0:2, 5]`."""
        return VersionSlice(self._wrapped.get_slice(name))

    async def items(self) -> AsyncIterator[tuple[str, Any]]:
        """Iterates over the tensors, each with its fqn. Each tensor is read when the iterator reaches it."""
        for name in self.keys():
            yield name, await self.get_tensor(name)

    async def values(self) -> AsyncIterator[Any]:
        """Iterates over the tensors. Each tensor is read when the iterator reaches it."""
        for name in self.keys():
            yield await self.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._wrapped)

    def __contains__(self, name: object) -> bool:
        return name in self._wrapped

    def __len__(self) -> int:
        return len(self._wrapped)


class StagedVersion(_LeasedVersion[_tssd.StagedVersion]):
    """A version that is staged, ready to be copied: see `tssd.StagedVersion`."""

    @property
    def report(self) -> GetReport:
        """The GetReport of the staging."""
        return self._wrapped.report

    commit = _awaitable(_tssd.StagedVersion.commit)


class Pin(_Wrapper[_tssd.Pin]):
    """A version that is pinned under a label: see `tssd.Pin`."""

    @property
    def version(self) -> int:
        """The version number."""
        return self._wrapped.version

    @property
    def label(self) -> str:
        """The label."""
        return self._wrapped.label

    unpin = _awaitable(_tssd.Pin.unpin)

    def __int__(self) -> int:
        return self.version

    def __index__(self) -> int:
        return self.version

    async def __aenter__(self) -> Pin:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.unpin()


class PendingPut(_Wrapper[_tssd.PendingPut]):
    """A put that continues in the background: see `tssd.PendingPut`."""

    wait_visible = _awaitable(_tssd.PendingPut.wait_visible)
    result = _awaitable(_tssd.PendingPut.result)


class Publisher(_Wrapper[_tssd.Publisher]):
    """A version that is put tensor by tensor: see `tssd.Publisher`."""

    put = _awaitable(_tssd.Publisher.put)
    flush = _awaitable(_tssd.Publisher.flush)

    @property
    def report(self) -> PutReport | None:
        """The PutReport, once the block has ended; None before."""
        return self._wrapped.report

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await _run_in_thread(lambda: self._wrapped.__exit__(*error))


class Receiver(_Wrapper[_tssd.Receiver]):
    """A receiver that fills tensors with the versions of a ring: see `tssd.Receiver`."""

    receive = _awaitable(_tssd.Receiver.receive)
    close = _awaitable(_tssd.Receiver.close)

    async def __aenter__(self) -> Receiver:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class Subscription:
    """An iterator over the versions of a key as they become visible: see `tssd.Store.subscribe`."""

    def __init__(self, store: _tssd.Store, key: str) -> None:
        self._store, self._key = store, key
        self._subscription: _tssd.Subscription | None = None
        self._is_closed = False

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> VersionInfo:
        if self._is_closed:
            raise StopAsyncIteration
        if self._subscription is None:
            self._subscription = await _run_in_thread(lambda: self._store.subscribe(self._key))
        subscription = self._subscription
        # A future cannot hold a StopIteration: None stands for the end.
        info = await _run_in_thread(lambda: next(subscription, None))
        if info is None:
            raise StopAsyncIteration
        return info

    def close(self) -> None:
        """Ends the iteration, also for a task that waits for the next version."""
        self._is_closed = True
        if self._subscription is not None:
            self._subscription.close()


if TYPE_CHECKING:

    class _ReadKeywords(TypedDict, total=False):
        version: int | VersionInfo | OpenVersion | _tssd.OpenVersion | None
        writer: int | None
        verify: bool
        require_transport: _tssd._Transport | None
        timeout: float | None

    class _GetKeywords(_ReadKeywords, total=False):
        fqn: str | None
        tensor_slice: _tssd.TensorSlice | None

    class _GetStateDictKeywords(_ReadKeywords, total=False):
        strict: bool
        cast: bool
        copy: bool
        allow_pickle: bool
        mapping: Mapping | None


class Store(_Wrapper[_tssd.Store]):
    """A store of state dicts by key, in immutable versions: `tssd.Store` for asyncio.

    The first call connects.

    The arguments and errors are those of `tssd.Store`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        ca: str | None = None,
        cert: str | None = None,
        key_file: str | None = None,
        connect_timeout: float = 30.0,
    ) -> None:
        super().__init__(_tssd.Store._connect_lazily(url, ca, cert, key_file, connect_timeout))

    @property
    def url(self) -> str:
        """The address of the store."""
        return self._wrapped.url

    @overload
    async def put_state_dict(
        self,
        state_dict: _tssd._StateDict,
        key: str,
        *,
        wait: Literal[True] = True,
        **keywords: Unpack[_tssd._PutKeywords],
    ) -> PutReport: ...
    @overload
    async def put_state_dict(
        self, state_dict: _tssd._StateDict, key: str, *, wait: Literal[False], **keywords: Unpack[_tssd._PutKeywords]
    ) -> PendingPut: ...
    @overload
    async def put_state_dict(
        self, state_dict: _tssd._StateDict, key: str, *, wait: bool, **keywords: Unpack[_tssd._PutKeywords]
    ) -> PutReport | PendingPut: ...
    async def put_state_dict(self, state_dict: Any, key: str, **keywords: Any) -> Any:
        """Puts this process's part of a state dict: see `tssd.Store.put_state_dict`."""
        return await self._call(_tssd.Store.put_state_dict, state_dict, key, **keywords)

    @overload
    async def get_state_dict(
        self,
        key: str,
        into: None = None,
        *,
        names: str | Sequence[str] | None = None,
        return_report: Literal[False] = False,
        **keywords: Unpack[_GetStateDictKeywords],
    ) -> dict[Any, Any]: ...
    @overload
    async def get_state_dict(
        self,
        key: str,
        into: None = None,
        *,
        names: str | Sequence[str] | None = None,
        return_report: Literal[True],
        **keywords: Unpack[_GetStateDictKeywords],
    ) -> tuple[dict[Any, Any], GetReport]: ...
    @overload
    async def get_state_dict(
        self,
        key: str,
        into: None = None,
        *,
        names: str | Sequence[str] | None = None,
        return_report: bool,
        **keywords: Unpack[_GetStateDictKeywords],
    ) -> dict[Any, Any] | tuple[dict[Any, Any], GetReport]: ...
    @overload
    async def get_state_dict(
        self,
        key: str,
        into: _IntoDict,
        *,
        names: None = None,
        return_report: Literal[False] = False,
        **keywords: Unpack[_GetStateDictKeywords],
    ) -> _IntoDict: ...
    @overload
    async def get_state_dict(
        self,
        key: str,
        into: _IntoDict,
        *,
        names: None = None,
        return_report: Literal[True],
        **keywords: Unpack[_GetStateDictKeywords],
    ) -> tuple[_IntoDict, GetReport]: ...
    @overload
    async def get_state_dict(
        self,
        key: str,
        into: _IntoDict,
        *,
        names: None = None,
        return_report: bool,
        **keywords: Unpack[_GetStateDictKeywords],
    ) -> _IntoDict | tuple[_IntoDict, GetReport]: ...
    async def get_state_dict(self, key: str, into: Any = None, **keywords: Any) -> Any:
        """Gets a version of a state dict: see `tssd.Store.get_state_dict`."""
        return await self._call(_tssd.Store.get_state_dict, key, into, **keywords)

    @overload
    async def put(
        self, key: str, value: object, *, wait: Literal[True] = True, **keywords: Unpack[_tssd._PutKeywords]
    ) -> PutReport: ...
    @overload
    async def put(
        self, key: str, value: object, *, wait: Literal[False], **keywords: Unpack[_tssd._PutKeywords]
    ) -> PendingPut: ...
    @overload
    async def put(
        self, key: str, value: object, *, wait: bool, **keywords: Unpack[_tssd._PutKeywords]
    ) -> PutReport | PendingPut: ...
    async def put(self, key: str, value: object, **keywords: Any) -> Any:
        """Puts one value, as a state dict that contains nothing else: see `tssd.Store.put`."""
        return await self._call(_tssd.Store.put, key, value, **keywords)

    @overload
    async def put_batch(
        self, values: dict[str, Any], *, wait: Literal[True] = True, **keywords: Unpack[_tssd._PutKeywords]
    ) -> list[PutReport]: ...
    @overload
    async def put_batch(
        self, values: dict[str, Any], *, wait: Literal[False], **keywords: Unpack[_tssd._PutKeywords]
    ) -> list[PendingPut]: ...
    @overload
    async def put_batch(
        self, values: dict[str, Any], *, wait: bool, **keywords: Unpack[_tssd._PutKeywords]
    ) -> list[PutReport] | list[PendingPut]: ...
    async def put_batch(self, values: dict[str, Any], **keywords: Any) -> Any:
        """Puts several values, each under its own key: see `tssd.Store.put_batch`."""
        return await self._call(_tssd.Store.put_batch, values, **keywords)

    @overload
    async def get(self, key: str, into: None = None, **keywords: Unpack[_GetKeywords]) -> Any: ...
    @overload
    async def get(self, key: str, into: _Into, **keywords: Unpack[_GetKeywords]) -> _Into: ...
    async def get(self, key: str, into: Any = None, **keywords: Any) -> Any:
        """Gets one value, or one leaf of a state dict: see `tssd.Store.get`."""
        return await self._call(_tssd.Store.get, key, into, **keywords)

    get_batch = _awaitable(_tssd.Store.get_batch)
    keys = _awaitable(_tssd.Store.keys)
    exists = _awaitable(_tssd.Store.exists)
    versions = _awaitable(_tssd.Store.versions)
    head = _awaitable(_tssd.Store.head)
    delete = _awaitable(_tssd.Store.delete)
    delete_batch = _awaitable(_tssd.Store.delete_batch)
    retain = _awaitable(_tssd.Store.retain)
    rollback = _awaitable(_tssd.Store.rollback)
    unpin = _awaitable(_tssd.Store.unpin)
    pins = _awaitable(_tssd.Store.pins)
    prefetch = _awaitable(_tssd.Store.prefetch)
    close = _awaitable(_tssd.Store.close)

    # Await these, or use them as async context managers: `async with store.open(key) as opened`.
    publish = _awaitable_open(_tssd.Store.publish, Publisher)
    open = _awaitable_open(_tssd.Store.open, OpenVersion)
    stage = _awaitable_open(_tssd.Store.stage, StagedVersion)
    wait_for_version = _awaitable_open(_tssd.Store.wait_for_version, OpenVersion)
    pin = _awaitable_open(_tssd.Store.pin, Pin)
    receiver = _awaitable_open(_tssd.Store.receiver, Receiver)

    async def _call(self, method: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
        """Runs a blocking method of the wrapped store, whose result may be pending puts."""
        keywords = _unwrap_version(keywords)
        return _wrap_result(await _run_in_thread(lambda: method(self._wrapped, *args, **keywords)))

    def subscribe(self, key: str) -> Subscription:
        """Iterates over versions, as `tssd.Store.subscribe`: `async for info in store.subscribe(key)`."""
        return Subscription(self._wrapped, key)

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

