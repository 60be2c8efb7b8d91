"""One rank of test_dcp.py: python dcp_ranks.py FOLDER RANKS RANK PATH. Exits with 0 if all checks hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tssd
from same import same
from sharding import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from training import local, mesh, trained
from tssd.dcp import TssdReader, TssdWriter

FOLDER, RANKS, RANK, PATH = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    groups: dict[int, Any] = {size: dist.new_group(list(range(size))) for size in (2, 4, 8)}
    shapes = [((2,), (4,)), ((4,), (2,)), ((2, 2), (4,)), ((2,), (2, 4)), ((4, 2), (2, 4)), ((4, 2), (2, 2))]
    for number, (one, other) in enumerate(shapes):
        meshes = [mesh(shape) for shape in (one, other)]
        resharded(number, meshes[0], meshes[1], groups)
    several_boxes_on_a_rank(mesh((RANKS,)))
    in_the_background(mesh((RANKS,)))
    a_rank_that_fails(mesh((RANKS,)))
    each_for_itself()
    dist.barrier()
    dist.destroy_process_group()


def resharded(number: int, one: DeviceMesh, other: DeviceMesh, groups: dict[int, Any]) -> None:
    """What is saved on one mesh and loaded on another is what DCP's own files give there."""
    files = FOLDER / f"files{number}"
    if one.get_coordinate() is not None:
        state, group = trained(one, number), groups[one.size()]
        dcp.save(state, storage_writer=TssdWriter(PATH), process_group=group)
        dcp.save(state, checkpoint_id=files, process_group=group)
    dist.barrier()
    if other.get_coordinate() is not None:
        group = groups[other.size()]
        mine, theirs = trained(other, 100), trained(other, 200)
        assert not same(local(mine), local(theirs))
        dcp.load(mine, storage_reader=TssdReader(PATH), process_group=group)
        dcp.load(theirs, checkpoint_id=files, process_group=group)
        assert same(local(mine), local(theirs)), (one, other)
        assert mine["nested"]["step"] == number
    with tssd.Store(PATH) as store:
        whole = store.get("checkpoint", fqn="uneven.(10, 3)")
        assert torch.equal(whole, torch.arange(30.0).reshape(10, 3) + number)
    dist.barrier()


def several_boxes_on_a_rank(where: DeviceMesh) -> None:
    """Local tensors that name their own offsets, as those of embedding tables do; loaded into others."""
    rows, whole = 3 * RANKS, torch.arange(6.0 * RANKS).reshape(3 * RANKS, 2)

    def table(offsets: list[int], sizes: list[int], fill: float | None) -> DTensor:
        parts = [whole[at : at + size].clone() for at, size in zip(offsets, sizes)]
        if fill is not None:
            parts = [torch.full_like(part, fill) for part in parts]
        wrapped = LocalShardsWrapper(parts, [(at, 0) for at in offsets])
        return DTensor.from_local(
            wrapped, where, [Shard(0)], run_check=False, shape=torch.Size((rows, 2)), stride=(2, 1)
        )

    saved = {"table": table([RANK * 3, RANK * 3 + 2], [2, 1], None)}
    dcp.save(saved, storage_writer=TssdWriter(PATH, "table"))
    into = {"table": table([RANK, RANKS + 2 * RANK], [1, 2], -1.0)}
    dcp.load(into, storage_reader=TssdReader(PATH, "table"))
    found = into["table"].to_local().local_shards()
    assert torch.equal(found[0], whole[RANK : RANK + 1])
    assert torch.equal(found[1], whole[RANKS + 2 * RANK : RANKS + 2 * RANK + 2])
    dist.barrier()


def numbered(where: DeviceMesh, number: int) -> dict[str, Any]:
    return {"w": distributed(torch.full((10, 3), float(number)), where, (Shard(0),)), "number": number}


def check(where: DeviceMesh, key: str, number: int) -> None:
    state = numbered(where, -1)
    dcp.load(state, storage_reader=TssdReader(PATH, key))
    assert same(local(state), local(numbered(where, number))), state
    dist.barrier()


def in_the_background(where: DeviceMesh) -> None:
    """Tensors may be written to as soon as async_save has returned."""
    writer = TssdWriter(PATH, "background")
    for number in range(2):
        state = numbered(where, number)
        saving = dcp.async_save(state, storage_writer=writer)
        state["w"].to_local().fill_(7)
        saving.result()
        dist.barrier()
        check(where, "background", number)


class Failing(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if RANK == 1:
            raise RuntimeError("no data")
        return super().resolve_data(write_item)


def a_rank_that_fails(where: DeviceMesh) -> None:
    """The version before stays, and the next save is not in its way."""
    writer = TssdWriter(PATH, "failing")
    dcp.save(numbered(where, 1), storage_writer=writer)
    try:
        dcp.save(numbered(where, 2), storage_writer=writer, planner=Failing())
        raise AssertionError("what one rank lacks was saved")
    except dcp.CheckpointException as error:
        assert "no data" in str(error)
    check(where, "failing", 1)
    dcp.save(numbered(where, 3), storage_writer=TssdWriter(PATH, "failing"))
    check(where, "failing", 3)


def each_for_itself() -> None:
    state = {"w": torch.full((3,), float(RANK)), "rank": RANK}
    dcp.save(state, storage_writer=TssdWriter(PATH, "alone"), use_collectives=False)
    into = {"w": torch.zeros(3), "rank": -1}
    dcp.load(into, storage_reader=TssdReader(PATH, "alone"))
    assert same(into, state), into


main()
