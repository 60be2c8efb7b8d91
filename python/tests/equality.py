"""Equality of state dicts as an archive must preserve it: types, order and bits."""

from __future__ import annotations

import struct
from typing import Any


def same(left: Any, right: Any) -> bool:
    """Returns whether two values of a state dict are equal bit for bit."""
    if hasattr(left, "_fields"):
        same_type = type(left).__name__ == type(right).__name__ and left._fields == right._fields
        return same_type and same(tuple(left), tuple(right))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        if getattr(left, "_metadata", None) != getattr(right, "_metadata", None):
            return False
        keys = [(type(key), key) for key in left]
        return keys == [(type(key), key) for key in right] and all(
            same(value, right[key]) for key, value in left.items()
        )
    if type(left) in (list, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and type(left) is float:
        return struct.pack("<d", left) == struct.pack("<d", right)
    if type(left) is complex:
        return same((left.real, left.imag), (right.real, right.imag))
    if hasattr(left, "untyped_storage"):
        return same_tensor(left, right)
    if hasattr(left, "__array_interface__"):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return bool(left == right)


def same_tensor(left: Any, right: Any) -> bool:
    properties = [
        (t.dtype, t.shape, t.stride() if t.numel() else None, t.requires_grad, t.device)
        for t in (left, right)
    ]
    return properties[0] == properties[1] and element_bytes(left) == element_bytes(right)


def element_bytes(tensor: Any) -> bytes:
    """Returns the bytes of the elements of a tensor of any dtype, in row-major order."""
    import torch

    tensor = tensor.detach()
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    shape = [*tensor.shape, size]
    raw = torch.empty((0,), dtype=torch.uint8).set_(
        tensor.untyped_storage(), tensor.storage_offset() * size, shape, [*strides, 1]
    )
    return bytes(raw.contiguous().flatten().tolist())
