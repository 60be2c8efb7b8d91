"""What goes wrong: one table from the kinds of errors to classes and advice."""

from __future__ import annotations

import os


class TssdError(Exception):
    """Every error of this package, except for arguments of a wrong type.

    Attributes:
        kind: what is wrong, as the format or the store calls it: "ChunkCorrupt".
        fqn: the leaf that it is about, if it is about one.
        key: the key in a store, if it is about one.
        version: the version of that key, if it is about one.
        advice: what to do about it, if there is something.
    """

    kind: str = ""
    fqn: str | None = None
    key: str | None = None
    version: int | None = None
    advice: str | None = None

    def __str__(self) -> str:
        # A KeyError would show the repr of its message.
        return str(self.args[0]) if self.args else ""


class TssdKeyError(TssdError, KeyError):
    """There is no such leaf, key or version."""


class TssdTypeError(TssdError, TypeError):
    """An object, or a leaf, is not of a kind that can be used here."""


class TssdValueError(TssdError, ValueError):
    """A state dict or a request breaks a rule."""


class TssdCorruptError(TssdValueError):
    """Bytes are damaged, or no archive."""


class TssdTimeoutError(TssdError, TimeoutError):
    """It has not happened in time."""


class TssdConnectionError(TssdError, ConnectionError):
    """A store cannot be reached."""


class TssdUnsupportedError(TssdError, RuntimeError):
    """This machine lacks what it takes, such as a GPU."""


class TssdMemoryError(TssdError, MemoryError):
    """There is not so much memory."""


class TssdOSError(TssdError, OSError):
    """The system failed: `errno` and `filename` say how."""

    def __str__(self) -> str:
        return OSError.__str__(self)


class TssdFileNotFoundError(TssdOSError, FileNotFoundError):
    """There is no such file."""


class TssdFileExistsError(TssdOSError, FileExistsError):
    """There is such a file."""


class TssdPermissionError(TssdOSError, PermissionError):
    """It is not permitted."""


_DAMAGED = "take another copy of the file"
_NEWER = "the file was written by a newer tssd: read it with that one"

# What is not here is damage if it can be in a file, else a wrong value.
_KINDS: dict[str, tuple[type[TssdError], str | None]] = {
    "NotTssd": (TssdCorruptError, "`tssd pack` makes an archive of a safetensors file"),
    "UnsupportedVersion": (TssdCorruptError, _NEWER),
    "UnknownIncompat": (TssdCorruptError, _NEWER),
    "IndexCodec": (TssdCorruptError, _NEWER),
    "UntypedLeaf": (TssdTypeError, None),
    "NotATensor": (TssdTypeError, "load_file gives every leaf"),
    "WrongType": (TssdTypeError, None),
    "FeatureMissing": (TssdTypeError, None),
    "NotFound": (TssdKeyError, "`safe_open(...).keys()` lists the tensors"),
    "AmbiguousFqn": (TssdValueError, "read the whole state dict"),
    "TooDeep": (TssdValueError, "make it flatter"),
    "KeyKind": (TssdValueError, None),
    "KeysCollide": (TssdValueError, None),
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
}

# What a store says, as its protocol calls it.
_STORE: dict[str, tuple[type[TssdError], str | None]] = {
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

_OS_ERRORS: tuple[type[TssdOSError], ...] = (
    TssdFileNotFoundError,
    TssdFileExistsError,
    TssdPermissionError,
)


def class_of(kind: str, rule: str) -> type[TssdError]:
    """The class for errors of a kind, given its rule in the specification."""
    known = _KINDS.get(kind) or _STORE.get(kind)
    if known is not None:
        return known[0]
    return TssdCorruptError if rule.startswith("F-") else TssdValueError


def make(
    kind: str,
    rule: str,
    message: str,
    fqn: str | None,
    advice: str | None,
    file: str | None,
    errno: int | None,
    key: str | None = None,
    version: int | None = None,
) -> TssdError:
    """The exception for an error of the extension module."""
    error: TssdError
    if kind == "Io" and errno is not None:
        builtin = type(OSError(errno, ""))
        matching = (cls for cls in _OS_ERRORS if issubclass(cls, builtin) and builtin is not OSError)
        error = next(matching, TssdOSError)(errno, os.strerror(errno), file)
    elif kind == "Io":
        error = TssdOSError(message)
    else:
        cls = class_of(kind, rule)
        if advice is None:
            _, advice = _KINDS.get(kind) or _STORE.get(kind) or (None, None)
        if advice is None and cls is TssdCorruptError:
            advice = _DAMAGED
        where = f"{file}: " if file is not None else ""
        place = f" (in `{fqn}`)" if fqn is not None and f"`{fqn}`" not in message else ""
        hint = f"; {advice}" if advice is not None else ""
        error = cls(f"{where}{message}{place}{hint}")
    error.kind, error.fqn, error.advice = kind, fqn, advice
    error.key, error.version = key, version
    return error
