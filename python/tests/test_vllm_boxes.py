"""Views of tensors as boxes, as the plug-in for vLLM requests them. The oracle is numpy. It needs no vLLM."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tssd.vllm._boxes import MAX_BOXES, Box, View, split

Array = np.ndarray[Any, Any]


def random_view(array: Array) -> Array:
    """Returns a view of an array, made by operations that weight loaders use."""
    for _ in range(random.randint(0, 4)):
        kind = random.choice(["narrow", "transpose", "split", "merge", "index", "step"])
        dim = random.randrange(array.ndim) if array.ndim else 0
        if kind == "narrow" and array.ndim:
            start = random.randint(0, array.shape[dim] - 1)
            index: list[Any] = [slice(None)] * array.ndim
            index[dim] = slice(start, random.randint(start + 1, array.shape[dim]))
            array = array[tuple(index)]
        elif kind == "transpose" and array.ndim > 1:
            array = array.swapaxes(dim, random.randrange(array.ndim))
        elif kind == "split" and array.ndim and array.shape[dim] % 2 == 0:
            shape = (*array.shape[:dim], 2, array.shape[dim] // 2, *array.shape[dim + 1 :])
            array = reshaped(array, shape)
        elif kind == "merge" and dim + 1 < array.ndim:
            shape = (*array.shape[:dim], array.shape[dim] * array.shape[dim + 1], *array.shape[dim + 2 :])
            array = reshaped(array, shape)
        elif kind == "index" and array.ndim > 1:
            array = array[(slice(None),) * dim + (random.randrange(array.shape[dim]),)]
        elif kind == "step" and array.ndim:
            array = array[(slice(None),) * dim + (slice(None, None, 2),)]
    return array


def reshaped(array: Array, shape: tuple[int, ...]) -> Array:
    """Returns the reshaped array if that is a view, else the array."""
    view = array.reshape(shape)
    return view if np.shares_memory(view, array) else array


def random_target(shape: tuple[int, ...]) -> Array:
    """Returns zeros in memory with gaps, or in another order of dimensions."""
    order = random.sample(range(len(shape)), len(shape))
    gaps = [random.choice([1, 1, 2]) for _ in shape]
    base = np.zeros([shape[dim] * gaps[dim] for dim in order], np.int32)
    return base[tuple(slice(None, None, gaps[dim]) for dim in order)].transpose(np.argsort(order).tolist())


def fill(target: Array, source: Array, box: Box) -> None:
    """Copies a box to its memory in the target."""
    memory = np.ndarray(
        box.sizes,
        target.dtype,
        buffer=memory_of(target),
        offset=memory_offset(target) + box.start * target.itemsize,
        strides=[stride * target.itemsize for stride in box.strides],
    )
    memory[...] = source[tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes))]


def memory_of(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def memory_offset(array: Array) -> int:
    return int(array.__array_interface__["data"][0] - memory_of(array).__array_interface__["data"][0])


@pytest.mark.parametrize("seed", range(400))
def test_boxes_fill_the_view(seed: int) -> None:
    random.seed(seed)
    shape = tuple(random.randint(1, 6) for _ in range(random.randint(1, 4)))
    source = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    view = random_view(source)
    strides = tuple(stride // 4 for stride in view.strides)
    place = View(view.shape, memory_offset(view) // 4, strides)
    target = random_target(view.shape)
    boxes = split(shape, place, [stride // 4 for stride in target.strides])
    if boxes is None:
        # Only a part of flattened dimensions is no box.
        assert view.ndim and any(size > 1 for size in view.shape)
        return
    assert sum(int(np.prod(box.sizes)) for box in boxes) == view.size
    for box in boxes:
        fill(target, source, box)
    np.testing.assert_array_equal(target, view)


def test_views_of_weight_loaders_are_few_boxes() -> None:
    # The second of four shards of rows, of columns, and of experts.
    assert split((8, 6), View((2, 6), 12, (6, 1)), (6, 1)) == [Box((2, 0), (2, 6), 0, (6, 1))]
    assert split((8, 8), View((8, 2), 2, (8, 1)), (2, 1)) == [Box((0, 2), (8, 2), 0, (2, 1))]
    assert split((4, 3, 2), View((3, 2), 6, (2, 1)), (2, 1)) == [Box((1, 0, 0), (1, 3, 2), 0, (0, 2, 1))]
    # Heads and dimensions of a head that are dimensions of the view.
    assert split((8, 3), View((2, 2, 3), 12, (6, 3, 1)), (6, 3, 1)) == [Box((4, 0), (4, 3), 0, (3, 1))]


def test_what_is_no_box_is_not_split() -> None:
    # Seven elements of a flattened matrix; a broadcast.
    assert split((4, 4), View((7,), 3, (1,)), (1,)) is None
    assert split((4, 4), View((5, 4), 0, (0, 1)), (4, 1)) is None
    # Every second element, of more than the limit.
    count = MAX_BOXES + 1
    assert split((2 * count,), View((count,), 0, (2,)), (1,)) is None
