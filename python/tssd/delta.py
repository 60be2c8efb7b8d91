"""Deltas: files with the difference between two versions of a state dict.

    tssd.delta.make("step-1.tssd", "step-2.tssd", "1-to-2.tssd")
    tssd.delta.apply("step-1.tssd", "1-to-2.tssd", "step-2-again.tssd")
    tssd.delta.fold(["1-to-2.tssd", "2-to-3.tssd"], "1-to-3.tssd")

A delta names the content of its base and the content that it leads to. A file with other content is refused as its
base. All functions verify the bytes that become part of what they write.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any, Literal

from ._tssd import _delta_apply, _delta_fold, _delta_make
from ._tssd import load as _load

__all__ = ["DeltaReport", "apply", "fold", "load", "make"]

_Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class DeltaReport:
    """Size of a delta.

    Attributes:
        listed_elements: the number of elements that the delta changes one by one.
        dense_elements: the number of elements that the delta holds whole in dense blocks.
        file_len: the length of the file in bytes.
    """

    listed_elements: int
    dense_elements: int
    file_len: int


def make(
    base: _Path,
    result: _Path,
    filename: _Path,
    *,
    classes: Literal[1, 2, 4, "auto"] = 1,
    fsync: bool = True,
) -> DeltaReport:
    """Writes the delta from one version to another.

    Tensors with the same path, dtype, shape, strides and slice become differences. All other leaves are stored whole.

    Args:
        base: the old version: a file, or a directory with a manifest.
        result: the new version.
        filename: the file to write.
        classes: the number of classes of elements. More classes make the delta smaller, and make it slower to make and
            to apply. Only deltas of one class can be folded.
        fsync: whether the file is flushed to the disk before this function returns.

    Raises:
        TssdCorruptError: a version is damaged, or is no archive.
        TssdOSError: the operating system reported an error.
    """
    return DeltaReport(*_delta_make(base, result, filename, str(classes), fsync))


def apply(
    base: _Path, delta: _Path, filename: _Path, *, compression: str | None = None, fsync: bool = True
) -> None:
    """Writes the new version, given the old version and the delta.

    The content of the file is that of the version that the delta was made from. It has digests. If the base has this
    content already, it is written once more.

    Args:
        base: the old version: a file, or a directory with a manifest.
        delta: the delta.
        filename: the file to write.
        compression: as `tssd.save_file`.
        fsync: whether the file is flushed to the disk before this function returns.

    Raises:
        TssdValueError: the base is not the base of the delta, or `delta` is no delta.
        TssdCorruptError: the base or the delta is damaged.
        TssdOSError: the operating system reported an error.
    """
    _delta_apply(base, delta, filename, compression, fsync)


def load(
    base: _Path,
    delta: _Path,
    device: Any = "cpu",
    *,
    framework: Literal["pt", "torch", "pytorch", "np", "numpy"] | None = None,
    allow_pickle: bool = False,
) -> dict[Any, Any]:
    """Returns the state dict of the new version, given the old version and the delta.

    Memory holds the state dict up to three times during the call.

    Args:
        base: the old version: a file, or a directory with a manifest.
        delta: the delta.
        device: as `tssd.load_file`.
        framework: as `tssd.load_file`.
        allow_pickle: as `tssd.load_file`.

    Raises:
        TssdError: as `apply` and `tssd.load`.
    """
    data = _delta_apply(base, delta, None, None, False)
    assert data is not None
    return _load(data, device, framework=framework, allow_pickle=allow_pickle)


def fold(deltas: Iterable[_Path], filename: _Path, *, fsync: bool = True) -> int:
    """Writes one delta with the effect of several, each of which continues the one before it. No base is needed.

    Args:
        deltas: two deltas or more, the oldest first. All must have one class.
        filename: the file to write.
        fsync: whether the file is flushed to the disk before this function returns.

    Returns:
        The length of the file in bytes.

    Raises:
        TssdValueError: a file does not continue the one before it, has several classes, or is no delta.
        TypeError: `deltas` is one path.
        TssdCorruptError: a delta is damaged.
        TssdOSError: the operating system reported an error.
    """
    if isinstance(deltas, (str, bytes, os.PathLike)):
        raise TypeError("deltas is an iterable of paths, not one path")
    return _delta_fold(list(deltas), filename, fsync)
