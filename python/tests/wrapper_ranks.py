"""One rank of test_wrappers.py: python wrapper_ranks.py FOLDER RANKS RANK URL [torchao].

Exits with 0 if all checks hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tssd
from scaled import Scaled, is_same, zeros_like
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from tssd._torch import _new_dtensor

FOLDER, RANKS, RANK = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

Placements = tuple[Placement, ...]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    store = tssd.Store(sys.argv[4])
    if sys.argv[5:] == ["torchao"]:
        check_torchao(store)
    else:
        tssd.register_wrapper(Scaled)
        meshes = {
            "4": init_device_mesh("cpu", (4,)),
            "2x2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
            "2": DeviceMesh("cpu", [1, 3]),
        }
        check_same_sharding(store, meshes)
        check_other_mesh(store, meshes)
        check_refused_shardings(store, meshes)
        check_different_contexts(store, meshes["4"])
        check_whole_wrappers(store)
    dist.barrier()
    dist.destroy_process_group()


def make_local(number: int, shape: tuple[int, ...], context: Any = None) -> Scaled:
    """Returns a wrapper whose elements depend on a number. Its inner scale has no dimensions."""
    data = torch.full(shape, number, dtype=torch.int8)
    rows = Scaled(torch.full((shape[0], 1), number + 1, dtype=torch.int8), torch.tensor(number + 0.5))
    return Scaled(data, rows, context or {"blocks": (1, 8), "dtype": torch.bfloat16})


def shard(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...]) -> DTensor:
    return _new_dtensor(local, mesh, list(placements), shape)


def number_of(mesh: DeviceMesh, placements: Placements) -> int:
    """Returns a number that the ranks with the same part of a DTensor have in common."""
    number = 0
    for dim, (placement, at) in enumerate(zip(placements, mesh.get_coordinate() or ())):
        if not isinstance(placement, Replicate):
            number = number * mesh.size(dim) + at
    return number


def make_sharded(
    mesh: DeviceMesh, placements: Placements, make: Callable[[Scaled], Scaled] = lambda weight: weight
) -> DTensor:
    """Returns this rank's DTensor of shape (8, 8)."""
    local_shape = [8, 8]
    for dim, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)):
            local_shape[placement.dim] //= mesh.size(dim)
    local = make(make_local(number_of(mesh, placements), tuple(local_shape)))
    return shard(local, mesh, placements, (8, 8))


def check_same_sharding(store: tssd.Store, meshes: dict[str, DeviceMesh]) -> None:
    cases: list[tuple[str, Placements]] = [
        ("4", (Shard(0),)),
        ("4", (Shard(1),)),
        ("2", (Shard(0),)),
        ("2x2", (Replicate(), Shard(0))),
        ("2x2", (Shard(1), Shard(0))),
        ("2x2", (Shard(0), Shard(0))),
        ("2x2", (_StridedShard(0, split_factor=2), Shard(0))),
        ("2x2", (Replicate(), Replicate())),
    ]
    for number, (name, placements) in enumerate(cases):
        key, mesh = f"same {number}", meshes[name]
        is_member = mesh.get_coordinate() is not None
        if is_member:
            weight = make_sharded(mesh, placements)
            state = {"m": {"w": weight, "p": nn.Parameter(weight, requires_grad=False)}, "b": torch.ones(2)}
            report = store.put_state_dict(state, key, writers=mesh.mesh.flatten().tolist())
            assert report.version == 1
        dist.barrier()
        if is_member:
            into = {"m": {name: make_sharded(mesh, placements, zeros_like) for name in "wp"}, "b": torch.zeros(2)}
            store.get_state_dict(key, into)
            for name in "wp":
                assert is_same(into["m"][name]._local_tensor, weight._local_tensor), (key, name)  # type: ignore[index]
            check_archive(state, mesh, weight)
        is_whole = all(isinstance(placement, Replicate) for placement in placements)
        if is_whole:
            assert is_same(store.get_state_dict(key)["m"]["w"], make_local(0, (8, 8)))
        else:
            expect("MeshMismatch", "m.w", lambda key=key: store.get_state_dict(key))
        assert torch.equal(store.get_state_dict(key, names=["b"])["b"], torch.ones(2))
        dist.barrier()


def check_archive(state: dict[str, Any], mesh: DeviceMesh, weight: DTensor) -> None:
    """Saves and loads the archive of this rank."""
    encoded = tssd.TorchStoreStateDict.from_state_dict(state)
    shards = encoded.to_state_dict()["m"]["w"]
    local: Any = weight._local_tensor
    assert is_same(shards.local, local)
    plain = shard(torch.zeros(local.shape), mesh, weight.placements, (8, 8))
    expected = tssd.TorchStoreStateDict.from_state_dict({"w": plain}).to_state_dict()["w"]
    assert shards.tensor_slice == expected.tensor_slice
    got = encoded.to_state_dict(mesh)["m"]["w"]
    assert is_same(got._local_tensor, local) and got.placements == weight.placements
    assert got.device_mesh == mesh and (got.shape, got.stride()) == (weight.shape, weight.stride())


def check_other_mesh(store: tssd.Store, meshes: dict[str, DeviceMesh]) -> None:
    """Another mesh can have the same sharding: on other ranks, or with replicas."""
    half = meshes["2"]
    if half.get_coordinate() is not None:
        store.put_state_dict({"w": make_sharded(half, (Shard(0),))}, "other", writers=[1, 3])
    dist.barrier()
    into = make_sharded(meshes["2x2"], (Replicate(), Shard(0)), zeros_like)
    store.get_state_dict("other", {"w": into})
    assert is_same(into._local_tensor, make_local(RANK % 2, (4, 8)))
    dist.barrier()


def check_refused_shardings(store: tssd.Store, meshes: dict[str, DeviceMesh]) -> None:
    store.put_state_dict({"w": make_sharded(meshes["4"], (Shard(0),))}, "refused")
    dist.barrier()
    others: list[Any] = [
        make_sharded(meshes["4"], (Shard(1),), zeros_like),
        make_sharded(meshes["4"], (Replicate(),), zeros_like),
        make_sharded(meshes["2x2"], (Shard(0), Shard(0)), zeros_like),
        make_sharded(meshes["2x2"], (Replicate(), Shard(0)), zeros_like),
        make_local(0, (8, 8)),
    ]
    for into in others:
        expect("MeshMismatch", "w", lambda into=into: store.get_state_dict("refused", {"w": into}))
        expect("MeshMismatch", "w", lambda into=into: store.get("refused", into, fqn="w"))
    uneven = shard(make_local(0, (2, 8)), meshes["4"], (Shard(0),), (7, 8))
    expect("UntypedLeaf", "w", lambda: store.put_state_dict({"w": uneven}, "uneven"))
    dist.barrier()


def check_different_contexts(store: tssd.Store, mesh: DeviceMesh) -> None:
    """The parts of one tensor have one context: no option of a put allows another one."""
    for policy in ("error", "lowest", "keep"):
        weight = shard(make_local(RANK, (2, 8), {"rank": RANK}), mesh, (Shard(0),), (8, 8))
        options = tssd.PutOptions(on_divergence=policy)
        try:
            report = store.put_state_dict({"w": weight}, f"context {policy}", version=1, options=options)
            assert not report.visible
        except tssd.TssdValueError as error:
            assert error.kind in ("rejected", "refused"), error
            assert "`w.tensors._local_tensor.context.rank`" in str(error), error
        dist.barrier()
        assert not store.exists(f"context {policy}")


def check_whole_wrappers(store: tssd.Store) -> None:
    """Wrappers that are not DTensors merge as other leaves do: equal ones are kept once."""
    same = make_local(1, (2, 2))
    store.put_state_dict({"w": same}, "whole", writers=RANKS)
    dist.barrier()
    assert is_same(store.get_state_dict("whole")["w"], same)
    own = make_local(RANK, (2, 2))
    store.put_state_dict({"w": own}, "own", writers=RANKS, options=tssd.PutOptions(on_divergence="keep"))
    dist.barrier()
    assert is_same(store.get_state_dict("own", writer=RANK)["w"], own)
    into = zeros_like(own)
    store.get_state_dict("own", {"w": into}, writer=RANK)
    assert is_same(into, own)


def expect(kind: str, fqn: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except tssd.TssdError as error:
        assert (error.kind, error.fqn) == (kind, fqn), (error.kind, error.fqn, error)
        return
    raise AssertionError(f"no {kind}")


def check_torchao(store: tssd.Store) -> None:
    """int8, int4, fp8 and NF4 weights, each rank with a half of the rows or of the columns."""
    from torchao import quantization
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    tssd.register_torchao()
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(RANK)

    def quantize(config: Any) -> torch.Tensor:
        layer = nn.Sequential(nn.Linear(128, 64, bias=False)).to(torch.bfloat16)
        layer[0].weight = nn.Parameter(torch.randn(64, 128, generator=generator).to(torch.bfloat16))
        quantization.quantize_(layer, config)
        return layer[0].weight.detach()

    # torchao quantizes to this class on a GPU only.
    int4 = quantization.Int4Tensor(
        torch.randint(-128, 127, (64, 64), dtype=torch.int8, generator=generator),
        torch.randn(4, 64, generator=generator).to(torch.bfloat16),
        torch.randn(4, 64, generator=generator).to(torch.bfloat16),
        [1, 32],
        torch.Size([64, 128]),
    )
    weights = {
        "int8": quantize(quantization.Int8WeightOnlyConfig()),
        "intx": quantize(quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
        "int4": int4,
        "fp8": quantize(quantization.Float8WeightOnlyConfig()),
        "nf4": nf4_tensor.to_nf4(torch.randn(512, 64, generator=generator)),
    }

    def make_state(placement: Shard, locals_: dict[str, torch.Tensor]) -> dict[str, DTensor]:
        def shape(local: torch.Tensor) -> tuple[int, ...]:
            return tuple(size * RANKS if dim == placement.dim else size for dim, size in enumerate(local.shape))

        return {name: shard(local, mesh, (placement,), shape(local)) for name, local in locals_.items()}

    for placement in (Shard(0), Shard(1)):
        key = f"torchao {placement.dim}"
        state = make_state(placement, weights)
        store.put_state_dict(state, key)
        dist.barrier()
        into = make_state(placement, {name: copy_empty(weight) for name, weight in weights.items()})
        store.get_state_dict(key, into)
        archive = tssd.TorchStoreStateDict.from_state_dict(state).to_state_dict(mesh)
        for name, weight in weights.items():
            for got in (into[name], archive[name]):
                check_same_wrapper(got._local_tensor, weight)
        expect("MeshMismatch", "int8", lambda key=key: store.get_state_dict(key, names=["int8"]))
        other = make_state(Shard(1 - placement.dim), weights)
        expect("MeshMismatch", "int8", lambda key=key, other=other: store.get_state_dict(key, other))
        dist.barrier()
    # A process group of one rank, or none: the weights alone.
    alone = tssd.load(tssd.save(weights))
    for name, weight in weights.items():
        check_same_wrapper(alone[name], weight)


def copy_empty(weight: Any) -> torch.Tensor:
    """Returns a wrapper of the same kind whose inner tensors are zeros."""
    names, context = weight.__tensor_flatten__()
    tensors = {name: torch.zeros_like(getattr(weight, name)) for name in names}
    empty: torch.Tensor = type(weight).__tensor_unflatten__(tensors, context, weight.shape, weight.stride())
    return empty


def check_same_wrapper(one: Any, other: Any) -> None:
    assert type(one) is type(other) and one.shape == other.shape
    (names, context), (other_names, other_context) = one.__tensor_flatten__(), other.__tensor_flatten__()
    assert names == other_names and context == other_context, (context, other_context)
    for name in names:
        left, right = (getattr(each, name).reshape(-1).view(torch.uint8) for each in (one, other))
        assert torch.equal(left, right), (type(one), name)


main()
