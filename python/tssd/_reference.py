"""References to tensors in a tensor blob."""

from __future__ import annotations

from dataclasses import dataclass

from ._tssd import TensorSlice


@dataclass(frozen=True)
class TensorReference:
    """A tensor of a `TorchStoreStateDict`: its metadata, and the place of its bytes in the tensor blob.

    Attributes:
        dtype: the dtype by its name in torch, such as "bfloat16".
        shape: the shape, in elements.
        strides: the strides, in elements.
        offset: the offset of element 0 in the tensor blob, in bytes; None if the tensor has no elements, or
            its bytes are compressed.
        nbytes: the length from the first byte of the first element to the last byte of the last one.
        tensor_slice: the place of a shard in its global tensor; None for a plain tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int | None
    nbytes: int
    tensor_slice: TensorSlice | None
