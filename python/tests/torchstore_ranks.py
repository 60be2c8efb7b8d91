"""One rank of `tssd.torchstore` under torchrun: torchrun torchstore_ranks.py FOLDER."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tssd.torchstore as ts
from equality import same
from sharding import distribute
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from training import make_mesh, make_trained_state, to_local

FOLDER = Path(sys.argv[1])
RANKS = 8


async def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    await ts.initialize_spmd(strategy=ts.LocalRankStrategy())
    groups: dict[int, Any] = {size: dist.new_group(list(range(size))) for size in (2, 4, 8)}
    shapes = [((2,), (4,)), ((4,), (2,)), ((2, 2), (4,)), ((2,), (2, 4)), ((4, 2), (2, 4))]
    for number, (put_shape, get_shape) in enumerate(shapes):
        await check_resharding(number, make_mesh(put_shape), make_mesh(get_shape), groups)
    await check_every_placement()
    await check_direct_rdma_snapshots(make_mesh((RANKS,)))
    await check_gets_of_one_version(make_mesh((RANKS,)))
    await check_differing_values(make_mesh((RANKS,)))
    await check_failing_put(make_mesh((RANKS,)))
    await ts.shutdown()
    assert not await exists_after_shutdown()
    # A store of the same name can be initialized again.
    dist.barrier()
    await ts.initialize_spmd(strategy=ts.HostStrategy())
    if dist.get_rank() == 0:
        await ts.put("again", torch.ones(1))
    dist.barrier()
    assert await ts.keys() == ["again"]
    dist.barrier()
    await ts.shutdown()
    dist.destroy_process_group()


async def exists_after_shutdown() -> bool:
    try:
        return await ts.exists("w")
    except AssertionError:
        return False


async def check_resharding(number: int, put_mesh: DeviceMesh, get_mesh: DeviceMesh, groups: dict[int, Any]) -> None:
    """Puts on one mesh and gets on another. The result equals what DCP loads there, buffers included."""
    key, files = f"v{number}", FOLDER / f"files{number}"
    if put_mesh.get_coordinate() is not None:
        state = make_trained_state(put_mesh, number)
        await ts.put_state_dict(state, key)
        dcp.save(state, checkpoint_id=files, process_group=groups[put_mesh.size()])
    dist.barrier()
    if get_mesh.get_coordinate() is not None:
        into, expected = make_trained_state(get_mesh, 100), make_trained_state(get_mesh, 200)
        assert not same(to_local(into), to_local(expected))
        got = await ts.get_state_dict(key, into)
        dcp.load(expected, checkpoint_id=files, process_group=groups[get_mesh.size()])
        # Tensors are filled in place. The returned dict has all other values.
        assert got["model"]["scale"] is into["model"]["scale"]
        assert same(to_local(got), to_local(expected)), (put_mesh, get_mesh)
        again = await ts.get(f"{key}/model.scale", into["model"]["scale"])
        assert again is into["model"]["scale"]
    dist.barrier()


async def check_every_placement() -> None:
    """Puts a DTensor in every placement on a mesh of two dimensions. Gets it in every other."""
    mesh = make_mesh((2, 4))
    placements = [
        (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(1)), (Shard(1), Shard(0)),
        (Replicate(), Shard(0)), (Shard(1), Replicate()), (_StridedShard(0, split_factor=4), Shard(0)),
    ]
    whole = torch.arange(70.0).reshape(10, 7)
    for number, placement in enumerate(placements):
        await ts.put(f"p.{number}", distribute(whole, mesh, placement))
    dist.barrier()
    for number in range(len(placements)):
        for placement in placements:
            into = distribute(torch.zeros(10, 7), mesh, placement)
            assert await ts.get(f"p.{number}", into) is into
            assert torch.equal(into.to_local(), distribute(whole, mesh, placement).to_local())
        assert torch.equal(await ts.get(f"p.{number}"), whole)
    dist.barrier()


async def check_direct_rdma_snapshots(mesh: DeviceMesh) -> None:
    """A put with `direct_rdma` stores the values of the tensors at the time of each put."""
    state = {"w": distribute(torch.zeros(16, 2), mesh, (Shard(0),)), "n": torch.tensor([123457])}
    await ts.put_state_dict(state, "live", direct_rdma=True, transfer_dtype=torch.bfloat16)
    dist.barrier()
    into = {"w": torch.full((16, 2), 9.0), "n": torch.tensor([0])}
    for step in (1, 2):
        state["w"].to_local().fill_(step)
        dist.barrier()
        assert await ts.get_state_dict("live", into, direct_rdma=True) is into
        # The get returns the values of the put, although the tensors have changed since.
        assert torch.equal(into["w"], torch.full((16, 2), step - 1.0)) and into["n"].item() == 123457
        dist.barrier()
        await ts.put_state_dict(None, "live", direct_rdma=True)
        dist.barrier()
    await ts.get_state_dict("live", into, direct_rdma=True)
    assert torch.equal(into["w"], torch.full((16, 2), 2.0))
    for wrong, error in (({"other": torch.zeros(1)}, KeyError), (None, AssertionError)):
        try:
            await ts.get_state_dict("live", wrong, direct_rdma=True)
        except error:
            continue
        raise AssertionError(error)
    dist.barrier()


async def check_gets_of_one_version(mesh: DeviceMesh) -> None:
    """Some ranks put repeatedly while others get. Each get returns the values of one put."""
    writer_mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    if dist.get_rank() < 4:
        for number in range(20):
            value = torch.full((64, 64), float(number))
            await ts.put_state_dict({"w": distribute(value, writer_mesh, (Shard(0),)), "number": number}, "same")
    else:
        seen = set()
        while 19 not in seen:
            try:
                got = await ts.get_state_dict("same")
            except RuntimeError:
                continue
            assert torch.equal(got["w"], torch.full((64, 64), float(got["number"])))
            seen.add(got["number"])
    dist.barrier()


async def check_differing_values(mesh: DeviceMesh) -> None:
    """Plain values differ by rank. The store has those of the lowest rank."""
    state = {"w": distribute(torch.ones(8, 1), mesh, (Shard(0),)), "seed": dist.get_rank()}
    await ts.put_state_dict(state, "differ")
    dist.barrier()
    assert (await ts.get_state_dict("differ"))["seed"] == 0
    dist.barrier()


async def check_failing_put(mesh: DeviceMesh) -> None:
    """A put fails, or times out, on one rank. The store does not mix it with a later put."""
    for number in range(1, 9):
        state: dict[str, Any] = {"w": distribute(torch.full((8, 1), float(number)), mesh, (Shard(0),))}
        if number in (2, 5) and dist.get_rank() == 1:
            state["x"] = object()
        put = ts.put_state_dict(state, "fails")
        try:
            await asyncio.wait_for(put, 1e-9 if number == 7 and dist.get_rank() == 2 else 60)
        except (TypeError, asyncio.TimeoutError):
            pass
        dist.barrier()
        got = (await ts.get_state_dict("fails"))["w"]
        assert (got == got[0]).all() and (number in (2, 5, 7) or got[0] == number), (number, got)
        dist.barrier()


asyncio.run(main())
