"""Quantization with one scale for each block, of the boxes of a tensor that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The largest number of float8_e4m3fn.
_MAX = 448.0


class Transform:
    """Computes boxes of a tensor from boxes of another, the source. All offsets and shapes are in elements."""

    # The name of the dtype of the result.
    dtype: str
    # The shape of the result.
    shape: tuple[int, ...]

    def source_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the box of the source that a box of the result is computed from: offsets and sizes."""
        raise NotImplementedError

    def apply(self, source: Any, source_offsets: Sequence[int], target: Any, offsets: Sequence[int]) -> None:
        """Computes a box of the result.

        Args:
            source: the box of the source that `source_box` returned, as a tensor.
            source_offsets: its offsets.
            target: the tensor to write.
            offsets: its offsets in the result.
        """
        raise NotImplementedError


class _BlockScaling(Transform):
    def __init__(self, source_shape: tuple[int, ...], block: tuple[int, int]) -> None:
        self.source_shape = source_shape
        self.block = (1,) * (len(source_shape) - 2) + block

    def blocks(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the elements of whole blocks as [..., rows, row in block, columns, column in block], and the scales.

        Beyond the end of the tensor, elements are 0.
        """
        import torch

        rows, columns = self.block[-2:]
        pad = [-source.shape[-1] % columns, -source.shape[-2] % rows]
        padded = torch.nn.functional.pad(source.float(), (0, pad[0], 0, pad[1]))
        height, width = padded.shape[-2] // rows, padded.shape[-1] // columns
        blocks = padded.reshape(*source.shape[:-2], height, rows, width, columns)
        scales = blocks.abs().amax(dim=(-3, -1)) / _MAX
        return blocks, torch.where(scales == 0, 1.0, scales)


class Elements(_BlockScaling):
    """The quantized elements."""

    dtype = "float8_e4m3fn"

    def __init__(self, source_shape: tuple[int, ...], block: tuple[int, int]) -> None:
        super().__init__(source_shape, block)
        self.shape = source_shape

    def source_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        starts = [offset // block * block for offset, block in zip(offsets, self.block)]
        ends = [
            min(-(-(offset + size) // block) * block, whole)
            for offset, size, block, whole in zip(offsets, sizes, self.block, self.source_shape)
        ]
        return starts, [end - start for start, end in zip(starts, ends)]

    def apply(self, source: Any, source_offsets: Sequence[int], target: Any, offsets: Sequence[int]) -> None:
        blocks, scales = self.blocks(source.to(target.device))
        quotients = blocks / scales[..., :, None, :, None]
        # The quotient of the largest element can be rounded up.
        quantized = quotients.clamp_(-_MAX, _MAX).to(target.dtype)
        *_, height, rows, width, columns = quantized.shape
        result = quantized.reshape(*source.shape[:-2], height * rows, width * columns)
        starts = [offset - start for offset, start in zip(offsets, source_offsets)]
        result = result[tuple(slice(start, start + size) for start, size in zip(starts, target.shape))]
        target.detach().copy_(result)


class Scales(_BlockScaling):
    """The scales of the blocks."""

    dtype = "float32"

    def __init__(self, source_shape: tuple[int, ...], block: tuple[int, int]) -> None:
        super().__init__(source_shape, block)
        self.shape = tuple(-(-whole // size) for whole, size in zip(source_shape, self.block))

    def source_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        starts = [offset * block for offset, block in zip(offsets, self.block)]
        ends = [
            min((offset + size) * block, whole)
            for offset, size, block, whole in zip(offsets, sizes, self.block, self.source_shape)
        ]
        return starts, [end - start for start, end in zip(starts, ends)]

    def apply(self, source: Any, source_offsets: Sequence[int], target: Any, offsets: Sequence[int]) -> None:
        _, scales = self.blocks(source.to(target.device))
        target.detach().copy_(scales)
