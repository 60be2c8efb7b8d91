"""One rank of test_store_ranks.py: python store_ranks.py FOLDER RANKS RANK URL. Exits with 0 if all checks hold."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tssd
from same import same
from sharding import SHAPES, distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

FOLDER, RANKS, RANK = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

# The mesh's name and its placements.
Sharding = tuple[str, tuple[Placement, ...]]
Meshes = dict[str, DeviceMesh]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    store = tssd.Store(sys.argv[4])
    meshes = {
        "2": DeviceMesh("cpu", [2, 5]),
        "4": DeviceMesh("cpu", [0, 1, 2, 3]),
        "2x2": DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("dp", "tp")),
        "2x4": init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")),
    }
    every_sharding_to_every_other(store, meshes)
    trainers_to_generators(store, meshes)
    shards_without_dtensors(store)
    stages_of_a_pipeline(store)
    published_tensor_by_tensor(store, meshes)
    tables_that_some_ranks_have(store)
    leaves_that_all_ranks_have(store)
    partial_is_refused(store, meshes["2x4"])
    two_that_overwrite_each_other(store)
    four_that_overwrite_together(store, meshes["4"])
    dist.barrier()
    dist.destroy_process_group()


def whole(shape: tuple[int, int], version: int) -> torch.Tensor:
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + 1000 * version


def every_sharding_to_every_other(store: tssd.Store, meshes: Meshes) -> None:
    one = [(Shard(0),), (Shard(1),), (Replicate(),)]
    two = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))
    shardings: list[Sharding] = list(itertools.product(["2", "4"], one))
    for grid in ("2x2", "2x4"):
        shardings += [(grid, placements) for placements in two]
        fsdp = _StridedShard(0, split_factor=meshes[grid].size(1))
        shardings.append((grid, (fsdp, Shard(0))))
    here = [(meshes[name], placements) for name, placements in shardings if inside(meshes[name])]
    intos = [cut(mesh, placements, 0) for mesh, placements in here]
    for version, (name, placements) in enumerate(shardings, 1):
        mesh = meshes[name]
        if inside(mesh):
            state = cut(mesh, placements, version) | {"step": version}
            writers = mesh.mesh.flatten().tolist()
            assert store.put_state_dict(state, "policy", version=version, writers=writers).version == version
        dist.barrier()
        assert int(store.wait_for_version("policy", version, timeout=60)) == version
        for into in intos:
            get_into(store, version, into)
        get_whole_and_parts(store, version)
        dist.barrier()


def inside(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def cut(mesh: DeviceMesh, placements: tuple[Placement, ...], version: int) -> dict[str, Any]:
    """The tensors of a version in a sharding, which DTensor itself puts together again."""
    state = {str(shape): distributed(whole(shape, version), mesh, placements) for shape in SHAPES}
    for shape in SHAPES:
        assert torch.equal(state[str(shape)].full_tensor(), whole(shape, version)), (placements, shape)
    return state


def get_into(store: tssd.Store, version: int, into: dict[str, DTensor]) -> None:
    """Fills shards of the version before with those of this one."""
    locals_ = {name: tensor.to_local() for name, tensor in into.items()}
    wanted = {name: local + 1000 for name, local in locals_.items()}
    got, report = store.get_state_dict("policy", into, return_report=True)
    assert got is into and report.version == version
    assert report.bytes_transferred == report.bytes_needed
    for name, local in locals_.items():
        assert into[name].to_local().data_ptr() == local.data_ptr()
        assert torch.equal(local, wanted[name]), (version, into[name].placements, name)


def get_whole_and_parts(store: tssd.Store, version: int) -> None:
    plain = store.get_state_dict("policy")
    assert plain["step"] == version
    fused = {str(shape): torch.full((shape[0], shape[1] + 3), -1.0) for shape in SHAPES}
    into = {name: tensor[:, 1:-2] for name, tensor in fused.items()}
    store.get_state_dict("policy", into)
    for shape in SHAPES:
        name, wanted = str(shape), whole(shape, version)
        assert torch.equal(plain[name], wanted)
        assert torch.equal(into[name], wanted)
        assert (fused[name][:, 0] == -1).all() and (fused[name][:, -2:] == -1).all()
        for rows, columns in itertools.product(*map(ranges, shape)):
            size = (len(rows), len(columns))
            box = tssd.TensorSlice([rows.start, columns.start], None, shape, size, [])
            part = store.get("policy", fqn=name, tensor_slice=box)
            assert torch.equal(part, wanted[rows.start : rows.stop, columns.start : columns.stop])


def ranges(size: int) -> list[range]:
    """All of it, what lies in the middle, the last one."""
    return [range(size), range(size // 3, max(size - 1, size // 3)), range(max(size - 1, 0), size)]


def trainers_to_generators(store: tssd.Store, meshes: Meshes) -> None:
    """FSDP2, HSDP and FSDP2 over TP, with their optimizers; generators with TP of other sizes."""

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5))

    tp = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for version, name in enumerate(("4", "2x2", "2x4"), 1):
        mesh = meshes[name]
        if inside(mesh):
            trainer = model(0)
            if name == "2x4":
                parallelize_module(trainer, mesh["tp"], tp)
            fully_shard(trainer, mesh=mesh["dp"] if name == "2x4" else mesh)
            optimizer = torch.optim.AdamW(trainer.parameters())
            trainer(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            state = {"model": trainer.state_dict(), "optimizer": optimizer.state_dict()}
            ranks = mesh.mesh.flatten().tolist()
            store.put_state_dict(state, "trainer", version=version, writers=ranks)
            wanted = leaves(state)
            if RANK == ranks[0]:
                torch.save(wanted, FOLDER / "wanted.pt")
        dist.barrier()
        wanted = torch.load(FOLDER / "wanted.pt")
        assert same(leaves(store.get_state_dict("trainer")), wanted)
        for generators in (meshes["2"], meshes["2x4"]["tp"]):
            if inside(generators):
                generator = model(1)
                parallelize_module(generator, generators, tp)
                into = {"model": generator.state_dict()}
                store.get_state_dict("trainer", into, strict=False)
                for path, tensor in leaves(into).items():
                    assert same(tensor, wanted[path]), path
        dist.barrier()


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a nested dict by their paths, tensors whole."""
    if isinstance(state, DTensor):
        return {path: state.full_tensor()}
    if not isinstance(state, (dict, list)):
        return {path: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    children = [leaves(value, f"{path}/{key}") for key, value in items]
    return {name: leaf for each in children for name, leaf in each.items()}


def shards_without_dtensors(store: tssd.Store) -> None:
    """Rows are put as arrays, and got as columns."""
    wanted = whole((10, 8), 1).numpy()
    start, stop = 10 * RANK // RANKS, 10 * (RANK + 1) // RANKS
    rows = tssd.TensorSlice([start, 0], None, [10, 8], [stop - start, 8], [])
    state = {"w": tssd.TensorShard(wanted[start:stop], rows)}
    encoded = tssd.TorchStoreStateDict.from_state_dict(state)
    for version, value in enumerate((state, encoded), 1):
        store.put("rows", value, version=version, writer=RANK, writers=RANKS)
        dist.barrier()
        column = np.full((10, 1), -1.0, np.float32)
        columns = tssd.TensorSlice([0, RANK], None, [10, 8], [10, 1], [])
        store.get_state_dict("rows", {"w": tssd.TensorShard(column, columns)}, version=version)
        assert np.array_equal(column, wanted[:, RANK : RANK + 1])
        dist.barrier()


def stages_of_a_pipeline(store: tssd.Store) -> None:
    """Each stage has a mesh and names of its own: what the meshes say of the writers is not all."""
    meshes = [DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [4, 5, 6, 7])]
    stage = RANK // 4
    wanted = {f"layers.{number}": whole((10, 3), number) for number in range(2)}
    name = f"layers.{stage}"
    state = {name: distributed(wanted[name], meshes[stage], (Shard(0),)), "step": 7}
    try:
        store.put_state_dict(state, "pipeline", version=1)
        raise AssertionError("one stage was taken for all")
    except ValueError as error:
        assert "writers" in str(error), error
    for version, writers in ((1, RANKS), (2, dist.group.WORLD), (3, list(range(RANKS)))):
        store.put_state_dict(state, "pipeline", version=version, writers=writers)
        dist.barrier()
        got = store.get_state_dict("pipeline", version=version)
        assert sorted(got) == [*wanted, "step"] and got["step"] == 7
        assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
        dist.barrier()


def published_tensor_by_tensor(store: tssd.Store, meshes: Meshes) -> None:
    """Each rank publishes its shards one by one, in buckets smaller than most; others iterate, or fill theirs."""
    shardings: list[Sharding] = [
        ("4", (Shard(0),)),
        ("2x4", (Shard(0), Shard(1))),
        ("2x2", (Replicate(), Shard(1))),
        ("2x2", (_StridedShard(0, split_factor=2), Shard(0))),
        # Several boxes, of which some ranks have replicas.
        ("2x4", (_StridedShard(0, split_factor=3), Replicate())),
    ]
    for version, (name, placements) in enumerate(shardings, 1):
        mesh = meshes[name]
        # What is wider is cast in parts.
        dtype = torch.float32 if version == 1 else torch.float64
        if inside(mesh):
            writers = mesh.mesh.flatten().tolist()
            with store.publish(
                "published", version=version, writers=writers, bucket_bytes=16, transfer_dtype=dtype
            ) as publisher:
                for fqn, tensor in cut(mesh, placements, version).items():
                    publisher.put(fqn, tensor)
            assert publisher.report is not None and publisher.report.version == version
        dist.barrier()
        with store.open("published", version=version) as opened:
            received = dict(opened.items())
        for shape in SHAPES:
            assert torch.equal(received[str(shape)], whole(shape, version).to(dtype)), (name, shape)
        into = {str(shape): distributed(torch.zeros(shape), meshes["2x4"], (Shard(1), Shard(0))) for shape in SHAPES}
        store.get_state_dict("published", into, cast=True)
        for shape in SHAPES:
            assert torch.equal(into[str(shape)].full_tensor(), whole(shape, version)), (name, shape)
        dist.barrier()
    # One of four fails half way: there is no such version, for nobody.
    mesh = meshes["4"]
    if inside(mesh):
        state = cut(mesh, (Shard(0),), 6)
        try:
            with store.publish("published", version=6, writers=[0, 1, 2, 3]) as publisher:
                for number, (fqn, tensor) in enumerate(state.items()):
                    if RANK == 2 and number == 1:
                        raise ArithmeticError("a trainer has failed")
                    publisher.put(fqn, tensor)
            assert publisher.report is not None and not publisher.report.visible and RANK != 2
        except ArithmeticError:
            assert RANK == 2
        except tssd.TssdError as error:
            assert RANK != 2, error
    dist.barrier()
    head = store.head("published")
    assert head is not None and head.version == 5
    dist.barrier()


def tables_that_some_ranks_have(store: tssd.Store) -> None:
    """Embedding tables: local tensors that name their own offsets, several on some ranks, none on others."""
    mesh = init_device_mesh("cpu", (RANKS,))
    # All of them are what a float16 can be.
    table, moment = whole((12, 3), 1), torch.arange(12.0)
    cuts = {0: [(6, 9), (0, 2)], 3: [(2, 6)], 7: [(9, 12)]}

    def sharded(tensor: torch.Tensor, rows: list[tuple[int, int]]) -> DTensor:
        offsets = [(start,) + (0,) * (tensor.ndim - 1) for start, _ in rows]
        local = LocalShardsWrapper([tensor[start:end].clone() for start, end in rows], offsets)
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def state(rows: list[tuple[int, int]], scale: int, dtype: torch.dtype) -> dict[str, DTensor]:
        every = {"table": table, "moment": moment}
        return {name: sharded((tensor * scale).to(dtype), rows) for name, tensor in every.items()}

    def check(version: int, dtype: torch.dtype, other: torch.dtype) -> None:
        dist.barrier()
        got = store.get_state_dict("tables")
        assert torch.equal(got["table"], (table * version).to(dtype))
        assert torch.equal(got["moment"], (moment * version).to(dtype))
        rows = cuts.get((RANK + 1) % RANKS, [])
        for own in (dtype, other):
            into = store.get_state_dict("tables", state(rows, 0, own), cast=own != dtype)
            for name, tensor in state(rows, version, own).items():
                found, wanted = (each.to_local().local_shards() for each in (into[name], tensor))
                assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), name
        try:
            store.get_state_dict("tables", state(rows, 0, other))
            assert not rows, "what is of another dtype was filled"
        except tssd.TssdTypeError as error:
            assert rows and error.kind == "WrongType", error
        dist.barrier()

    rows = cuts.get(RANK, [])
    # Nor does one that has nothing put alone: where there are several, it is said who they are.
    mine = state(rows, 1, torch.float16)
    for name in mine:
        try:
            if name == "table":
                encoded = tssd.TorchStoreStateDict.from_state_dict({name: mine[name], "bias": 1})
                store.put("alone", encoded)
            else:
                with store.publish("alone") as publisher:
                    publisher.put("bias", 1)
                    publisher.put(name, mine[name])
            raise AssertionError("it was put alone")
        except tssd.TssdValueError as error:
            assert "writers=" in str(error), error
    dist.barrier()
    assert not store.exists("alone")
    store.put_state_dict(state(rows, 1, torch.float16), "tables", writers=RANKS)
    check(1, torch.float16, torch.float32)
    # What is wider is cast in parts.
    with store.publish("tables", writers=RANKS, bucket_bytes=16, transfer_dtype=torch.float64) as publisher:
        for name, tensor in state(rows, 2, torch.float32).items():
            publisher.put(name, tensor)
    check(2, torch.float64, torch.float16)


def leaves_that_all_ranks_have(store: tssd.Store) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    shard = distributed(torch.ones(RANKS), mesh, (Shard(0),))
    equal = torch.arange(250_000.0)
    replicated = distributed(equal, mesh, (Replicate(),))
    state = {"w": shard, "plain": equal[:3], "replicated": replicated, "text": "x"}
    store.put_state_dict(state, "agree")
    dist.barrier()
    head = store.head("agree")
    assert head is not None and head.writers == list(range(RANKS))
    assert head.bytes < 2 * equal.nbytes, "the replicas are stored once"
    got = store.get_state_dict("agree")
    assert list(got) == list(state) and got["text"] == "x"
    assert torch.equal(got["plain"], equal[:3]) and torch.equal(got["replicated"], equal)

    for name, differs in (("tensor", torch.full((2,), float(RANK))), ("number", RANK)):
        state = {"w": shard, "a": {name: differs}}
        try:
            report = store.put_state_dict(state, "differ", version=1)
            assert not report.visible, "it was proven"
        except tssd.TssdValueError as error:
            assert error.kind in ("rejected", "refused") and f"a.{name}" in str(error), error
        dist.barrier()
        assert not store.exists("differ")
    store.put_state_dict(state, "differ", version=1, divergent="lowest")
    dist.barrier()
    assert store.get_state_dict("differ")["a"] == {"number": 0}
    dist.barrier()
    store.put_state_dict(state, "differ", version=2, divergent="keep")
    dist.barrier()
    assert store.get_state_dict("differ", writer=RANK)["a"] == {"number": RANK}
    dist.barrier()


def partial_is_refused(store: tssd.Store, mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Partial("sum")], run_check=False)
    try:
        store.put_state_dict({"a": {"w": partial}}, "partial")
        raise AssertionError("Partial was put")
    except tssd.TssdValueError as error:
        assert (error.kind, error.fqn) == ("PartialPlacement", "a.w"), error
    assert not store.exists("partial")


SIZES = [1, 1000, 70_000, 300_000]


def numbered(number: int) -> dict[str, Any]:
    return {str(size): torch.full((size,), number) for size in SIZES} | {"number": number}


def check_numbered(state: dict[str, Any]) -> int:
    number = int(state["number"])
    for size in SIZES:
        assert (state[str(size)] == number).all(), (number, size, state[str(size)].unique())
    return number


def two_that_overwrite_each_other(store: tssd.Store) -> None:
    """Each of two ranks makes versions of its own of one key; every other rank reads them all the time."""
    dist.barrier()
    if RANK < 2:
        visible = 0
        for number in range(50):
            try:
                visible += store.put_state_dict(numbered(2 * number + RANK), "torn").visible
            except tssd.TssdValueError as error:
                # The other's newer version was there first. A reader sees the one or the other.
                assert "superseded" in str(error), error
        assert visible
        store.put(f"done {RANK}", True)
    else:
        read(store, "torn", lambda _: all(store.exists(f"done {rank}") for rank in range(2)))
    dist.barrier()


def four_that_overwrite_together(store: tssd.Store, mesh: DeviceMesh) -> None:
    """The versions of a sharded dict follow one another, while others read them in their own way."""
    versions = 30
    if inside(mesh):
        for number in range(versions):
            state = {
                name: distributed(value, mesh, (Shard(0),)) if isinstance(value, torch.Tensor) else value
                for name, value in numbered(number).items()
            }
            store.put_state_dict(state, "together", writers=[0, 1, 2, 3])
    else:
        reads = read if RANK < 6 else read_under_leases
        reads(store, "together", lambda number: number == versions - 1)
    dist.barrier()


def read(store: tssd.Store, key: str, is_last: Callable[[int], bool]) -> None:
    """Views, copies and parts of whatever version is there, until the last one is."""
    store.wait_for_version(key, 1, timeout=60)
    views: dict[str, Any] = store.get_state_dict(key)
    seen, number = 0, -1
    while not is_last(number):
        before = check_numbered(views)
        into = numbered(-1)
        store.get_state_dict(key, into)
        into["number"] = into["1"]
        check_numbered(into)
        with store.open(key) as version:
            opened = {name: version.get_tensor(name) for name in map(str, SIZES)}
            check_numbered(opened | {"number": opened["1"]})
        # The views that were got a version ago are still what they were.
        assert check_numbered(views) == before
        views = store.get_state_dict(key)
        number = check_numbered(views)
        seen += 1
    assert seen


def read_under_leases(store: tssd.Store, key: str, is_last: Callable[[int], bool]) -> None:
    """What is waited for stays, however often it is got and whatever is put meanwhile."""
    version, number = 0, -1
    while not is_last(number):
        with store.wait_for_version(key, version + 1, timeout=60) as lease:
            number = check_numbered(store.get_state_dict(key, version=lease))
            into = numbered(-1)
            store.get_state_dict(key, into, version=lease)
            assert check_numbered(into | {"number": into["1"]}) == number
            assert int(lease) > version
            version = int(lease)


main()
