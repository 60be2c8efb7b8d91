"""One rank of test_store_ranks.py: python store_ranks.py FOLDER RANKS RANK URL.

Exits with 0 if all checks hold.
"""

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
from equality import same
from sharding import SHAPES, distribute
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from tssd.mapping import Mapping, fuse, stack

FOLDER, RANKS, RANK = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

# Name of a mesh, and placements on it.
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
    check_every_sharding_pair(store, meshes)
    check_trainers_to_generators(store, meshes)
    check_shards_without_dtensors(store)
    check_pipeline_stages(store)
    check_mapped_shards(store, meshes)
    check_publish_tensor_by_tensor(store, meshes)
    check_tables_on_some_ranks(store)
    check_leaves_on_all_ranks(store)
    check_partial_rejected(store, meshes["2x4"])
    check_competing_writers(store)
    check_reads_during_sharded_puts(store, meshes["4"])
    dist.barrier()
    dist.destroy_process_group()


def make_whole(shape: tuple[int, int], version: int) -> torch.Tensor:
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + 1000 * version


def check_every_sharding_pair(store: tssd.Store, meshes: Meshes) -> None:
    placements_1d = [(Shard(0),), (Shard(1),), (Replicate(),)]
    placements_2d = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))
    shardings: list[Sharding] = list(itertools.product(["2", "4"], placements_1d))
    for grid in ("2x2", "2x4"):
        shardings += [(grid, placements) for placements in placements_2d]
        fsdp = _StridedShard(0, split_factor=meshes[grid].size(1))
        shardings.append((grid, (fsdp, Shard(0))))
    own_shardings = [(meshes[name], placements) for name, placements in shardings if is_member(meshes[name])]
    targets = [make_sharded_state(mesh, placements, 0) for mesh, placements in own_shardings]
    for version, (name, placements) in enumerate(shardings, 1):
        mesh = meshes[name]
        if is_member(mesh):
            state = make_sharded_state(mesh, placements, version) | {"step": version}
            writers = mesh.mesh.flatten().tolist()
            assert store.put_state_dict(state, "policy", version=version, writers=writers).version == version
        dist.barrier()
        assert int(store.wait_for_version("policy", version, timeout=60)) == version
        for into in targets:
            check_fill(store, version, into)
        check_whole_and_parts(store, version)
        dist.barrier()


def is_member(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def make_sharded_state(mesh: DeviceMesh, placements: tuple[Placement, ...], version: int) -> dict[str, Any]:
    """Returns the sharded tensors of a version. Checks that `full_tensor` restores them."""
    state = {str(shape): distribute(make_whole(shape, version), mesh, placements) for shape in SHAPES}
    for shape in SHAPES:
        assert torch.equal(state[str(shape)].full_tensor(), make_whole(shape, version)), (placements, shape)
    return state


def check_fill(store: tssd.Store, version: int, into: dict[str, DTensor]) -> None:
    """Fills shards that hold the previous version with those of this one."""
    local_tensors = {name: tensor.to_local() for name, tensor in into.items()}
    expected = {name: local + 1000 for name, local in local_tensors.items()}
    got, report = store.get_state_dict("policy", into, return_report=True)
    assert got is into and report.version == version
    assert report.bytes_transferred == report.bytes_needed
    for name, local in local_tensors.items():
        assert into[name].to_local().data_ptr() == local.data_ptr()
        assert torch.equal(local, expected[name]), (version, into[name].placements, name)


def check_whole_and_parts(store: tssd.Store, version: int) -> None:
    plain = store.get_state_dict("policy")
    assert plain["step"] == version
    fused = {str(shape): torch.full((shape[0], shape[1] + 3), -1.0) for shape in SHAPES}
    into = {name: tensor[:, 1:-2] for name, tensor in fused.items()}
    store.get_state_dict("policy", into)
    for shape in SHAPES:
        name, expected = str(shape), make_whole(shape, version)
        assert torch.equal(plain[name], expected)
        assert torch.equal(into[name], expected)
        assert (fused[name][:, 0] == -1).all() and (fused[name][:, -2:] == -1).all()
        for rows, columns in itertools.product(*map(sample_ranges, shape)):
            size = (len(rows), len(columns))
            box = tssd.TensorSlice([rows.start, columns.start], None, shape, size, [])
            part = store.get("policy", fqn=name, tensor_slice=box)
            assert torch.equal(part, expected[rows.start : rows.stop, columns.start : columns.stop])


def sample_ranges(size: int) -> list[range]:
    """Returns the whole range, the middle part and the last element."""
    return [range(size), range(size // 3, max(size - 1, size // 3)), range(max(size - 1, 0), size)]


def check_trainers_to_generators(store: tssd.Store, meshes: Meshes) -> None:
    """Trainers use FSDP2, HSDP and FSDP2 over TP, with optimizers. Generators use TP of other sizes."""

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5))

    tp = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for version, name in enumerate(("4", "2x2", "2x4"), 1):
        mesh = meshes[name]
        if is_member(mesh):
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
            expected = flatten_leaves(state)
            if RANK == ranks[0]:
                torch.save(expected, FOLDER / "wanted.pt")
        dist.barrier()
        expected = torch.load(FOLDER / "wanted.pt")
        assert same(flatten_leaves(store.get_state_dict("trainer")), expected)
        for generators in (meshes["2"], meshes["2x4"]["tp"]):
            if is_member(generators):
                generator = model(1)
                parallelize_module(generator, generators, tp)
                into = {"model": generator.state_dict()}
                store.get_state_dict("trainer", into, strict=False)
                for path, tensor in flatten_leaves(into).items():
                    assert same(tensor, expected[path]), path
        dist.barrier()


def flatten_leaves(state: Any, path: str = "") -> dict[str, Any]:
    """Returns the leaves of a nested dict by path, with full tensors."""
    if isinstance(state, DTensor):
        return {path: state.full_tensor()}
    if not isinstance(state, (dict, list)):
        return {path: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    children = [flatten_leaves(value, f"{path}/{key}") for key, value in items]
    return {name: leaf for each in children for name, leaf in each.items()}


def check_shards_without_dtensors(store: tssd.Store) -> None:
    """Each rank puts rows of an array and gets a column."""
    expected = make_whole((10, 8), 1).numpy()
    start, stop = 10 * RANK // RANKS, 10 * (RANK + 1) // RANKS
    rows = tssd.TensorSlice([start, 0], None, [10, 8], [stop - start, 8], [])
    state = {"w": tssd.TensorShard(expected[start:stop], rows)}
    encoded = tssd.TorchStoreStateDict.from_state_dict(state)
    for version, value in enumerate((state, encoded), 1):
        store.put("rows", value, version=version, writer=RANK, writers=RANKS)
        dist.barrier()
        column = np.full((10, 1), -1.0, np.float32)
        columns = tssd.TensorSlice([0, RANK], None, [10, 8], [10, 1], [])
        store.get_state_dict("rows", {"w": tssd.TensorShard(column, columns)}, version=version)
        assert np.array_equal(column, expected[:, RANK : RANK + 1])
        dist.barrier()


def check_pipeline_stages(store: tssd.Store) -> None:
    """Each stage has a mesh and names of its own, so the meshes of one stage do not name all writers."""
    meshes = [DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [4, 5, 6, 7])]
    stage = RANK // 4
    expected = {f"layers.{number}": make_whole((10, 3), number) for number in range(2)}
    name = f"layers.{stage}"
    state = {name: distribute(expected[name], meshes[stage], (Shard(0),)), "step": 7}
    try:
        store.put_state_dict(state, "pipeline", version=1)
        raise AssertionError("one stage was taken for all")
    except ValueError as error:
        assert "writers" in str(error), error
    for version, writers in ((1, RANKS), (2, dist.group.WORLD), (3, list(range(RANKS)))):
        store.put_state_dict(state, "pipeline", version=version, writers=writers)
        dist.barrier()
        got = store.get_state_dict("pipeline", version=version)
        assert sorted(got) == [*expected, "step"] and got["step"] == 7
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        dist.barrier()


def check_mapped_shards(store: tssd.Store, meshes: Meshes) -> None:
    """Fused and stacked parameters are sharded, and stored as the tensors that they consist of."""
    mapping = Mapping(
        {
            "{n}.qkv": fuse("{n}.q", "{n}.k", "{n}.v", sizes=(3, 2, 1)),
            "{n}.experts": stack(fuse("{n}.{e}.gate", "{n}.{e}.up"), over="e"),
        }
    )
    fused = make_whole((12, 5), 1)
    experts = torch.arange(5 * 6 * 3, dtype=torch.float32).reshape(5, 6, 3)
    expected = dict(zip(["0.q", "0.k", "0.v"], fused.split([6, 4, 2])))
    for number, expert in enumerate(experts):
        expected |= dict(zip([f"0.{number}.gate", f"0.{number}.up"], expert.chunk(2)))

    shardings: list[Sharding] = [("4", (Shard(0),)), ("4", (Shard(1),)), ("2", (Replicate(),))]
    shardings += [("2x4", (_StridedShard(0, split_factor=4), Shard(0))), ("2x4", (Replicate(), Shard(1)))]
    own_shardings = [(meshes[name], placements) for name, placements in shardings if is_member(meshes[name])]

    def sharded(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> dict[str, DTensor]:
        wholes = {"0.qkv": fused, "0.experts": experts}
        return {name: distribute(whole, mesh, placements) for name, whole in wholes.items()}

    for version, (name, placements) in enumerate(shardings, 1):
        mesh = meshes[name]
        if is_member(mesh):
            writers = mesh.mesh.flatten().tolist()
            state = sharded(mesh, placements)
            store.put_state_dict(state, "mapped", version=version, writers=writers, mapping=mapping)
        dist.barrier()
        store.wait_for_version("mapped", version, timeout=60).close()
        stored = store.get_state_dict("mapped")
        assert stored.keys() == expected.keys(), stored.keys()
        assert all(torch.equal(stored[key], tensor) for key, tensor in expected.items()), placements
        for own_mesh, own_placements in own_shardings:
            into = sharded(own_mesh, own_placements)
            locals_before = {key: tensor.to_local().clone() for key, tensor in into.items()}
            for tensor in into.values():
                tensor.to_local().zero_()
            with store.stage("mapped", into, mapping=mapping, version=version) as staged:
                staged.commit()
            for key, tensor in into.items():
                assert torch.equal(tensor.to_local(), locals_before[key]), (placements, own_placements, key)
        dist.barrier()


def check_publish_tensor_by_tensor(store: tssd.Store, meshes: Meshes) -> None:
    """Each rank publishes shards one by one, in small buckets. Readers iterate, or fill shards."""
    shardings: list[Sharding] = [
        ("4", (Shard(0),)),
        ("2x4", (Shard(0), Shard(1))),
        ("2x2", (Replicate(), Shard(1))),
        ("2x2", (_StridedShard(0, split_factor=2), Shard(0))),
        # Several boxes. Some ranks have replicas of them.
        ("2x4", (_StridedShard(0, split_factor=3), Replicate())),
    ]
    for version, (name, placements) in enumerate(shardings, 1):
        mesh = meshes[name]
        # A cast to a wider dtype is done in parts.
        dtype = torch.float32 if version == 1 else torch.float64
        if is_member(mesh):
            writers = mesh.mesh.flatten().tolist()
            with store.publish(
                "published", version=version, writers=writers, bucket_bytes=16, transfer_dtype=dtype
            ) as publisher:
                for fqn, tensor in make_sharded_state(mesh, placements, version).items():
                    publisher.put(fqn, tensor)
            assert publisher.report is not None and publisher.report.version == version
        dist.barrier()
        with store.open("published", version=version) as opened:
            received = dict(opened.items())
        for shape in SHAPES:
            assert torch.equal(received[str(shape)], make_whole(shape, version).to(dtype)), (name, shape)
        into = {str(shape): distribute(torch.zeros(shape), meshes["2x4"], (Shard(1), Shard(0))) for shape in SHAPES}
        store.get_state_dict("published", into, cast=True)
        for shape in SHAPES:
            assert torch.equal(into[str(shape)].full_tensor(), make_whole(shape, version)), (name, shape)
        dist.barrier()
    # One of four ranks fails between two tensors. The version does not become visible.
    mesh = meshes["4"]
    if is_member(mesh):
        state = make_sharded_state(mesh, (Shard(0),), 6)
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


def check_tables_on_some_ranks(store: tssd.Store) -> None:
    """Embedding tables: local tensors declare their own offsets. Some ranks have several, others none."""
    mesh = init_device_mesh("cpu", (RANKS,))
    # float16 represents all of these values exactly.
    table, moment = make_whole((12, 3), 1), torch.arange(12.0)
    rows_by_rank = {0: [(6, 9), (0, 2)], 3: [(2, 6)], 7: [(9, 12)]}

    def shard_rows(tensor: torch.Tensor, rows: list[tuple[int, int]]) -> DTensor:
        offsets = [(start,) + (0,) * (tensor.ndim - 1) for start, _ in rows]
        local = LocalShardsWrapper([tensor[start:end].clone() for start, end in rows], offsets)
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def make_state(rows: list[tuple[int, int]], scale: int, dtype: torch.dtype) -> dict[str, DTensor]:
        tensors = {"table": table, "moment": moment}
        return {name: shard_rows((tensor * scale).to(dtype), rows) for name, tensor in tensors.items()}

    def check_version(version: int, dtype: torch.dtype, other: torch.dtype) -> None:
        dist.barrier()
        got = store.get_state_dict("tables")
        assert torch.equal(got["table"], (table * version).to(dtype))
        assert torch.equal(got["moment"], (moment * version).to(dtype))
        rows = rows_by_rank.get((RANK + 1) % RANKS, [])
        for into_dtype in (dtype, other):
            into = store.get_state_dict("tables", make_state(rows, 0, into_dtype), cast=into_dtype != dtype)
            for name, tensor in make_state(rows, version, into_dtype).items():
                actual, expected = (each.to_local().local_shards() for each in (into[name], tensor))
                assert len(actual) == len(expected) and all(map(torch.equal, actual, expected)), name
        try:
            store.get_state_dict("tables", make_state(rows, 0, other))
            assert not rows, "what is of another dtype was filled"
        except tssd.TssdTypeError as error:
            assert rows and error.kind == "WrongType", error
        dist.barrier()

    rows = rows_by_rank.get(RANK, [])
    # A rank without rows cannot put alone either: with several ranks, the caller must name the writers.
    own_state = make_state(rows, 1, torch.float16)
    for name in own_state:
        try:
            if name == "table":
                encoded = tssd.TorchStoreStateDict.from_state_dict({name: own_state[name], "bias": 1})
                store.put("alone", encoded)
            else:
                with store.publish("alone") as publisher:
                    publisher.put("bias", 1)
                    publisher.put(name, own_state[name])
            raise AssertionError("it was put alone")
        except tssd.TssdValueError as error:
            assert "writers=" in str(error), error
    dist.barrier()
    assert not store.exists("alone")
    store.put_state_dict(make_state(rows, 1, torch.float16), "tables", writers=RANKS)
    check_version(1, torch.float16, torch.float32)
    # A cast to a wider dtype is done in parts.
    with store.publish("tables", writers=RANKS, bucket_bytes=16, transfer_dtype=torch.float64) as publisher:
        for name, tensor in make_state(rows, 2, torch.float32).items():
            publisher.put(name, tensor)
    check_version(2, torch.float64, torch.float16)


def check_leaves_on_all_ranks(store: tssd.Store) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    shard = distribute(torch.ones(RANKS), mesh, (Shard(0),))
    values = torch.arange(250_000.0)
    replicated = distribute(values, mesh, (Replicate(),))
    state = {"w": shard, "plain": values[:3], "replicated": replicated, "text": "x"}
    store.put_state_dict(state, "agree")
    dist.barrier()
    head = store.head("agree")
    assert head is not None and head.writers == list(range(RANKS))
    assert head.bytes < 2 * values.nbytes, "the replicas are stored once"
    got = store.get_state_dict("agree")
    assert list(got) == list(state) and got["text"] == "x"
    assert torch.equal(got["plain"], values[:3]) and torch.equal(got["replicated"], values)

    for name, value in (("tensor", torch.full((2,), float(RANK))), ("number", RANK)):
        state = {"w": shard, "a": {name: value}}
        try:
            report = store.put_state_dict(state, "differ", version=1)
            assert not report.visible, "it was proven"
        except tssd.TssdValueError as error:
            assert error.kind in ("rejected", "refused") and f"a.{name}" in str(error), error
        dist.barrier()
        assert not store.exists("differ")
    store.put_state_dict(state, "differ", version=1, options=tssd.PutOptions(on_divergence="lowest"))
    dist.barrier()
    assert store.get_state_dict("differ")["a"] == {"number": 0}
    dist.barrier()
    store.put_state_dict(state, "differ", version=2, options=tssd.PutOptions(on_divergence="keep"))
    dist.barrier()
    assert store.get_state_dict("differ", writer=RANK)["a"] == {"number": RANK}
    dist.barrier()


def check_partial_rejected(store: tssd.Store, mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Partial("sum")], run_check=False)
    try:
        store.put_state_dict({"a": {"w": partial}}, "partial")
        raise AssertionError("Partial was put")
    except tssd.TssdValueError as error:
        assert (error.kind, error.fqn) == ("PartialPlacement", "a.w"), error
    assert not store.exists("partial")


SIZES = [1, 1000, 70_000, 300_000]


def make_numbered_state(number: int) -> dict[str, Any]:
    return {str(size): torch.full((size,), number) for size in SIZES} | {"number": number}


def check_numbered_state(state: dict[str, Any]) -> int:
    number = int(state["number"])
    for size in SIZES:
        assert (state[str(size)] == number).all(), (number, size, state[str(size)].unique())
    return number


def check_competing_writers(store: tssd.Store) -> None:
    """Two ranks put competing versions of one key. All other ranks read the key meanwhile."""
    dist.barrier()
    if RANK < 2:
        visible = 0
        for number in range(50):
            try:
                visible += store.put_state_dict(make_numbered_state(2 * number + RANK), "torn").visible
            except tssd.TssdValueError as error:
                # A newer version of the other rank was visible first.
                assert "superseded" in str(error), error
        assert visible
        store.put(f"done {RANK}", True)
    else:
        read_versions(store, "torn", lambda _: all(store.exists(f"done {rank}") for rank in range(2)))
    dist.barrier()


def check_reads_during_sharded_puts(store: tssd.Store, mesh: DeviceMesh) -> None:
    """Four ranks put successive versions of a sharded dict. The others read with and without leases."""
    versions = 30
    if is_member(mesh):
        for number in range(versions):
            state = {
                name: distribute(value, mesh, (Shard(0),)) if isinstance(value, torch.Tensor) else value
                for name, value in make_numbered_state(number).items()
            }
            store.put_state_dict(state, "together", writers=[0, 1, 2, 3])
    else:
        read_loop = read_versions if RANK < 6 else read_versions_with_leases
        read_loop(store, "together", lambda number: number == versions - 1)
    dist.barrier()


def read_versions(store: tssd.Store, key: str, is_last: Callable[[int], bool]) -> None:
    """Reads views, copies and single tensors of the newest version until the last version is visible."""
    store.wait_for_version(key, 1, timeout=60)
    views: dict[str, Any] = store.get_state_dict(key)
    seen, number = 0, -1
    while not is_last(number):
        before = check_numbered_state(views)
        into = make_numbered_state(-1)
        store.get_state_dict(key, into)
        into["number"] = into["1"]
        check_numbered_state(into)
        with store.open(key) as version:
            opened = {name: version.get_tensor(name) for name in map(str, SIZES)}
            check_numbered_state(opened | {"number": opened["1"]})
        # Views of an earlier version are unchanged.
        assert check_numbered_state(views) == before
        views = store.get_state_dict(key)
        number = check_numbered_state(views)
        seen += 1
    assert seen


def read_versions_with_leases(store: tssd.Store, key: str, is_last: Callable[[int], bool]) -> None:
    """Reads each version several times under a lease, which retains it while newer versions are put."""
    version, number = 0, -1
    while not is_last(number):
        with store.wait_for_version(key, version + 1, timeout=60) as lease:
            number = check_numbered_state(store.get_state_dict(key, version=lease))
            into = make_numbered_state(-1)
            store.get_state_dict(key, into, version=lease)
            assert check_numbered_state(into | {"number": into["1"]}) == number
            assert int(lease) > version
            version = int(lease)


main()
