"""Where the bytes of a tensor are."""

from __future__ import annotations

from dataclasses import dataclass

from ._tssd import TensorSlice


@dataclass(frozen=True)
class TensorReference:
    """A tensor of a `TorchStoreStateDict`: what it is, and which bytes of the tensor blob it has.

    Attributes:
        dtype: as torch calls it: "bfloat16".
        shape: in elements.
        strides: in elements.
        offset: where element 0 is in the tensor blob, in bytes; None if the tensor has no elements, or
            its bytes are compressed.
        nbytes: from the first byte of the first element to the last byte of the last one.
        tensor_slice: where a shard belongs in its global tensor; None for a plain tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int | None
    nbytes: int
    tensor_slice: TensorSlice | None
