"""The transport types and requests of torchstore."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from .._tssd import TensorSlice

__all__ = ["Request", "TensorSlice", "TransportType"]


class TransportType(enum.Enum):
    """A transport, by its name in torchstore.

    It has no effect here: on one host, bytes always go through shared memory.
    """

    Unset = 1
    MonarchRPC = 2
    MonarchRDMA = 3
    TorchComms = 4
    TorchCommsRDMA = TorchComms
    Gloo = 5
    SharedMemory = 6


def is_whole(tensor: DTensor) -> bool:
    """Returns whether each rank has the whole tensor."""
    return tensor.device_mesh.size() == 1 or all(isinstance(placement, Replicate) for placement in tensor.placements)


def check_target(value: object, tensor_slice: TensorSlice | None) -> None:
    """Checks that a get can fill a target.

    Raises:
        ValueError: a DTensor is combined with a slice, or the shape of a tensor differs from that of its slice.
        TypeError: the target is neither a tensor nor None.
    """
    if value is not None and not isinstance(value, torch.Tensor):
        text = f"Invalid type for inplace_tensor: {type(value)}. Must be None, torch.Tensor, or DTensor"
        raise TypeError(text)
    if value is None or tensor_slice is None:
        return
    if isinstance(value, DTensor):
        raise ValueError("Cannot specify a tensor slice when fetching a DTensor: it has a slice of its own")
    if tensor_slice.local_shape != value.shape:
        shape = tensor_slice.local_shape
        text = f"Requested tensor slice shape {shape} does not match in-place tensor shape {tuple(value.shape)}"
        raise ValueError(text)


@dataclasses.dataclass
class Request:
    """The value that is put under a key, or the part of it that is requested."""

    key: str = ""
    tensor_val: torch.Tensor | None = None
    tensor_slice: TensorSlice | None = None
    objects: Any = None
    is_object: bool = False

    @classmethod
    def from_any(
        cls, key: str, value: torch.Tensor | None, tensor_slice: TensorSlice | None = None
    ) -> Request:
        """Returns the request for a tensor, a DTensor or None.

        Raises:
            ValueError, TypeError: as `check_target`.
        """
        check_target(value, tensor_slice)
        if isinstance(value, DTensor):
            return cls.from_tensor(key, value.to_local()) if is_whole(value) else cls.from_dtensor(key, value)
        return cls(key, value, tensor_slice)

    @classmethod
    def from_dtensor(cls, key: str, dtensor: DTensor) -> Request:
        """Returns the request for the local part of a DTensor."""
        return cls(key, dtensor.to_local(), TensorSlice.from_dtensor(dtensor))

    @classmethod
    def from_tensor(cls, key: str, tensor: torch.Tensor) -> Request:
        """Returns the request for a whole tensor."""
        return cls(key, tensor)

    @classmethod
    def from_objects(cls, key: str, objects: Any) -> Request:
        """Returns the request for an object that is not a tensor."""
        return cls(key, objects=objects, is_object=True)

    @classmethod
    def from_tensor_slice(cls, key: str, tensor_slice: TensorSlice) -> Request:
        """Returns the request for a part of a tensor."""
        return cls(key, tensor_slice=tensor_slice)

    def meta_only(self) -> Request:
        """Returns a copy without the tensor."""
        return dataclasses.replace(self, tensor_val=None)
