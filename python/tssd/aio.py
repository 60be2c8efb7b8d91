"""Stores for asyncio: what `tssd.Store` has, awaitable.

    async with tssd.aio.Store() as store:
        await store.put_state_dict(state_dict, "policy")
        async for info in store.subscribe("policy"):
            ...

Each call waits on a thread of its own. A task that is cancelled ends its call: what it would have filled is left
alone when the await has ended, and a put that was not committed leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from . import _tssd
from ._reports import PutReport, VersionInfo

__all__ = ["OpenVersion", "PendingPut", "Pin", "Publisher", "Receiver", "Store", "Subscription", "VersionSlice"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Wrapped = TypeVar("_Wrapped")
_Opened = TypeVar("_Opened")



async def _run(call: Callable[[], _R]) -> _R:
    cancel = _tssd._Cancel()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_R] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        # What it still has it lets go of now: a thread that has tensors of torch when the interpreter ends aborts the
        # process.
        thread.join()
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = cancel.run(call)
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    # A pool would be full of calls that wait, and the one that they wait for would not run.
    thread = threading.Thread(target=work, name="tssd", daemon=True)
    thread.start()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancel.cancel()
        # The thread may still have the caller's tensors, however often the task is cancelled.
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        future.exception()
        raise


def _bare(options: dict[str, Any]) -> dict[str, Any]:
    """A lease that is given as a version is the one in it."""
    version = options.get("version")
    return {**options, "version": version._wrapped} if isinstance(version, OpenVersion) else options


class _Wrapper(Generic[_Wrapped]):
    """Something whose calls may wait."""

    def __init__(self, wrapped: _Wrapped) -> None:
        self._wrapped = wrapped


def _awaitable(
    method: Callable[Concatenate[_Wrapped, _P], _R],
) -> Callable[Concatenate[_Wrapper[_Wrapped], _P], Coroutine[Any, Any, _R]]:
    async def call(own: _Wrapper[_Wrapped], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        bare: dict[str, Any] = _bare(kwargs)
        result: Any = await _run(lambda: method(own._wrapped, *args, **bare))
        return _of(result)  # type: ignore[no-any-return]

    functools.update_wrapper(call, method)
    return call


def _of(result: Any) -> Any:
    if isinstance(result, list):
        return [_of(each) for each in result]
    return PendingPut(result) if isinstance(result, _tssd.PendingPut) else result


class _Opening(Generic[_R]):
    """What is opened: await it, or enter it."""

    def __init__(self, opening: Coroutine[Any, Any, _R]) -> None:
        self._opening = opening
        self._opened: Any = None

    def __await__(self) -> Generator[Any, None, _R]:
        return self._opening.__await__()

    async def __aenter__(self) -> _R:
        self._opened = await self
        opened: _R = await self._opened.__aenter__()
        return opened

    async def __aexit__(self, *error: Any) -> None:
        await self._opened.__aexit__(*error)


def _opens(
    method: Callable[Concatenate[_Wrapped, _P], _R], of: Callable[[_R], _Opened]
) -> Callable[Concatenate[_Wrapper[_Wrapped], _P], _Opening[_Opened]]:
    def call(own: _Wrapper[_Wrapped], /, *args: _P.args, **kwargs: _P.kwargs) -> _Opening[_Opened]:
        async def opening() -> _Opened:
            bare: dict[str, Any] = _bare(kwargs)
            return of(await _run(lambda: method(own._wrapped, *args, **bare)))

        return _Opening(opening())

    functools.update_wrapper(call, method)
    return call


class VersionSlice(_Wrapper[_tssd.VersionSlice]):
    """A tensor of a version, of which parts are read: see `tssd.VersionSlice`."""

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor, in elements."""
        return self._wrapped.get_shape()

    def get_dtype(self) -> str:
        """The dtype, as safetensors names it."""
        return self._wrapped.get_dtype()

    __getitem__ = _awaitable(_tssd.VersionSlice.__getitem__)


class OpenVersion(_Wrapper[_tssd.OpenVersion]):
    """A version that is read tensor by tensor: see `tssd.OpenVersion`."""

    @property
    def key(self) -> str:
        """The key."""
        return self._wrapped.key

    @property
    def version(self) -> int:
        """The number of the version."""
        return self._wrapped.version

    def keys(self) -> list[str]:
        """The fqns of the tensors, in the order of the state dict."""
        return self._wrapped.keys()

    def metadata(self) -> dict[str, Any] | None:
        """What was given as `metadata` when it was put; None if nothing was."""
        return self._wrapped.metadata()

    get_tensor = _awaitable(_tssd.OpenVersion.get_tensor)
    to_meta = _awaitable(_tssd.OpenVersion.to_meta)
    close = _awaitable(_tssd.OpenVersion.close)

    def get_slice(self, name: str) -> VersionSlice:
        """One tensor, to be read in parts: `await opened.get_slice(name)[0:2, 5]`."""
        return VersionSlice(self._wrapped.get_slice(name))

    async def items(self) -> AsyncIterator[tuple[str, Any]]:
        """The tensors, each with its fqn, one after the other as they are asked for."""
        for name in self.keys():
            yield name, await self.get_tensor(name)

    def __int__(self) -> int:
        return self.version

    def __index__(self) -> int:
        return self.version

    def __len__(self) -> int:
        return len(self._wrapped)

    async def __aenter__(self) -> OpenVersion:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class Pin(_Wrapper[_tssd.Pin]):
    """A version that a label holds: see `tssd.Pin`."""

    @property
    def version(self) -> int:
        """The number of the version."""
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
    """A put that goes on by itself: see `tssd.PendingPut`."""

    visible = _awaitable(_tssd.PendingPut.visible)
    result = _awaitable(_tssd.PendingPut.result)


class Publisher(_Wrapper[_tssd.Publisher]):
    """A version that is put tensor by tensor: see `tssd.Publisher`."""

    put = _awaitable(_tssd.Publisher.put)
    flush = _awaitable(_tssd.Publisher.flush)

    @property
    def report(self) -> PutReport | None:
        """What has been put, once the block has ended."""
        return self._wrapped.report

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await _run(lambda: self._wrapped.__exit__(*error))


class Receiver(_Wrapper[_tssd.Receiver]):
    """Tensors that are filled with versions of a ring: see `tssd.Receiver`."""

    receive = _awaitable(_tssd.Receiver.receive)
    close = _awaitable(_tssd.Receiver.close)

    async def __aenter__(self) -> Receiver:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class Subscription:
    """The versions of a key as they become visible: see `tssd.Store.subscribe`."""

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
            self._subscription = await _run(lambda: self._store.subscribe(self._key))
        subscription = self._subscription
        # A StopIteration cannot leave a thread.
        info = await _run(lambda: next(subscription, None))
        if info is None:
            raise StopAsyncIteration
        return info

    def close(self) -> None:
        """It ends, for who waits for it too."""
        self._is_closed = True
        if self._subscription is not None:
            self._subscription.close()


class Store(_Wrapper[_tssd.Store]):
    """State dicts by key, in immutable versions: what `tssd.Store` is, for asyncio.

    The first call connects.

    Args and errors are those of `tssd.Store`.
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
        super().__init__(_tssd.Store._unconnected(url, ca, cert, key_file, connect_timeout))

    @property
    def url(self) -> str:
        """Where it is."""
        return self._wrapped.url

    put_state_dict = _awaitable(_tssd.Store.put_state_dict)
    get_state_dict = _awaitable(_tssd.Store.get_state_dict)
    put = _awaitable(_tssd.Store.put)
    put_batch = _awaitable(_tssd.Store.put_batch)
    get = _awaitable(_tssd.Store.get)
    get_batch = _awaitable(_tssd.Store.get_batch)
    keys = _awaitable(_tssd.Store.keys)
    exists = _awaitable(_tssd.Store.exists)
    versions = _awaitable(_tssd.Store.versions)
    head = _awaitable(_tssd.Store.head)
    delete = _awaitable(_tssd.Store.delete)
    delete_batch = _awaitable(_tssd.Store.delete_batch)
    retain = _awaitable(_tssd.Store.retain)
    unpin = _awaitable(_tssd.Store.unpin)
    pins = _awaitable(_tssd.Store.pins)
    prefetch = _awaitable(_tssd.Store.prefetch)
    close = _awaitable(_tssd.Store.close)

    # Await them, or enter them: `async with store.open(key) as opened`.
    publish = _opens(_tssd.Store.publish, Publisher)
    open = _opens(_tssd.Store.open, OpenVersion)
    wait_for_version = _opens(_tssd.Store.wait_for_version, OpenVersion)
    pin = _opens(_tssd.Store.pin, Pin)
    receiver = _opens(_tssd.Store.receiver, Receiver)

    def subscribe(self, key: str) -> Subscription:
        """As `tssd.Store.subscribe`: `async for info in store.subscribe(key)`."""
        return Subscription(self._wrapped, key)

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

