"""Ranks that torchrun starts, on what stands in for torchstore: torchrun torchstore_ranks.py FOLDER."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tssd.torchstore as ts
from same import same
from sharding import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from training import local, mesh, trained

FOLDER = Path(sys.argv[1])
RANKS = 8


async def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    await ts.initialize_spmd(strategy=ts.LocalRankStrategy())
    groups: dict[int, Any] = {size: dist.new_group(list(range(size))) for size in (2, 4, 8)}
    shapes = [((2,), (4,)), ((4,), (2,)), ((2, 2), (4,)), ((2,), (2, 4)), ((4, 2), (2, 4))]
    for number, (one, other) in enumerate(shapes):
        await resharded(number, mesh(one), mesh(other), groups)
    await every_placement()
    await snapshots(mesh((RANKS,)))
    await one_version(mesh((RANKS,)))
    await ranks_that_differ(mesh((RANKS,)))
    await a_put_that_fails(mesh((RANKS,)))
    await ts.shutdown()
    assert not await exists_anew()
    # A store of the same name can be had again.
    dist.barrier()
    await ts.initialize_spmd(strategy=ts.HostStrategy())
    if dist.get_rank() == 0:
        await ts.put("again", torch.ones(1))
    dist.barrier()
    assert await ts.keys() == ["again"]
    dist.barrier()
    await ts.shutdown()
    dist.destroy_process_group()


async def exists_anew() -> bool:
    try:
        return await ts.exists("w")
    except AssertionError:
        return False


async def resharded(number: int, one: DeviceMesh, other: DeviceMesh, groups: dict[int, Any]) -> None:
    """What is put on one mesh and got on another is what DCP loads there, buffers included."""
    key, files = f"v{number}", FOLDER / f"files{number}"
    if one.get_coordinate() is not None:
        state = trained(one, number)
        await ts.put_state_dict(state, key)
        dcp.save(state, checkpoint_id=files, process_group=groups[one.size()])
    dist.barrier()
    if other.get_coordinate() is not None:
        mine, theirs = trained(other, 100), trained(other, 200)
        assert not same(local(mine), local(theirs))
        got = await ts.get_state_dict(key, mine)
        dcp.load(theirs, checkpoint_id=files, process_group=groups[other.size()])
        # Tensors are filled in place; everything else is in what is returned.
        assert got["model"]["scale"] is mine["model"]["scale"]
        assert same(local(got), local(theirs)), (one, other)
        again = await ts.get(f"{key}/model.scale", mine["model"]["scale"])
        assert again is mine["model"]["scale"]
    dist.barrier()


async def every_placement() -> None:
    """Single DTensors, of every placement that a mesh of two dimensions has, into every other."""
    where = mesh((2, 4))
    placements = [
        (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(1)), (Shard(1), Shard(0)),
        (Replicate(), Shard(0)), (Shard(1), Replicate()), (_StridedShard(0, split_factor=4), Shard(0)),
    ]
    whole = torch.arange(70.0).reshape(10, 7)
    for number, placement in enumerate(placements):
        await ts.put(f"p.{number}", distributed(whole, where, placement))
    dist.barrier()
    for number in range(len(placements)):
        for placement in placements:
            into = distributed(torch.zeros(10, 7), where, placement)
            assert await ts.get(f"p.{number}", into) is into
            assert torch.equal(into.to_local(), distributed(whole, where, placement).to_local())
        assert torch.equal(await ts.get(f"p.{number}"), whole)
    dist.barrier()


async def snapshots(where: DeviceMesh) -> None:
    """What `direct_rdma` publishes is what the tensors were at that moment, however often."""
    state = {"w": distributed(torch.zeros(16, 2), where, (Shard(0),)), "n": torch.tensor([123457])}
    await ts.put_state_dict(state, "live", direct_rdma=True, transfer_dtype=torch.bfloat16)
    dist.barrier()
    into = {"w": torch.full((16, 2), 9.0), "n": torch.tensor([0])}
    for step in (1, 2):
        state["w"].to_local().fill_(step)
        dist.barrier()
        assert await ts.get_state_dict("live", into, direct_rdma=True) is into
        # What was put is what is got, though the tensors have gone on.
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


async def one_version(where: DeviceMesh) -> None:
    """Ranks that put again and again while others get: what is got is of one put."""
    half = DeviceMesh("cpu", [0, 1, 2, 3])
    if dist.get_rank() < 4:
        for number in range(20):
            value = torch.full((64, 64), float(number))
            await ts.put_state_dict({"w": distributed(value, half, (Shard(0),)), "number": number}, "same")
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


async def ranks_that_differ(where: DeviceMesh) -> None:
    """Plain values that are another on each rank: those of the lowest are stored."""
    state = {"w": distributed(torch.ones(8, 1), where, (Shard(0),)), "seed": dist.get_rank()}
    await ts.put_state_dict(state, "differ")
    dist.barrier()
    assert (await ts.get_state_dict("differ"))["seed"] == 0
    dist.barrier()


async def a_put_that_fails(where: DeviceMesh) -> None:
    """A put that fails on one rank, or ends there before its time, is not taken for a later one."""
    for number in range(1, 9):
        state: dict[str, Any] = {"w": distributed(torch.full((8, 1), float(number)), where, (Shard(0),))}
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
