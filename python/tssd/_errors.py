"""Exception classes, and the tables that map error kinds to classes and advice."""

from __future__ import annotations

import os
from typing import cast

from ._tssd import _abridge as abridge
from ._tssd import _abridge_name as abridge_name


class TssdError(Exception):
    """Base class of the errors of this package. An argument of a wrong type raises a plain `TypeError`.

    Attributes:
        kind: the error kind of the format or the store, such as "ChunkCorrupt".
        fqn: the fqn of the leaf; None if the error is not about a leaf.
        key: the key in a store; None if the error is not about a key.
        version: the version number of that key; None if the error is not about a version.
        advice: how to fix the error; None if there is no advice.
    """

    kind: str = ""
    fqn: str | None = None
    key: str | None = None
    version: int | None = None
    advice: str | None = None
    # The text of an error of the operating system, if it is not that of `OSError`.
    _text: str | None = None

    def __str__(self) -> str:
        if self._text is not None:
            return self._text
        # `KeyError.__str__` returns the repr of the message.
        return str(self.args[0]) if self.args else ""


class TssdKeyError(TssdError, KeyError):
    """The leaf, key or version does not exist."""


class TssdTypeError(TssdError, TypeError):
    """An object or a leaf has a type that is not supported here."""


class TssdValueError(TssdError, ValueError):
    """A state dict or a request violates a rule."""


class TssdCorruptError(TssdValueError):
    """The bytes are damaged, or are not an archive."""


class TssdTimeoutError(TssdError, TimeoutError):
    """The operation did not complete in time."""


class TssdConnectionError(TssdError, ConnectionError):
    """The store cannot be reached.

    If the operating system reported an error, `errno`, `strerror` and `filename` give details, and the exception is
    also of the class of Python for that number, such as `ConnectionRefusedError`. `filename` is a URL for a bucket,
    etcd or a daemon over TCP.
    """


class TssdUnsupportedError(TssdError, RuntimeError):
    """This machine lacks a required feature, such as a GPU."""


class TssdMemoryError(TssdError, MemoryError):
    """There is not enough memory."""


class TssdOSError(TssdError, OSError):
    """The operating system reported an error. `errno`, `strerror` and `filename` give details.

    The exception is also of the class of Python for that number, such as `NotADirectoryError`.
    """

    def __str__(self) -> str:
        return abridge(OSError.__str__(self)) if self._text is None else self._text


class TssdFileNotFoundError(TssdOSError, FileNotFoundError):
    """The file does not exist."""


class TssdFileExistsError(TssdOSError, FileExistsError):
    """The file already exists."""


class TssdIsADirectoryError(TssdOSError, IsADirectoryError):
    """The path is a directory and not a file."""


class TssdNotADirectoryError(TssdOSError, NotADirectoryError):
    """A part of the path is a file and not a directory."""


class TssdPermissionError(TssdOSError, PermissionError):
    """Permission was denied."""


_DAMAGED_ADVICE = "take another copy of the file"
_NEWER_ADVICE = "the file was written by a newer tssd: read it with that one"

# Error kinds of the format, each with its class and default advice. `exception_class` has the rule for all other kinds.
_FORMAT_KINDS: dict[str, tuple[type[TssdError], str | None]] = {
    "NotTssd": (TssdCorruptError, "`tssd pack` makes an archive of a safetensors file"),
    "UnsupportedVersion": (TssdCorruptError, _NEWER_ADVICE),
    "UnknownIncompat": (TssdCorruptError, _NEWER_ADVICE),
    "IndexCodec": (TssdCorruptError, _NEWER_ADVICE),
    "UntypedLeaf": (TssdTypeError, None),
    "NotATensor": (TssdTypeError, "load_file gives every leaf"),
    "WrongType": (TssdTypeError, None),
    "UnsupportedDtype": (TssdTypeError, _NEWER_ADVICE),
    "FeatureMissing": (TssdTypeError, None),
    "NotFound": (TssdKeyError, "`safe_open(...).keys()` lists the tensors"),
    "AmbiguousFqn": (TssdValueError, "read the whole state dict"),
    "TooDeep": (TssdValueError, "make it flatter"),
    "KeyKind": (TssdValueError, None),
    "KeysCollide": (TssdValueError, None),
    "NameLength": (TssdValueError, None),
    "PartialPlacement": (TssdValueError, "reduce it first: `.redistribute(...)` or `.full_tensor()`"),
    "MeshMismatch": (TssdValueError, None),
    "UnknownPlacement": (TssdValueError, None),
    "SliceMismatch": (TssdValueError, None),
    "OutsideGlobal": (TssdValueError, None),
    "RankTooLarge": (TssdValueError, None),
    "ShapeOverflow": (TssdValueError, None),
    "Misaligned": (TssdValueError, "clone one of the tensors that overlap"),
    "LimitExceeded": (TssdMemoryError, None),
    "BlobElsewhere": (TssdValueError, "it is a shard set: `tssd convert SET -o FILE` joins its archives"),
    "BaseMissing": (TssdValueError, "it is a delta: `tssd.delta.load(base, delta)` loads what it leads to"),
    "NotFoldable": (TssdValueError, "make the deltas with classes=1, or apply them one after the other"),
}

# Error kinds of the store protocol, each with its class and default advice.
_STORE_KINDS: dict[str, tuple[type[TssdError], str | None]] = {
    "not_found": (TssdKeyError, None),
    "invalid": (TssdValueError, None),
    "refused": (TssdValueError, None),
    "rejected": (TssdValueError, None),
    "overtaken": (TssdValueError, None),
    "corrupt": (TssdCorruptError, "get another version, or put it again"),
    "busy": (TssdTimeoutError, "try again later"),
    "timeout": (TssdTimeoutError, None),
    "unreachable": (TssdConnectionError, None),
    "unsupported": (TssdUnsupportedError, None),
    "io": (TssdOSError, None),
}

# Classes of system errors, each with the class of this package and the class of Python that it inherits from.
_OS_ERRORS: dict[tuple[type[TssdError], type[OSError]], type[TssdError]] = {
    (TssdOSError, FileExistsError): TssdFileExistsError,
    (TssdOSError, FileNotFoundError): TssdFileNotFoundError,
    (TssdOSError, IsADirectoryError): TssdIsADirectoryError,
    (TssdOSError, NotADirectoryError): TssdNotADirectoryError,
    (TssdOSError, PermissionError): TssdPermissionError,
}


def _add_os_errors() -> None:
    """Adds the classes that have no definition."""
    pending: list[type[OSError]] = [OSError]
    while pending:
        builtin = pending.pop()
        # `OSError` has subclasses elsewhere, such as `socket.gaierror`, that no number belongs to.
        pending += (cls for cls in builtin.__subclasses__() if cls.__module__ == "builtins")
        for base in (TssdOSError, TssdConnectionError):
            if issubclass(base, builtin) or (base, builtin) in _OS_ERRORS:
                continue
            stem = base.__name__.removesuffix("Error")
            name = stem + builtin.__name__.removeprefix(stem.removeprefix("Tssd"))
            content = {"__module__": __name__, "__doc__": f"A `{base.__name__}` that is a `{builtin.__name__}`."}
            _OS_ERRORS[base, builtin] = cast("type[TssdError]", type(name, (base, builtin), content))


_add_os_errors()


def __getattr__(name: str) -> type[TssdError]:
    # So pickle finds the classes that have no definition.
    for cls in _OS_ERRORS.values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _os_error_class(base: type[TssdError], errno: int) -> type[TssdError]:
    """Returns the subclass of a class for the number of a system error, or the class itself."""
    return _OS_ERRORS.get((base, type(OSError(errno, ""))), base)


def exception_class(kind: str, rule: str) -> type[TssdError]:
    """Returns the class for an error kind, given the number of its rule in the specification.

    A kind that is in neither table is corruption if its rule is one of the file format, "F-...". Otherwise it is an
    invalid value.
    """
    entry = _FORMAT_KINDS.get(kind) or _STORE_KINDS.get(kind)
    if entry is not None:
        return entry[0]
    return TssdCorruptError if rule.startswith("F-") else TssdValueError


def new_exception(
    kind: str,
    rule: str,
    message: str,
    fqn: str | None,
    advice: str | None,
    file: str | None,
    errno: int | None,
    key: str | None = None,
    version: int | None = None,
    strerror: str | None = None,
) -> TssdError:
    """Creates the exception for an error of the extension module, or of a module of this package.

    `strerror` is the text of a system error; None for that of its number.
    """
    error: TssdError
    cls = TssdOSError if kind == "Io" else exception_class(kind, rule)
    if errno is not None and issubclass(cls, OSError):
        error = _os_error_class(cls, errno)(errno, strerror or os.strerror(errno), file)
        if kind != "Io":
            error._text = abridge(message)
    elif kind == "Io":
        error = TssdOSError(None, message, file)
        error._text = abridge(message if file is None else f"{file}: {message}")
    else:
        if advice is None:
            _, advice = _FORMAT_KINDS.get(kind) or _STORE_KINDS.get(kind) or (None, None)
        if advice is None and cls is TssdCorruptError:
            advice = _DAMAGED_ADVICE
        file_prefix = f"{file}: " if file is not None else ""
        name = abridge_name(fqn) if fqn is not None else ""
        fqn_suffix = f" (in `{name}`)" if fqn is not None and f"`{name}`" not in message else ""
        # The text of an error of a store ends with its help line.
        advice_suffix = f"; {advice}" if advice is not None and not message.endswith(advice) else ""
        error = cls(abridge(f"{file_prefix}{message}{fqn_suffix}{advice_suffix}"))
    error.kind, error.fqn, error.advice = kind, fqn, advice
    error.key, error.version = key, version
    return error
