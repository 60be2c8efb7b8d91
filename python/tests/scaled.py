"""A tensor class that wraps tensors, for the tests and for their rank scripts."""

from __future__ import annotations

from typing import Any

import torch


class Scaled(torch.Tensor):
    """A tensor of integers with a scale, and another tensor or wrapper as its scale."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, context: Any = None) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, context: Any = None) -> None:
        self.data_, self.scale, self.context = data, scale, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Any], context: Any, size: Any, stride: Any) -> Scaled:
        result = cls(tensors["data_"], tensors["scale"], context)
        assert (result.shape, result.stride()) == (size, stride)
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale, args[0].context)
        raise NotImplementedError(func)


def zeros_like(weight: Scaled) -> Scaled:
    """Returns a wrapper of the same kind, to be filled."""
    scale = zeros_like(weight.scale) if isinstance(weight.scale, Scaled) else torch.zeros_like(weight.scale)
    return Scaled(torch.zeros_like(weight.data_), scale, weight.context)


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two tensors or wrappers have the same class, elements and context."""
    if type(one) is not type(other):
        return False
    if not isinstance(one, Scaled):
        return torch.equal(one, other)
    return is_same(one.data_, other.data_) and is_same(one.scale, other.scale) and one.context == other.context
