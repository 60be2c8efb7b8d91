"""What torchstore says of tensors on their way."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from .._tssd import TensorSlice

__all__ = ["Request", "TensorSlice", "TransportType"]


class TransportType(enum.Enum):
    """How bytes go, as torchstore names it. Here they go by shared memory on one host, whatever is named."""

    Unset = 1
    MonarchRPC = 2
    MonarchRDMA = 3
    TorchComms = 4
    TorchCommsRDMA = TorchComms
    Gloo = 5
    SharedMemory = 6


def is_whole(tensor: DTensor) -> bool:
    """Whether each rank has all of it."""
    return tensor.device_mesh.size() == 1 or all(isinstance(each, Replicate) for each in tensor.placements)


def prove_target(value: object, tensor_slice: TensorSlice | None) -> None:
    """Refuses what a get could not fill.

    Raises:
        ValueError: a DTensor comes with a slice; a tensor has another shape than its slice.
        TypeError: it is neither a tensor nor None.
    """
    if value is not None and not isinstance(value, torch.Tensor):
        raise TypeError(f"a tensor, a DTensor or None is wanted, not {type(value)}")
    if value is None or tensor_slice is None:
        return
    if isinstance(value, DTensor):
        raise ValueError("a DTensor says itself which slice it is")
    if tensor_slice.local_shape != value.shape:
        shapes = f"{tuple(value.shape)}, its slice {tensor_slice.local_shape}"
        raise ValueError(f"the tensor has shape {shapes}")


@dataclasses.dataclass
class Request:
    """What is put under a key, or wanted of it."""

    key: str = ""
    tensor_val: torch.Tensor | None = None
    tensor_slice: TensorSlice | None = None
    objects: Any = None
    is_object: bool = False

    @classmethod
    def from_any(
        cls, key: str, value: torch.Tensor | None, tensor_slice: TensorSlice | None = None
    ) -> Request:
        """Of a tensor, a DTensor or None.

        Raises:
            ValueError, TypeError: as `prove_target`.
        """
        prove_target(value, tensor_slice)
        if isinstance(value, DTensor):
            return cls.from_tensor(key, value.to_local()) if is_whole(value) else cls.from_dtensor(key, value)
        return cls(key, value, tensor_slice)

    @classmethod
    def from_dtensor(cls, key: str, dtensor: DTensor) -> Request:
        """Of the local part of a DTensor."""
        return cls(key, dtensor.to_local(), TensorSlice.from_dtensor(dtensor))

    @classmethod
    def from_tensor(cls, key: str, tensor: torch.Tensor) -> Request:
        """Of a whole tensor."""
        return cls(key, tensor)

    @classmethod
    def from_objects(cls, key: str, objects: Any) -> Request:
        """Of what is no tensor."""
        return cls(key, objects=objects, is_object=True)

    @classmethod
    def from_tensor_slice(cls, key: str, tensor_slice: TensorSlice) -> Request:
        """Of a part of a tensor."""
        return cls(key, tensor_slice=tensor_slice)

    def meta_only(self) -> Request:
        """The same without the tensor."""
        return dataclasses.replace(self, tensor_val=None)
