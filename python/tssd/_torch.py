"""Decomposition of tensors whose class is neither `torch.Tensor` nor `Parameter`. Imports torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ._classes import Refusal, Tagged, flatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# An encoded placement: the name of its class, or of the pending reduction of a Partial; dimension; split factor.
_EncodedPlacement = tuple[str, int, int]


class DTensorParts(NamedTuple):
    """The components of a DTensor."""

    local: torch.Tensor
    mesh: DeviceMesh
    global_shape: tuple[int, ...]
    coordinates: list[int] | None
    placements: list[_EncodedPlacement]


class Chunks(NamedTuple):
    """The local tensors of a tensor with the chunk protocol of DCP, each with its offsets in elements.

    A rank that has no part of the tensor has no local tensors.
    """

    locals: list[tuple[torch.Tensor, list[int]]]
    global_shape: tuple[int, ...]


_ADVICE = {
    "FakeTensor": "materialize the model first",
    "FunctionalTensor": "save outside of the traced function",
    "NestedTensor": "store the tensors that `.unbind()` gives, or `.to_padded_tensor(0)`",
    "ShardedTensor": "store the tensors of its `.local_shards()` as `tssd.TensorShard`s, or use DTensors",
    "UninitializedParameter": "run the model once, so that its parameters are initialized",
    "UninitializedBuffer": "run the model once, so that its buffers are initialized",
}


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for an asynchronous collective and returns its result. Returns any other tensor unchanged."""
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        result: torch.Tensor = tensor.wait()  # type: ignore[attr-defined]
        return result
    return tensor


def decompose(tensor: torch.Tensor) -> DTensorParts | Chunks | Tagged | Refusal:
    """Decomposes a tensor whose class is neither `torch.Tensor` nor `Parameter`."""
    if isinstance(tensor, DTensor):
        local = wait_for_collective(tensor._local_tensor)
        if hasattr(local, "__create_chunk_list__"):
            return _decompose_chunks(local, tuple(tensor.shape))
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            advice = "store its local tensor, `.to_local()`, on each rank" if hasattr(local, "__tensor_flatten__") else None
            return _unsupported(local, "a DTensor whose local tensor is", advice)
        encoded = [_encode_placement(placement, tensor.ndim) for placement in tensor.placements]
        if None in encoded:
            names = ", ".join(map(str, tensor.placements))
            return Refusal(f"a DTensor with placements {names} cannot be stored", "redistribute it")
        coordinates = tensor.device_mesh.get_coordinate()
        return DTensorParts(
            local,
            tensor.device_mesh,
            tuple(tensor.shape),
            None if coordinates is None else list(coordinates),
            [each for each in encoded if each is not None],
        )
    if hasattr(tensor, "__create_chunk_list__"):
        return _decompose_chunks(tensor, tuple(tensor.shape))
    wrapped = None if type(tensor).__name__ in _ADVICE else flatten(tensor)
    return wrapped or _unsupported(tensor, "a tensor of class")


def _unsupported(tensor: torch.Tensor, prefix: str, advice: str | None = None) -> Refusal:
    cls = type(tensor)
    advice = advice or _ADVICE.get(cls.__name__)
    if advice is None:
        advice = "convert it to a plain tensor, such as with `.as_subclass(torch.Tensor)`"
    return Refusal(f"{prefix} {cls.__module__}.{cls.__qualname__} cannot be stored", advice)


def _decompose_chunks(local: Any, global_shape: tuple[int, ...]) -> Chunks | Refusal:
    chunks = local.__create_chunk_list__()
    advice = "store its local tensors as `tssd.TensorShard`s"
    if hasattr(local, "local_shards"):
        tensors = [wait_for_collective(shard) for shard in local.local_shards()]
    elif len(chunks) == 1:
        tensors = [local.as_subclass(torch.Tensor)]
    else:
        return _unsupported(local, "a tensor with several chunks, of class", advice)
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        return _unsupported(local, "a tensor with chunks that are no plain tensors, of class")
    # A rank without a part of the tensor declares an empty chunk, whose dimensions may differ from the tensor's.
    sizes = [tuple(chunk.sizes) for chunk in chunks if tensors or math.prod(chunk.sizes)]
    if sizes != [tuple(tensor.shape) for tensor in tensors]:
        return _unsupported(local, "a tensor whose chunks have other sizes than its local tensors, of class", advice)
    if len({tensor.dtype for tensor in tensors}) > 1:
        return _unsupported(local, "a tensor whose local tensors have several dtypes, of class", advice)
    return Chunks([(tensor, list(chunk.offsets)) for tensor, chunk in zip(tensors, chunks)], global_shape)


def _encode_placement(placement: Placement, ndim: int) -> _EncodedPlacement | None:
    if isinstance(placement, _StridedShard):
        split_factor = int(placement.split_factor)
        return ("_StridedShard", placement.dim % max(ndim, 1), split_factor)
    if type(placement) is Shard:
        return ("Shard", placement.dim % max(ndim, 1), 1)
    if type(placement) is Replicate:
        return ("Replicate", 0, 1)
    if isinstance(placement, Partial):
        return (str(placement.reduce_op), 0, 1)
    return None


def check_mesh(device_mesh: DeviceMesh, mesh_shape: tuple[int, ...], coordinates: tuple[int, ...] | None) -> None:
    """Checks that a mesh has the shape, and this rank the coordinates, that were stored with a shard.

    Raises:
        TssdValueError: the mesh has another shape, or this rank has other coordinates in it.
    """
    own = device_mesh.get_coordinate()
    if tuple(device_mesh.shape) != mesh_shape or (None if own is None else tuple(own)) != coordinates:
        from ._errors import new_exception

        stored = f"mesh {mesh_shape} at {coordinates}"
        message = f"the shard is of a {stored}, this rank of mesh {tuple(device_mesh.shape)} at {own}"
        raise new_exception("MeshMismatch", "F-071", message, None, None, None, None)


def make_dtensor(
    local: torch.Tensor, device_mesh: DeviceMesh, placements: list[_EncodedPlacement], global_shape: tuple[int, ...]
) -> DTensor:
    """Returns the DTensor with this local tensor, from the encoded placements of a shard."""
    torch_placements: list[Placement] = []
    for name, dim, split_factor in placements:
        if name == "_StridedShard":
            torch_placements.append(_StridedShard(dim, split_factor=split_factor))
        else:
            torch_placements.append(Shard(dim) if name == "Shard" else Replicate())
    strides = torch.empty(global_shape, device="meta").stride()
    is_parameter = isinstance(local, torch.nn.Parameter)
    requires_grad = local.requires_grad
    result: DTensor = DTensor.from_local(
        local.detach(),
        device_mesh,
        torch_placements,
        run_check=False,
        shape=torch.Size(global_shape),
        stride=strides,
    )
    if is_parameter:
        return torch.nn.Parameter(result, requires_grad)  # type: ignore[return-value]
    return result.requires_grad_(requires_grad)  # type: ignore[return-value]
