"""Strided views of a tensor as boxes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

# A view that consists of more boxes is not split. The whole tensor is fetched then.
MAX_BOXES = 4096


class Box(NamedTuple):
    """A box of a tensor, and the strided memory for it. All numbers are in elements.

    The memory begins at `start`, relative to that of the view, and has one stride for each dimension of the tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


class _Loop(NamedTuple):
    """A dimension of the view: its size, and its strides in the tensor and in the memory."""

    size: int
    source: int
    target: int


class _Range(NamedTuple):
    """A range of one dimension of the tensor, relative to the view, and its start and stride in the memory."""

    first: int
    size: int
    start: int
    target: int


class View(NamedTuple):
    """A strided view of a row-major tensor, in elements."""

    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


def split(shape: Sequence[int], view: View, target_strides: Sequence[int]) -> list[Box] | None:
    """Splits a view of a tensor into boxes of the tensor.

    Args:
        shape: the shape of the tensor.
        view: the view.
        target_strides: the strides of the memory for the view.

    Returns:
        None if the view is no union of at most `MAX_BOXES` boxes.
    """
    if 0 in view.shape:
        return []
    strides = _row_major(shape)
    offsets = []
    rest = view.offset
    for stride in strides:
        offsets.append(rest // stride)
        rest %= stride
    loops = [_Loop(*loop) for loop in zip(view.shape, view.strides, target_strides) if loop[0] > 1]
    by_dim: list[list[_Loop]] = [[] for _ in shape]
    while loops:
        loop = loops.pop()
        dim = _find_dim(shape, strides, loop)
        if dim is None:
            return None
        room = shape[dim] * strides[dim] // loop.source
        if loop.size > room:
            # The loop runs across dimensions that were flattened.
            is_whole = shape[dim] * strides[dim] % loop.source == 0 and loop.size % room == 0 and offsets[dim] == 0
            if not is_whole or dim == 0:
                return None
            loops.append(_Loop(loop.size // room, loop.source * room, loop.target * room))
            loop = loop._replace(size=room)
        by_dim[dim].append(loop)
    choices = []
    for dim, stride in enumerate(strides):
        ranges = _ranges(by_dim[dim], stride)
        if any(offsets[dim] + part.first + part.size > shape[dim] for part in ranges):
            return None
        choices.append(ranges)
    if math.prod(map(len, choices)) > MAX_BOXES:
        return None
    return [_box(offsets, combination) for combination in itertools.product(*choices)]


def _box(offsets: list[int], ranges: tuple[_Range, ...]) -> Box:
    return Box(
        tuple(offset + part.first for offset, part in zip(offsets, ranges)),
        tuple(part.size for part in ranges),
        sum(part.start for part in ranges),
        tuple(part.target for part in ranges),
    )


def _row_major(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def _find_dim(shape: Sequence[int], strides: list[int], loop: _Loop) -> int | None:
    """Returns the dimension of the tensor in which a loop takes its first step."""
    for dim, stride in enumerate(strides):
        if shape[dim] > 1 and stride <= loop.source < stride * shape[dim] and loop.source % stride == 0:
            return dim
    return None


def _ranges(loops: list[_Loop], stride: int) -> list[_Range]:
    """Returns the ranges of one dimension that loops consist of."""
    size, target = 1, 0
    outer: list[_Loop] = []
    for loop in sorted(loops, key=lambda loop: loop.source):
        if size == 1 and not outer and loop.source == stride:
            size, target = loop.size, loop.target
        elif not outer and loop.source == stride * size and loop.target == target * size:
            size *= loop.size
        else:
            outer.append(loop)
    ranges = []
    for indices in itertools.product(*(range(loop.size) for loop in outer)):
        first = sum(index * loop.source // stride for index, loop in zip(indices, outer))
        start = sum(index * loop.target for index, loop in zip(indices, outer))
        ranges.append(_Range(first, size, start, target))
    return ranges
