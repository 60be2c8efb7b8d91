"""One rank of test_dcp.py: python dcp_ranks.py FOLDER RANKS RANK PATH.

Exits with 0 if all checks hold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tssd
from equality import same
from sharding import distribute
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from training import make_mesh, make_trained_state, to_local
from tssd.dcp import TssdReader, TssdWriter

FOLDER, RANKS, RANK, PATH = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    groups: dict[int, Any] = {size: dist.new_group(list(range(size))) for size in (2, 4, 8)}
    shapes = [((2,), (4,)), ((4,), (2,)), ((2, 2), (4,)), ((2,), (2, 4)), ((4, 2), (2, 4)), ((4, 2), (2, 2))]
    for number, (save_shape, load_shape) in enumerate(shapes):
        meshes = [make_mesh(shape) for shape in (save_shape, load_shape)]
        check_resharding(number, meshes[0], meshes[1], groups)
    check_several_boxes_per_rank(make_mesh((RANKS,)))
    check_async_save(make_mesh((RANKS,)))
    check_failing_rank(make_mesh((RANKS,)))
    check_save_without_collectives()
    dist.barrier()
    dist.destroy_process_group()


def check_resharding(number: int, save_mesh: DeviceMesh, load_mesh: DeviceMesh, groups: dict[int, Any]) -> None:
    """Saves on one mesh and loads on another. The result equals that of the files which DCP itself writes."""
    files = FOLDER / f"files{number}"
    if save_mesh.get_coordinate() is not None:
        state, group = make_trained_state(save_mesh, number), groups[save_mesh.size()]
        dcp.save(state, storage_writer=TssdWriter(PATH), process_group=group)
        dcp.save(state, checkpoint_id=files, process_group=group)
    dist.barrier()
    if load_mesh.get_coordinate() is not None:
        group = groups[load_mesh.size()]
        actual, expected = make_trained_state(load_mesh, 100), make_trained_state(load_mesh, 200)
        assert not same(to_local(actual), to_local(expected))
        dcp.load(actual, storage_reader=TssdReader(PATH), process_group=group)
        dcp.load(expected, checkpoint_id=files, process_group=group)
        assert same(to_local(actual), to_local(expected)), (save_mesh, load_mesh)
        assert actual["nested"]["step"] == number
    with tssd.Store(PATH) as store:
        whole = store.get("checkpoint", fqn="uneven.(10, 3)")
        assert torch.equal(whole, torch.arange(30.0).reshape(10, 3) + number)
    dist.barrier()


def check_several_boxes_per_rank(mesh: DeviceMesh) -> None:
    """Local tensors declare their offsets, like embedding tables. The load splits them differently."""
    rows, whole = 3 * RANKS, torch.arange(6.0 * RANKS).reshape(3 * RANKS, 2)

    def make_table(offsets: list[int], sizes: list[int], fill: float | None) -> DTensor:
        parts = [whole[at : at + size].clone() for at, size in zip(offsets, sizes)]
        if fill is not None:
            parts = [torch.full_like(part, fill) for part in parts]
        wrapped = LocalShardsWrapper(parts, [(at, 0) for at in offsets])
        return DTensor.from_local(
            wrapped, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 2)), stride=(2, 1)
        )

    saved = {"table": make_table([RANK * 3, RANK * 3 + 2], [2, 1], None)}
    dcp.save(saved, storage_writer=TssdWriter(PATH, "table"))
    into = {"table": make_table([RANK, RANKS + 2 * RANK], [1, 2], -1.0)}
    dcp.load(into, storage_reader=TssdReader(PATH, "table"))
    shards = into["table"].to_local().local_shards()
    assert torch.equal(shards[0], whole[RANK : RANK + 1])
    assert torch.equal(shards[1], whole[RANKS + 2 * RANK : RANKS + 2 * RANK + 2])
    dist.barrier()


def make_numbered_state(mesh: DeviceMesh, number: int) -> dict[str, Any]:
    return {"w": distribute(torch.full((10, 3), float(number)), mesh, (Shard(0),)), "number": number}


def check_stored_number(mesh: DeviceMesh, key: str, number: int) -> None:
    state = make_numbered_state(mesh, -1)
    dcp.load(state, storage_reader=TssdReader(PATH, key))
    assert same(to_local(state), to_local(make_numbered_state(mesh, number))), state
    dist.barrier()


def check_async_save(mesh: DeviceMesh) -> None:
    """The caller may write to tensors as soon as `async_save` has returned."""
    writer = TssdWriter(PATH, "background")
    for number in range(2):
        state = make_numbered_state(mesh, number)
        saving = dcp.async_save(state, storage_writer=writer)
        state["w"].to_local().fill_(7)
        saving.result()
        dist.barrier()
        check_stored_number(mesh, "background", number)


class FailingPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if RANK == 1:
            raise RuntimeError("no data")
        return super().resolve_data(write_item)


def check_failing_rank(mesh: DeviceMesh) -> None:
    """A save that fails on one rank leaves the previous version in place. The next save succeeds."""
    writer = TssdWriter(PATH, "failing")
    dcp.save(make_numbered_state(mesh, 1), storage_writer=writer)
    try:
        dcp.save(make_numbered_state(mesh, 2), storage_writer=writer, planner=FailingPlanner())
        raise AssertionError("what one rank lacks was saved")
    except dcp.CheckpointException as error:
        assert "no data" in str(error)
    check_stored_number(mesh, "failing", 1)
    dcp.save(make_numbered_state(mesh, 3), storage_writer=TssdWriter(PATH, "failing"))
    check_stored_number(mesh, "failing", 3)


def check_save_without_collectives() -> None:
    """Each rank saves and loads a state dict of its own."""
    state = {"w": torch.full((3,), float(RANK)), "rank": RANK}
    dcp.save(state, storage_writer=TssdWriter(PATH, "alone"), use_collectives=False)
    into = {"w": torch.zeros(3), "rank": -1}
    dcp.load(into, storage_reader=TssdReader(PATH, "alone"))
    assert same(into, state), into


main()
