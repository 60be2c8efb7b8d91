"""Decomposition of tensors whose class is neither `torch.Tensor` nor `Parameter`. Imports torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ._classes import (
    DTENSOR,
    LOCAL_TENSOR,
    Refusal,
    StackedWrapper,
    Tagged,
    flatten,
    make_wrapper,
    unflatten,
    with_flags,
)

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
        encoded = [_encode_placement(placement, tensor.ndim) for placement in tensor.placements]
        if is_wrapper(local) and None not in encoded:
            return _decompose_sharded_wrapper(tensor, local, [each for each in encoded if each is not None])
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            return _unsupported(local, "a DTensor whose local tensor is")
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
    wrapped = flatten(tensor) if is_wrapper(tensor) else None
    return wrapped or _unsupported(tensor, "a tensor of class")


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is of a class that wraps tensors. The class may not be registered."""
    cls = type(tensor)
    return hasattr(cls, "__tensor_flatten__") and cls.__name__ not in _ADVICE


def decompose_wrapper(tensor: torch.Tensor) -> Tagged | Refusal | None:
    """Decomposes a tensor that wraps tensors, or a DTensor of one. None for other tensors."""
    local = wait_for_collective(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    if not is_wrapper(local) or hasattr(local, "__create_chunk_list__"):
        return None
    parts = decompose(tensor)
    assert isinstance(parts, (Tagged, Refusal))
    return parts


def _decompose_sharded_wrapper(
    tensor: DTensor, local: torch.Tensor, placements: list[_EncodedPlacement]
) -> Tagged | Refusal:
    """Decomposes a DTensor whose local tensor is a wrapper.

    Each inner tensor is stacked over the dimensions of the mesh that shard the DTensor: it is a DTensor with a leading
    dimension for each of them, and the part of a rank is the inner tensor of its local tensor.
    """
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        return Refusal(f"a DTensor with placements {tensor.placements} cannot be stored", "reduce it first")
    mesh, local_shape = tensor.device_mesh, list(tensor.shape)
    sharded = [(*each, mesh.size(dim)) for dim, each in enumerate(placements) if each[0] != "Replicate"]
    advice = "shard it evenly, or store its local tensor, `.to_local()`, on each rank under a key of its own"
    for _, dim, _, count in sharded:
        if local_shape[dim] % count:
            sizes = f"{local_shape[dim]} elements of dimension {dim} cannot be split into {count} equal parts"
            return Refusal(f"a DTensor that wraps tensors cannot be stored: {sizes}", advice)
        local_shape[dim] //= count
    if list(local.shape) != local_shape:
        shapes = f"its local tensor has shape {list(local.shape)}, and equal parts have {local_shape}"
        return Refusal(f"a DTensor that wraps tensors cannot be stored: {shapes}", advice)
    tagged = flatten(local)
    if not isinstance(tagged, Tagged):
        return tagged or _unsupported(local, "a DTensor whose local tensor is")
    numbers = iter(range(len(sharded)))
    stacking: list[Placement] = [
        Replicate() if each[0] == "Replicate" else Shard(next(numbers)) for each in placements
    ]
    stacked = _stack(tagged, mesh, stacking)
    if isinstance(stacked, Refusal):
        return stacked
    return make_wrapper(tensor, DTENSOR, {LOCAL_TENSOR: stacked}, sharded)


def _stack(tagged: Tagged, mesh: DeviceMesh, placements: list[Placement]) -> StackedWrapper | Refusal:
    """Stacks the inner tensors of a decomposed wrapper over the dimensions of a mesh with the placement Shard."""
    counts = [mesh.size(dim) for dim, placement in enumerate(placements) if isinstance(placement, Shard)]
    tensors: dict[str, DTensor | StackedWrapper] = {}
    for name, inner in tagged.plain["tensors"].items():
        inner = wait_for_collective(inner)
        if type(inner) in (torch.Tensor, torch.nn.Parameter):
            local = inner.detach()[(None,) * len(counts)]
            tensors[name] = _new_dtensor(local, mesh, placements, (*counts, *inner.shape))
            continue
        flat = flatten(inner) if is_wrapper(inner) and not isinstance(inner, DTensor) else None
        stacked = _stack(flat, mesh, placements) if isinstance(flat, Tagged) else flat
        if not isinstance(stacked, StackedWrapper):
            return stacked or _unsupported(inner, "a DTensor whose local tensor has an inner tensor of class")
        tensors[name] = stacked
    return StackedWrapper(tagged._replace(plain={**tagged.plain, "tensors": tensors}))


def _new_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: list[Placement],
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    """Returns the DTensor with this very local tensor. `DTensor.from_local` makes a view, or moves it to a device."""
    stride = stride or torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(torch.Size(shape), stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg, no-any-return, unused-ignore]


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


def find_mesh_mismatch(
    device_mesh: DeviceMesh, mesh_shape: tuple[int, ...], coordinates: tuple[int, ...] | None
) -> str | None:
    """Compares a mesh, and the coordinates of this rank in it, with those that were stored with a shard.

    Returns:
        None if they are the same. Otherwise the message of an error.
    """
    own = device_mesh.get_coordinate()
    if tuple(device_mesh.shape) == mesh_shape and (None if own is None else tuple(own)) == coordinates:
        return None
    return f"the shard is of a mesh {mesh_shape} at {coordinates}, this rank of mesh {tuple(device_mesh.shape)} at {own}"


def _decode_placements(placements: list[_EncodedPlacement]) -> list[Placement]:
    decoded: list[Placement] = []
    for name, dim, split_factor in placements:
        if name == "_StridedShard":
            decoded.append(_StridedShard(dim, split_factor=split_factor))
        else:
            decoded.append(Shard(dim) if name == "Shard" else Replicate())
    return decoded


def make_dtensor(
    local: torch.Tensor, device_mesh: DeviceMesh, placements: list[_EncodedPlacement], global_shape: tuple[int, ...]
) -> DTensor:
    """Returns the DTensor with this local tensor, from the encoded placements of a shard."""
    torch_placements = _decode_placements(placements)
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


def unstack(parts: Any, counts: list[int]) -> torch.Tensor | Refusal:
    """Returns the wrapper that is the local tensor of a DTensor.

    Args:
        parts: the flags and the plain value of the wrapper. In place of its inner tensors are the stacked ones: the
            part of this rank, or the whole tensor. In place of inner wrappers are their flags and plain values.
        counts: the sizes of the leading dimensions of the stacked tensors.
    """
    flags, plain = parts
    tensors: dict[str, Any] = {}
    for name, inner in plain["tensors"].items():
        if isinstance(inner, tuple):
            inner = unstack(inner, counts)
            if isinstance(inner, Refusal):
                return inner
            tensors[name] = inner
            continue
        local = getattr(inner, "local", getattr(inner, "_local_tensor", inner))
        if isinstance(local, list) or tuple(local.shape[: len(counts)]) != (1,) * len(counts):
            return Refusal(
                f"a tensor of class {plain['class']} cannot be loaded: the part of this rank is not there",
                "load the archive of the rank that stored it",
            )
        tensors[name] = local[(0,) * len(counts)]
    return unflatten(flags, {**plain, "tensors": tensors})


def make_wrapper_dtensor(
    local: torch.Tensor, device_mesh: DeviceMesh, placements: list[_EncodedPlacement], flags: int, plain: dict[str, Any]
) -> torch.Tensor:
    """Returns the DTensor with this wrapper as its local tensor. `flags` and `plain` are those of its node."""
    local = local.detach() if local.requires_grad else local
    decoded = _decode_placements(placements)
    result = _new_dtensor(local, device_mesh, decoded, tuple(plain["size"]), tuple(plain["stride"]))
    return with_flags(result, flags)
