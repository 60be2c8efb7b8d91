"""Loads files of torch.save that hold more than torch's restricted unpickler knows.

torch's unpickler calls only functions that it was told of. For classes of numpy and of `collections` it is told of
stand-ins, so no code of numpy runs on bytes of the file. A stand-in checks what it is given. After the load, `_resolve`
puts the objects in the places of their stand-ins.
"""

from __future__ import annotations

import collections
import contextlib
import math
import pickle
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import torch

# Dtypes as numpy pickles them: bools, ints, floats, complex numbers, bytes and strs.
_DTYPE_CODE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,9}")

_BIT_GENERATORS = {
    "MT19937": "_mt19937",
    "PCG64": "_pcg64",
    "PCG64DXSM": "_pcg64",
    "Philox": "_philox",
    "SFC64": "_sfc64",
}

# Classes of Python that may be the factory of a defaultdict.
_FACTORIES: tuple[type, ...] = (bool, bytes, dict, float, int, list, set, str, tuple)
_COLLECTIONS = (collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque)


# Before torch 2.6, a stand-in cannot have the name of another function.
_HAS_STAND_INS = hasattr(torch.serialization, "safe_globals") and "uple" in str(
    torch.serialization.add_safe_globals.__annotations__
)


class UnsupportedObject(Exception):
    """The file holds an object of a known class with a value that is not supported."""


class _Thread(threading.local):
    """State of the load that a thread runs."""

    is_loading = False

    def __init__(self) -> None:
        # The lists and dicts that stand for other containers, by `id`, each with the container, still empty.
        self.containers: dict[int, tuple[Any, Any]] = {}


_thread = _Thread()

# torch's table of functions is that of the process, so one thread at a time changes it.
_table_lock = threading.Lock()


def load(source: str | IO[bytes], *, is_mapped: bool = False) -> Any:
    """Returns the object that torch.save wrote.

    Generators of numpy become the dicts that their `state` is, or that of their bit generator.

    Raises:
        UnsupportedObject: the file holds an array, scalar, dtype or class that is not supported.
        pickle.UnpicklingError: the file names a class that neither torch nor this module knows.
        Exception: as torch.load.
    """

    def load_once() -> Any:
        loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
        try:
            return _resolve(loaded, {})
        except RecursionError as error:
            raise UnsupportedObject("its containers are nested too deep") from error

    try:
        # Most files need no stand-ins. Those of a load in another thread are refused.
        return load_once()
    except pickle.UnpicklingError:
        if not _HAS_STAND_INS:
            raise
    if not isinstance(source, str):
        source.seek(0)
    with _table_lock, _only_stand_ins():
        _thread.is_loading = True
        try:
            return load_once()
        finally:
            _thread.is_loading = False
            _thread.containers.clear()


@contextlib.contextmanager
def _only_stand_ins() -> Iterator[None]:
    """Tells torch of the stand-ins, in place of functions of the same names."""
    trusted = torch.serialization.get_safe_globals()
    others = [entry for entry in trusted if _name(entry) not in _STAND_INS]
    try:
        if len(others) < len(trusted):
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(others)
        added: Any = [(stand_in, name) for name, stand_in in _STAND_INS.items()]
        with torch.serialization.safe_globals(added):
            yield
    finally:
        if len(others) < len(trusted):
            torch.serialization.add_safe_globals(trusted)


def _name(entry: Any) -> str:
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _require_load() -> None:
    # torch's table is that of the process. A load of another thread must not get stand-ins.
    if not _thread.is_loading:
        raise pickle.UnpicklingError("the class is known to tssd.convert only")


class _StandIn:
    """An object of a class of numpy, as the file describes it."""

    def __init__(self, *_arguments: Any) -> None:
        _require_load()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def result(self) -> Any:
        raise UnsupportedObject(f"{type(self).__name__.strip('_').lower()} of numpy without a value")


class _Dtype(_StandIn):
    state: Any = (3, "|", None, None, None)

    def __init__(self, code: str, _align: bool = False, _copy: bool = True) -> None:
        _require_load()
        self.code = code

    def result(self) -> Any:
        import numpy as np

        code = getattr(self, "code", None)
        state: tuple[Any, ...] = self.state if isinstance(self.state, tuple) else ()
        byte_order, *structure = state[1:5] or (None,)
        is_plain = structure == [None, None, None] and byte_order in ("<", ">", "|")
        if not is_plain or not isinstance(code, str) or not _DTYPE_CODE.fullmatch(code):
            raise UnsupportedObject(f"dtype {code!r} of numpy is not supported")
        return np.dtype(f"{byte_order}{code}")


def _dtype_of(stand_in: Any) -> Any:
    if not isinstance(stand_in, _Dtype):
        raise UnsupportedObject("array or scalar of numpy without a dtype")
    return stand_in.result()


class _Array(_StandIn):
    def result(self) -> Any:
        import numpy as np

        state = getattr(self, "state", None)
        if not isinstance(state, tuple) or len(state) != 5:
            return super().result()
        _, shape, dtype, is_fortran, content = state
        dtype = _dtype_of(dtype)
        sizes = shape if isinstance(shape, tuple) else (-1,)
        is_shape = all(type(size) is int and size >= 0 for size in sizes) and len(sizes) <= 32
        if not is_shape or not isinstance(content, bytes) or math.prod(sizes) * dtype.itemsize != len(content):
            raise UnsupportedObject(f"array of numpy of shape {shape!r} does not have the bytes of its elements")
        if dtype.itemsize == 0:
            raise UnsupportedObject("array of numpy of empty strings is not supported")
        array = np.frombuffer(content, dtype).reshape(sizes, order="F" if is_fortran else "C")
        return array.copy(order="K")


class _Scalar(_StandIn):
    def __init__(self, dtype: Any, content: Any = None) -> None:
        _require_load()
        self.dtype, self.content = dtype, content

    def result(self) -> Any:
        import numpy as np

        dtype, content = _dtype_of(getattr(self, "dtype", None)), self.content
        if not isinstance(content, bytes) or len(content) != dtype.itemsize:
            raise UnsupportedObject(f"scalar of numpy of dtype {dtype} does not have the bytes of an element")
        return np.frombuffer(content, dtype)[0] if content else dtype.type()


class _SeedSequence(_StandIn):
    """What a bit generator was seeded with. Its state does not need it."""

    def result(self) -> Any:
        return None


class _BitGenerator(_StandIn):
    def result(self) -> Any:
        state = getattr(self, "state", None)
        # From numpy 1.25 on, the seed sequence comes with the state.
        state = state[0] if isinstance(state, tuple) and state else state
        return state if isinstance(state, dict) else super().result()


class _Generator(_StandIn):
    """A `Generator` or a `RandomState`."""

    def __init__(self, bit_generator: Any = None, _constructor: Any = None) -> None:
        _require_load()
        self.state = bit_generator

    def result(self) -> Any:
        state = getattr(self, "state", None)
        if isinstance(state, _BitGenerator):
            return state.result()
        return state if isinstance(state, dict) else super().result()


def _reconstruct(_class: Any = None, _shape: Any = None, _code: Any = None) -> _Array:
    return _Array()


def _scalar(dtype: Any, content: Any = None) -> _Scalar:
    return _Scalar(dtype, content)


def _bit_generator(_class: Any = None) -> _BitGenerator:
    return _BitGenerator()


def _generator(bit_generator: Any = None, _constructor: Any = None) -> _Generator:
    return _Generator(bit_generator)


def _seed_sequence(*_arguments: Any) -> _SeedSequence:
    return _SeedSequence()


class _Name:
    """A class that the file only names: to be created, or as the factory of a defaultdict."""

    def __init__(self, factory: Callable[[], Any] | None = None) -> None:
        self.factory = factory

    def __call__(self, *arguments: Any) -> bytes:
        # Protocol 2 has no other form of an empty bytes object.
        if self.factory is not bytes or arguments:
            raise UnsupportedObject("the file calls a class that it may only name")
        return b""


def _deque(items: Iterable[Any] = (), maxlen: int | None = None) -> list[Any]:
    _require_load()
    # torch's unpickler extends only lists.
    content = list(items)
    _thread.containers[id(content)] = content, collections.deque(maxlen=maxlen)
    return content


def _defaultdict(factory: Any = None, *arguments: Any) -> dict[Any, Any]:
    _require_load()
    if isinstance(factory, _Name):
        factory = factory.factory
    elif factory is _deque or factory is _defaultdict:
        factory = collections.deque if factory is _deque else collections.defaultdict
    if factory not in (None, *_FACTORIES, *_COLLECTIONS):
        raise UnsupportedObject("factory of a defaultdict is not supported")
    # torch's unpickler adds items only to dicts.
    content = dict(*arguments)
    _thread.containers[id(content)] = content, collections.defaultdict(factory)
    return content


# torch knows `set`.
_BUILTIN_NAMES = {f"builtins.{cls.__name__}": _Name(cls) for cls in _FACTORIES if cls is not set}
_CLASS = _Name()


# What stands for each name that a file may have.
_STAND_INS: dict[str, Any] = {
    **_BUILTIN_NAMES,
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "numpy.ndarray": _CLASS,
    "numpy.dtype": _Dtype,
    # numpy 2 has other modules than numpy 1.
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    **{f"numpy.random.{module}.{name}": _CLASS for name, module in _BIT_GENERATORS.items()},
    "numpy.random._pickle.__bit_generator_ctor": _bit_generator,
    "numpy.random._pickle.__generator_ctor": _generator,
    "numpy.random._pickle.__randomstate_ctor": _generator,
    "numpy.random.bit_generator.SeedSequence": _CLASS,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _seed_sequence,
    # torch calls `__setstate__` only of classes that it was told of.
    **{f"{__name__}.{cls.__name__}": cls for cls in (_Array, _BitGenerator, _Generator, _SeedSequence)},
}
_FUNCTIONS = [stand_in for stand_in in _STAND_INS.values() if not isinstance(stand_in, _Name)]


def _resolve(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """Returns a value with objects in place of their stand-ins. Lists and dicts are changed in place.

    `seen` has for each `id` the value, which keeps the `id` from being used again, and its result.
    """
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, _StandIn):
        result = _resolve(value.result(), seen)
    elif isinstance(value, torch.Size):
        return value
    elif isinstance(value, (tuple, set, frozenset)):
        items = [_resolve(item, seen) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        result = value if is_same else type(value)(items)
    elif isinstance(value, (dict, list)):
        _, result = _thread.containers.get(id(value), (value, value))
        # A container may contain itself.
        seen[id(value)] = value, result
        if isinstance(value, list):
            items = [_resolve(item, seen) for item in value]
            value.clear()
            result.extend(items)
        else:
            entries = [(_resolve(key, seen), _resolve(item, seen)) for key, item in value.items()]
            value.clear()
            result.update(dict(entries))
    elif isinstance(value, _Name) or any(value is stand_in for stand_in in _FUNCTIONS):
        raise UnsupportedObject("it holds a class or a function, no object of one")
    else:
        return value
    seen[id(value)] = value, result
    return result
