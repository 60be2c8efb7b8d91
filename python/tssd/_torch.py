"""Tensors of torch whose class is not torch's own. Imported only where torch is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The name of a placement's class, or of the reduction that is still to be made; dimension; split factor.
Spelled = tuple[str, int, int]


class DTensorParts(NamedTuple):
    """A DTensor, taken apart."""

    local: torch.Tensor
    mesh: DeviceMesh
    global_shape: tuple[int, ...]
    coordinates: list[int] | None
    placements: list[Spelled]


class Chunks(NamedTuple):
    """The local tensors of a checkpointable tensor, each with its offsets: none on a rank that has nothing of it."""

    locals: list[tuple[torch.Tensor, list[int]]]
    global_shape: tuple[int, ...]


class Refused(NamedTuple):
    """Why a tensor cannot be stored, and what to do about it."""

    what: str
    advice: str


_ADVICE = {
    "FakeTensor": "materialize the model first",
    "FunctionalTensor": "save outside of the traced function",
    "NestedTensor": "store the tensors that `.unbind()` gives, or `.to_padded_tensor(0)`",
    "ShardedTensor": "store the tensors of its `.local_shards()` as `tssd.TensorShard`s, or use DTensors",
    "UninitializedParameter": "run the model once, so that its parameters are initialized",
    "UninitializedBuffer": "run the model once, so that its buffers are initialized",
}


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that an asynchronous collective gives, once it is there; any other as it is."""
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        result: torch.Tensor = tensor.wait()  # type: ignore[attr-defined]
        return result
    return tensor


def parts(tensor: torch.Tensor) -> DTensorParts | Chunks | Refused:
    """What a tensor is made of whose class is not torch's own."""
    if isinstance(tensor, DTensor):
        local = waited(tensor._local_tensor)
        if hasattr(local, "__create_chunk_list__"):
            return _chunks(local, tuple(tensor.shape))
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            return _refused(local, "a DTensor whose local tensor is")
        spelled = [_spelled(placement, tensor.ndim) for placement in tensor.placements]
        if None in spelled:
            names = ", ".join(map(str, tensor.placements))
            return Refused(f"a DTensor with placements {names} cannot be stored", "redistribute it")
        coordinates = tensor.device_mesh.get_coordinate()
        return DTensorParts(
            local,
            tensor.device_mesh,
            tuple(tensor.shape),
            None if coordinates is None else list(coordinates),
            [each for each in spelled if each is not None],
        )
    if hasattr(tensor, "__create_chunk_list__"):
        return _chunks(tensor, tuple(tensor.shape))
    return _refused(tensor, "a tensor of class")


def _refused(tensor: torch.Tensor, what: str, advice: str | None = None) -> Refused:
    cls = type(tensor)
    advice = advice or _ADVICE.get(cls.__name__)
    if advice is None and cls.__module__.partition(".")[0] == "torchao":
        advice = "store the tensors that `__tensor_flatten__` names, or `.dequantize()`"
    if advice is None:
        advice = "convert it to a plain tensor, such as with `.as_subclass(torch.Tensor)`"
    return Refused(f"{what} {cls.__module__}.{cls.__qualname__} cannot be stored", advice)


def _chunks(local: Any, global_shape: tuple[int, ...]) -> Chunks | Refused:
    chunks = local.__create_chunk_list__()
    advice = "store its local tensors as `tssd.TensorShard`s"
    if hasattr(local, "local_shards"):
        tensors = [waited(shard) for shard in local.local_shards()]
    elif len(chunks) == 1:
        tensors = [local.as_subclass(torch.Tensor)]
    else:
        return _refused(local, "a tensor with several chunks, of class", advice)
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        return _refused(local, "a tensor with chunks that are no plain tensors, of class")
    # A rank that has nothing names a chunk without elements, whose dimensions need not be the tensor's.
    sizes = [tuple(chunk.sizes) for chunk in chunks if tensors or math.prod(chunk.sizes)]
    if sizes != [tuple(tensor.shape) for tensor in tensors]:
        return _refused(local, "a tensor whose chunks have other sizes than its local tensors, of class", advice)
    if len({tensor.dtype for tensor in tensors}) > 1:
        return _refused(local, "a tensor whose local tensors have several dtypes, of class", advice)
    return Chunks([(tensor, list(chunk.offsets)) for tensor, chunk in zip(tensors, chunks)], global_shape)


def _spelled(placement: Placement, ndim: int) -> Spelled | None:
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


def prove_mesh(device_mesh: DeviceMesh, mesh_shape: tuple[int, ...], coordinates: tuple[int, ...] | None) -> None:
    """Proves that this rank stands in a mesh of that shape where a shard says that it did.

    Raises:
        TssdValueError: the mesh has another shape, or this rank stands elsewhere in it.
    """
    here = device_mesh.get_coordinate()
    if tuple(device_mesh.shape) != mesh_shape or (None if here is None else tuple(here)) != coordinates:
        from ._errors import make

        stored = f"mesh {mesh_shape} at {coordinates}"
        message = f"the shard is of a {stored}, this rank of mesh {tuple(device_mesh.shape)} at {here}"
        raise make("MeshMismatch", "F-071", message, None, None, None, None)


def dtensor(
    local: torch.Tensor, device_mesh: DeviceMesh, placements: list[Spelled], global_shape: tuple[int, ...]
) -> DTensor:
    """The DTensor that a shard was cut from."""
    made: list[Placement] = []
    for name, dim, split_factor in placements:
        if name == "_StridedShard":
            made.append(_StridedShard(dim, split_factor=split_factor))
        else:
            made.append(Shard(dim) if name == "Shard" else Replicate())
    strides = torch.empty(global_shape, device="meta").stride()
    is_parameter = isinstance(local, torch.nn.Parameter)
    requires_grad = local.requires_grad
    result: DTensor = DTensor.from_local(
        local.detach(),
        device_mesh,
        made,
        run_check=False,
        shape=torch.Size(global_shape),
        stride=strides,
    )
    if is_parameter:
        return torch.nn.Parameter(result, requires_grad)  # type: ignore[return-value]
    return result.requires_grad_(requires_grad)  # type: ignore[return-value]
