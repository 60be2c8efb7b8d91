"""Indices of a tensor that is read in parts: those that are more than ints, slices and `...`."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

from ._tssd import _abridge as abridge


def split(index: Any, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], Any]:
    """Splits an index into the basic index that selects what is read, and the index that is applied to it.

    The second is None if the first is the whole index. Of a dimension, a slice reads its range, an int reads one
    position, and a list or an array of ints reads the range from its lowest to its highest. A mask reads all of its
    dimensions. If frameworks interpret a part in different ways, the whole tensor is read.

    Raises:
        IndexError: there are too many indices, or one is out of range.
        TypeError: a part is no index.
    """
    parts = [_normalize(part) for part in (index if isinstance(index, tuple) else (index,))]
    if all(type(part) in (int, slice, EllipsisType) for part in parts):
        return tuple(parts), None
    if any(_is_irregular(part) for part in parts):
        return (...,), index
    counts = [_count_dims(part) for part in parts]
    skipped = len(shape) - sum(counts)
    if skipped < 0 or sum(part is ... for part in parts) > 1:
        raise IndexError(f"too many indices for a tensor of {len(shape)} dimensions")
    read: list[Any] = []
    rest: list[Any] = []
    dim = 0
    for part, count in zip(parts, counts, strict=True):
        if part is ...:
            read.append(part)
            rest.append(part)
            dim += skipped
        elif isinstance(part, slice):
            read.append(part)
            rest.append(slice(None))
        elif count == 1 and _kind(part) == "int":
            positions, low, high = _positions(part, shape[dim], dim)
            read.append(slice(low, high + 1))
            rest.append(positions)
        else:
            read += [slice(None)] * count
            rest.append(part)
        dim += count
    return tuple(read), tuple(rest)


def _normalize(part: Any) -> Any:
    """Returns ints of numpy and torch as those of Python, and sequences as lists."""
    if part is None or type(part) in (int, bool, slice, EllipsisType):
        return part
    if isinstance(part, list | tuple | range):
        return [item if type(item) is int else _normalize(item) for item in part]
    if hasattr(part, "__index__") and getattr(part, "ndim", 0) == 0 and not _is_mask_scalar(part):
        return part.__index__()
    if _kind(part) is None:
        text = f"a {type(part).__name__} is no index: take ints, slices, ..., None, bools, lists or arrays"
        raise TypeError(abridge(text))
    return part


def _kind(part: Any) -> str | None:
    """Returns "int" or "bool" for an array, a tensor, a list or a scalar of such elements. None for all others."""
    if isinstance(part, list):
        return next((kind.__name__ for kind in (int, bool) if all(type(item) is kind for item in part)), None)
    if isinstance(part, int):
        return "bool" if isinstance(part, bool) else "int"
    # "int64", "<u2", "torch.uint8", "bool"
    name = getattr(getattr(part, "dtype", None), "name", None) or str(getattr(part, "dtype", "")).removeprefix("torch.")
    return "bool" if name == "bool" else "int" if name.startswith(("int", "uint")) else None


def _is_mask_scalar(part: Any) -> bool:
    """Returns whether a part without dimensions is a mask or an int, depending on the framework."""
    return getattr(part, "ndim", None) == 0 and (_kind(part) == "bool" or _is_byte_tensor(part))


def _is_byte_tensor(part: Any) -> bool:
    """Returns whether a part is a mask in torch, but an array of ints in numpy."""
    return str(getattr(part, "dtype", "")) == "torch.uint8"


def _is_irregular(part: Any) -> bool:
    """Returns whether frameworks differ in how they interpret a part, such as a list of lists."""
    if isinstance(part, list):
        return _kind(part) is None
    return _is_mask_scalar(part) or _is_byte_tensor(part)


def _count_dims(part: Any) -> int:
    """Returns how many dimensions of the tensor a part selects from."""
    if part is None or part is ... or isinstance(part, bool):
        return 0
    return int(getattr(part, "ndim", 1)) if _kind(part) == "bool" else 1


def _positions(part: Any, size: int, dim: int) -> tuple[Any, int, int]:
    """Returns an int, a list or an array relative to the lowest position in it, and the lowest and highest position."""
    if isinstance(part, int):
        low = high = _checked(part, part, size, dim) % size
        # If there are lists too, ints count as lists of one: both decide where the dimension of the lists is.
        return 0, low, high
    if isinstance(part, list):
        if not part:
            return part, 0, -1
        _checked(min(part), max(part), size, dim)
        positions = [item % size for item in part]
        low, high = min(positions), max(positions)
        return [position - low for position in positions], low, high
    if 0 in part.shape:
        return part, 0, -1
    _checked(int(part.min()), int(part.max()), size, dim)
    # An unsigned dtype of few bits has no number for the size.
    positions = (part.astype("int64") if hasattr(part, "astype") else part.long()) % size
    low, high = int(positions.min()), int(positions.max())
    return positions - low, low, high


def _checked(low: int, high: int, size: int, dim: int) -> int:
    """Returns `low`, if that and `high` are positions in a dimension of this size."""
    if low < -size or high >= size:
        position = low if low < -size else high
        raise IndexError(f"index {position} is out of range for dimension {dim} of {size}")
    return low
