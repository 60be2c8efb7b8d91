"""Conversion of objects to and from plain values with class tags (`spec/format.md`, section 5).

The classes of the standard library are in tables here. All others are in registries that the caller fills, so the names
in a file never import anything.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ._tssd import _abridge as abridge

if TYPE_CHECKING:
    import torch

_Class = TypeVar("_Class", bound=type)


class Refusal(NamedTuple):
    """The reason why an object cannot be converted, and advice."""

    message: str
    advice: str


class Tagged(NamedTuple):
    """A plain value with its class tag. The plain value of a set is a list of its elements."""

    name: str
    parameter: int
    plain: Any


class StackedWrapper:
    """A wrapper that is the local tensor of a DTensor, decomposed. Its inner tensors are stacked over the mesh."""

    def __init__(self, tagged: Tagged) -> None:
        self.tagged = tagged


# The factories of `defaultdict`, by their number in the format.
_FACTORIES: tuple[Callable[[], Any] | None, ...] = (
    None,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    frozenset,
    OrderedDict,
    Counter,
    deque,
)

# The classes whose objects can be registered for the context of wrappers, and the wrappers, by their full names.
_contexts: dict[str, type] = {}
_wrappers: dict[str, type[torch.Tensor]] = {}

_REQUIRES_GRAD, _PARAMETER = 1, 2

# The class name in the node of a DTensor whose local tensor is a wrapper, and the name of its one inner tensor: section 5
# of the specification.
DTENSOR, LOCAL_TENSOR = "torch.distributed.tensor.DTensor", "_local_tensor"


# ---- Registries ----------------------------------------------------------------------------------


def full_name(cls: type) -> str:
    """Returns the name of a class in files: `MODULE.QUALNAME`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register_wrapper(cls: _Class) -> _Class:
    """Registers a tensor class that stores its elements in other tensors, so that its tensors can be saved and loaded.

    Files store the inner tensors and the context that `__tensor_flatten__` returns. On load, `__tensor_unflatten__` gets
    them back. It runs with values from the file, so it should not trust them. Can be used as a decorator.

    Args:
        cls: the class. It has the methods `__tensor_flatten__` and `__tensor_unflatten__`, as `torch.compile` uses them.

    Returns:
        The class.

    Raises:
        TypeError: it is no such class.
    """
    if not (isinstance(cls, type) and hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")):
        raise TypeError(abridge(f"{cls!r} is no class with __tensor_flatten__ and __tensor_unflatten__"))
    _wrappers[full_name(cls)] = cls
    return cls


def register_context(cls: _Class) -> _Class:
    """Registers an enum or a dataclass, so that its objects can be saved and loaded, as in the context of a wrapper.

    Files store the name of an enum member, or the fields of a dataclass. On load, the fields are set without a call of
    `__init__` or `__post_init__`. Can be used as a decorator.

    Args:
        cls: the class, a subclass of `enum.Enum` or a dataclass.

    Returns:
        The class.

    Raises:
        TypeError: it is no such class.
    """
    if not _is_context(cls):
        raise TypeError(abridge(f"{cls!r} is neither a subclass of Enum nor a dataclass"))
    _contexts[full_name(cls)] = cls
    return cls


def register_torchao() -> None:
    """Registers the tensor classes of torchao, and the enums and dataclasses of their contexts. Imports torchao.

    Raises:
        ImportError: torchao is not installed.
    """
    import torch
    import torchao.quantization  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401

    # torchao lists its classes there for `torch.load`. Contexts also have classes of the modules that define wrappers.
    listed: list[Any] = torch.serialization.get_safe_globals()
    classes: list[Any] = [entry[0] if isinstance(entry, tuple) else entry for entry in listed]
    classes = list(filter(_is_of_torchao, classes))
    wrappers = [cls for cls in classes if issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_flatten__")]
    for cls in wrappers:
        register_wrapper(cls)
        classes += filter(_is_of_torchao, vars(sys.modules[cls.__module__]).values())
    for cls in filter(_is_context, classes):
        register_context(cls)


def _is_context(cls: object) -> bool:
    return isinstance(cls, type) and (issubclass(cls, Enum) or dataclasses.is_dataclass(cls))


def _is_of_torchao(cls: object) -> bool:
    return isinstance(cls, type) and cls.__module__.partition(".")[0] == "torchao"


# ---- Saving --------------------------------------------------------------------------------------


def decompose(value: object) -> Tagged | Refusal | None:
    """Returns the plain value of an object, with its class tag. None for objects of other classes."""
    cls = type(value)
    split = _DECOMPOSE.get(cls)
    if split:
        return split(value)
    if _contexts.get(full_name(cls)) is cls:
        return Tagged("registered", 0, {"class": full_name(cls), "value": _context_value(value)})
    torch = sys.modules.get("torch")
    for name in ("layout", "memory_format"):
        if torch and cls is getattr(torch, name, None):
            return Tagged(f"torch.{name}", 0, str(value).removeprefix("torch."))
    return None


def _context_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _defaultdict(value: defaultdict[Any, Any]) -> Tagged | Refusal:
    for number, factory in enumerate(_FACTORIES):
        if value.default_factory is factory:
            return Tagged("collections.defaultdict", number, dict(value))
    names = ", ".join("None" if factory is None else factory.__name__ for factory in _FACTORIES)
    return Refusal(
        f"a defaultdict with the factory {value.default_factory!r} cannot be stored",
        f"use one of the factories {names}, or convert it with `dict`",
    )


def _deque(value: deque[Any]) -> Tagged | Refusal:
    maxlen = value.maxlen
    if maxlen is not None and maxlen >= (1 << 48) - 1:
        return Refusal(f"a deque with maxlen {maxlen} cannot be stored", "use a smaller maxlen, or None")
    return Tagged("collections.deque", 0 if maxlen is None else maxlen + 1, list(value))


def _slice(value: slice) -> Tagged | Refusal:
    plain = (value.start, value.stop, value.step)
    if all(bound is None or type(bound) is int for bound in plain):
        return Tagged("slice", 0, plain)
    return Refusal(f"{value!r} cannot be stored", "use a slice of ints and None")


def _timedelta_fields(value: datetime.timedelta) -> tuple[int, int, int]:
    return value.days, value.seconds, value.microseconds


def _timezone(value: datetime.timezone) -> Tagged:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return Tagged("datetime.timezone", 0, (*_timedelta_fields(offset), name[0] if name else None))


def _time(value: datetime.time | datetime.datetime) -> Tagged | Refusal:
    zone = value.tzinfo
    if value.fold:
        return Refusal(f"{value!r} cannot be stored: ISO 8601 has no fold", "convert it to UTC")
    if zone is not None and (type(zone) is not datetime.timezone or len(zone.__getinitargs__()) > 1):  # type: ignore[attr-defined]
        return Refusal(
            f"{value!r} cannot be stored: only the offset of its time zone would be kept",
            "convert it with `.astimezone(datetime.timezone.utc)`, and store the name of the zone beside it",
        )
    return Tagged(f"datetime.{type(value).__name__}", 0, value.isoformat())


_DECOMPOSE: dict[type, Callable[[Any], Tagged | Refusal]] = {
    Counter: lambda value: Tagged("collections.Counter", 0, dict(value)),
    defaultdict: _defaultdict,
    set: lambda value: Tagged("set", 0, list(value)),
    frozenset: lambda value: Tagged("frozenset", 0, list(value)),
    SimpleNamespace: lambda value: Tagged("types.SimpleNamespace", 0, dict(vars(value))),
    deque: _deque,
    range: lambda value: Tagged("range", 0, (value.start, value.stop, value.step)),
    slice: _slice,
    datetime.timedelta: lambda value: Tagged("datetime.timedelta", 0, _timedelta_fields(value)),
    datetime.timezone: _timezone,
    datetime.date: lambda value: Tagged("datetime.date", 0, value.isoformat()),
    datetime.time: _time,
    datetime.datetime: _time,
    StackedWrapper: lambda value: value.tagged,
}
_PATHS = ("PurePosixPath", "PosixPath", "PureWindowsPath", "WindowsPath")
for _name in _PATHS:
    _DECOMPOSE[getattr(pathlib, _name)] = lambda value: Tagged(f"pathlib.{type(value).__name__}", 0, str(value))

_BASES: tuple[Any, ...] = (OrderedDict, dict, list, tuple, str, bytes, int, float, complex)


def to_base(value: Any) -> Any:
    """Returns an object of a subclass of a builtin class as an object of that class. None for other objects."""
    for base in _BASES:
        if isinstance(value, base):
            # The methods of the builtin class: those of the subclass may do something else.
            if issubclass(base, dict):
                result: Any = base(base.items(value))
                if base is OrderedDict and hasattr(value, "_metadata"):
                    result._metadata = value._metadata
                return result
            if base in (int, float, complex):
                # Negation returns an object of the builtin class. Twice, it keeps -0.0.
                return base.__neg__(base.__neg__(value))  # pyright: ignore[reportArgumentType]
            return base.__getitem__(value, slice(None))
    return None


def flatten(tensor: Any) -> Tagged | Refusal | None:
    """Returns the inner tensors and the context of a wrapper. None for tensors of other classes."""
    cls = type(tensor)
    if not hasattr(cls, "__tensor_flatten__"):
        return None
    name = full_name(cls)
    if _wrappers.get(name) is not cls:
        call = "tssd.register_torchao()" if cls.__module__.partition(".")[0] == "torchao" else "tssd.register_wrapper"
        return Refusal(
            f"a tensor of class {name} cannot be stored: the class is not registered",
            f"register it with {call} before you save and before you load",
        )
    names, context = tensor.__tensor_flatten__()
    if not names:
        return Refusal(f"a tensor of class {name} cannot be stored: it has no inner tensors", "store what it is made of")
    return make_wrapper(tensor, name, {inner: getattr(tensor, inner) for inner in names}, context)


def make_wrapper(tensor: torch.Tensor, name: str, tensors: dict[str, Any], context: object) -> Tagged:
    """Returns the plain value of a wrapper: its inner tensors and its context, and the properties of `tensor`."""
    import torch

    is_parameter = isinstance(tensor, torch.nn.Parameter)
    flags = _REQUIRES_GRAD * tensor.requires_grad + _PARAMETER * is_parameter
    plain = {
        "class": name,
        "tensors": tensors,
        "context": context,
        "size": torch.Size(tensor.shape),
        "stride": torch.Size(tensor.stride()),
    }
    return Tagged("wrapper", flags, plain)


def find_difference(
    own: dict[str, Any], stored: dict[str, Any], allow_pickle: bool
) -> tuple[str, str, str] | None:
    """Compares a wrapper that is to be filled with the stored one.

    Args:
        own: the plain value of the wrapper that is to be filled.
        stored: the plain value of the stored wrapper, with the names of the inner tensors in place of the tensors.
        allow_pickle: whether the context may contain objects that are pickled.

    Returns:
        None if all of them agree: class, context, size, stride and names of the inner tensors. Otherwise the kind of
        the error, its message and the advice.
    """
    from ._tssd import save

    def differs(field: str) -> bool:
        own_bytes, stored_bytes = (save({field: each[field]}, allow_pickle=allow_pickle) for each in (own, stored))
        return own_bytes != stored_bytes

    own_class, stored_class = own["class"], stored["class"]
    if DTENSOR in (own_class, stored_class) and (own_class != stored_class or differs("context")):
        message = f"it is stored as {_sharding(stored)}, and `into` has {_sharding(own)}"
        return "MeshMismatch", message, "give the stored sharding: a tensor that wraps tensors is not resharded"
    if own_class != stored_class:
        message = f"it is stored as a tensor of class {stored_class}, and `into` has one of class {own_class}"
        return "WrongType", message, "give a tensor of the stored class"
    if set(own["tensors"]) != set(stored["tensors"]):
        message = f"it is stored with the inner tensors {stored['tensors']}, and `into` has {list(own['tensors'])}"
        return "WrongType", message, "give a tensor that is quantized in the same way"
    if differs("context"):
        message = f"it is stored with the context {stored['context']}, and `into` has {own['context']}"
        return "WrongType", message, "give a tensor that is quantized in the same way"
    for field in ("size", "stride"):
        if differs(field):
            message = f"it is stored with the {field} {list(stored[field])}, and `into` has {list(own[field])}"
            return "SliceMismatch", message, "give a tensor of the stored shape and strides"
    return None


def _sharding(wrapper: dict[str, Any]) -> str:
    if wrapper["class"] != DTENSOR:
        return "a tensor that is not sharded"
    parts = [
        f"{name}({dim}) in {count}" if factor == 1 else f"{name}({dim}, {factor}) in {count}"
        for name, dim, factor, count in wrapper["context"]
    ]
    return f"a DTensor with {' and '.join(parts)} parts" if parts else "a DTensor that each rank has whole"


# ---- Loading -------------------------------------------------------------------------------------


def compose(name: str, parameter: int, plain: Any) -> Any:
    """Returns the object of a plain value with a class tag, or a `Refusal`."""
    if name == "wrapper":
        return unflatten(parameter, plain)
    if name == "registered":
        return _registered(plain)
    return _COMPOSE[name](parameter, plain)


def unflatten(flags: int, plain: dict[str, Any]) -> torch.Tensor | Refusal:
    """Returns the wrapper of its plain value."""
    name = plain["class"]
    cls = _wrappers.get(name)
    if cls is None:
        call = "tssd.register_torchao()" if name.startswith("torchao.") else "tssd.register_wrapper"
        return Refusal(f"a tensor of class {name} cannot be loaded: the class is not registered", f"call {call} first")
    tensor = cls.__tensor_unflatten__(plain["tensors"], plain["context"], plain["size"], tuple(plain["stride"]))  # type: ignore[attr-defined]
    return with_flags(tensor, flags)


def with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """Returns a tensor as a parameter or one that requires a gradient, as the flags of a wrapper say."""
    import torch

    requires_grad = bool(flags & _REQUIRES_GRAD)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _registered(plain: dict[str, Any]) -> Any:
    name, value = plain["class"], plain["value"]
    cls: Any = _contexts.get(name)
    if cls is None:
        call = "tssd.register_torchao()" if name.startswith("torchao.") else "tssd.register_context"
        return Refusal(f"an object of class {name} cannot be loaded: the class is not registered", f"call {call} first")
    mismatch = Refusal(
        f"an object of class {name} cannot be loaded: this version of the class has other fields or members",
        "install the version that wrote the file",
    )
    if issubclass(cls, Enum):
        return cls.__members__.get(value, mismatch) if type(value) is str else mismatch
    fields = [field.name for field in dataclasses.fields(cls)]
    if type(value) is not dict or list(value) != fields:
        return mismatch
    result = object.__new__(cls)
    for field, content in value.items():
        object.__setattr__(result, field, content)
    return result


def _make_counter(_: int, plain: dict[Any, Any]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, plain)
    return counter


def _make_timezone(_: int, plain: tuple[int, int, int, str | None]) -> datetime.timezone:
    *offset, name = plain
    delta = datetime.timedelta(*offset)
    return datetime.timezone(delta) if name is None else datetime.timezone(delta, name)


def _make_path(name: str) -> Callable[[int, str], pathlib.PurePath]:
    """Returns the constructor of a path. A path of the other system becomes a pure one."""
    is_windows = name.endswith("WindowsPath")
    if not name.startswith("Pure") and is_windows != (os.name == "nt"):
        name = f"Pure{name}"
    cls: type[pathlib.PurePath] = getattr(pathlib, name)
    return lambda _, text: cls(text)


def _torch_constant(kind: str) -> Callable[[int, str], Any]:
    def find(_: int, name: str) -> Any:
        try:
            import torch
        except ImportError:
            return Refusal(f"a torch.{kind} needs torch", "install torch")
        # `vars` calls no `__getattr__`, which imports submodules.
        found = vars(torch).get(name)
        if type(found) is getattr(torch, kind):
            return found
        return Refusal(f"this torch has no {kind} {name}", "read it with a newer torch")

    return find


_COMPOSE: dict[str, Callable[[int, Any], Any]] = {
    "collections.Counter": _make_counter,
    "collections.defaultdict": lambda factory, plain: defaultdict(_FACTORIES[factory], plain),
    "set": lambda _, plain: set(plain),
    "frozenset": lambda _, plain: frozenset(plain),
    "types.SimpleNamespace": lambda _, plain: SimpleNamespace(**plain),
    "collections.deque": lambda maxlen, plain: deque(plain, maxlen - 1 if maxlen else None),
    "range": lambda _, plain: range(*plain),
    "slice": lambda _, plain: slice(*plain),
    "datetime.timedelta": lambda _, plain: datetime.timedelta(*plain),
    "datetime.timezone": _make_timezone,
    "datetime.date": lambda _, text: datetime.date.fromisoformat(text),
    "datetime.time": lambda _, text: datetime.time.fromisoformat(text),
    "datetime.datetime": lambda _, text: datetime.datetime.fromisoformat(text),
    "torch.layout": _torch_constant("layout"),
    "torch.memory_format": _torch_constant("memory_format"),
}
for _name in _PATHS:
    _COMPOSE[f"pathlib.{_name}"] = _make_path(_name)
