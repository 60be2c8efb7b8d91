"""One rank of test_dcp.py: python dcp_round_trips.py FOLDER RANKS RANK STORE.

Exits with 0 if all checks hold.
Covers what users of DCP save and load: models with optimizers, parts of a state dict, state dicts that differ by rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tssd
from equality import same
from sharding import distribute
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from tssd.dcp import TssdReader, TssdWriter

FOLDER, RANKS, RANK, STORE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    flat = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))
    check_uneven_rows(flat, grid)
    check_resume(grid)
    check_nested_containers(flat)
    check_flat_planners(flat)
    check_partial_load(flat)
    check_strict_load(flat)
    check_rank_specific_state()
    check_full_state_on_one_rank(flat)
    check_sharded_tensor()
    check_stateful_object(flat)
    check_load_on_fewer_ranks(flat)
    check_async_save_during_training(grid)
    dist.barrier()
    dist.destroy_process_group()


def save(state: dict[str, Any], key: str, **options: Any) -> None:
    dcp.save(state, storage_writer=TssdWriter(STORE, key, durability="memory"), **options)


def load(state: dict[str, Any], key: str, **options: Any) -> None:
    dcp.load(state, storage_reader=TssdReader(STORE, key), **options)


def to_local(state: Any) -> Any:
    """Returns the state with each tensor replaced by a copy of its local part."""
    if isinstance(state, DTensor):
        return state.to_local().detach().clone()
    if isinstance(state, dict):
        return {key: to_local(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(to_local, state))
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def make_matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(1.0, rows * columns + 1).reshape(rows, columns)


def check_uneven_rows(flat: DeviceMesh, grid: DeviceMesh) -> None:
    layouts: list[tuple[DeviceMesh, tuple[Placement, ...]]] = [
        (flat, (Shard(0),)),
        (flat, (Shard(1),)),
        (flat, (Replicate(),)),
        (grid, (Shard(0), Shard(0))),
        (grid, (Shard(1), Shard(0))),
        (grid, (_StridedShard(0, split_factor=RANKS // 2), Shard(0))),
        (grid, (Replicate(), Shard(0))),
    ]
    for rows in (10, 3):
        whole = make_matrix(rows, 3)
        for number, (mesh, placements) in enumerate(layouts):
            save({"w": distribute(whole, mesh, placements)}, "uneven")
            for load_mesh, load_placements in (layouts[number - 1], layouts[number - 3]):
                into = {"w": distribute(torch.zeros_like(whole), load_mesh, load_placements)}
                load(into, "uneven")
                assert same(
                    to_local(into), to_local({"w": distribute(whole, load_mesh, load_placements)})
                ), (rows, placements)


class Model(nn.Module):
    def __init__(self, seed: int, grid: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 5), nn.LayerNorm(5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        parallelize_module(self, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(self, mesh=grid["dp"])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        result: torch.Tensor = self.norm(self.down(self.up(rows).relu()))
        return result


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[name] for name in parameters if "bias" not in name], "weight_decay": 0.1},
        {"params": [parameters[name] for name in parameters if "bias" in name], "lr": 0.03, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.rand(4, 6)).pow(2).sum().backward()
    optimizer.step()


def check_resume(grid: DeviceMesh) -> None:
    """FSDP over TP has strided shards. Each parameter group has options of its own."""
    model = Model(1, grid)
    optimizer = make_optimizer(model)
    for step in range(3):
        train(model, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    placements = {type(p) for value in model_state.values() if isinstance(value, DTensor) for p in value.placements}
    assert _StridedShard in placements
    save({"model": model_state, "optimizer": optimizer_state}, "run")
    train(model, optimizer, 3)

    resumed = Model(2, grid)
    resumed_optimizer = make_optimizer(resumed)
    model_state, optimizer_state = get_state_dict(resumed, resumed_optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    load(state, "run")
    set_state_dict(resumed, resumed_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    groups = [(group["lr"], group["weight_decay"]) for group in resumed_optimizer.param_groups]
    assert groups == [(0.01, 0.1), (0.03, 0.0)], groups
    train(resumed, resumed_optimizer, 3)
    assert same(to_local(get_state_dict(resumed, resumed_optimizer)[0]), to_local(get_state_dict(model, optimizer)[0]))
    assert same(to_local(get_state_dict(resumed, resumed_optimizer)[1]), to_local(get_state_dict(model, optimizer)[1]))


def check_nested_containers(flat: DeviceMesh) -> None:
    def state(fill: float) -> dict[str, Any]:
        rows = distribute(make_matrix(10, 2) * fill, flat, (Shard(0),))
        columns = distribute(make_matrix(4, 4) * fill, flat, (Shard(1),))
        return {
            "list": [rows, {"deep": [torch.full((2,), fill), {"x": columns}]}],
            "values": {"int": int(fill), "tuple": (fill, "x"), "none": None, "list": [1, fill], "empty": []},
            "scalar": torch.tensor(fill),
            "mask": torch.tensor([True, False]) if fill > 0 else torch.tensor([False, True]),
        }

    save(state(2.0), "nested")
    into = state(0.0)
    load(into, "nested")
    assert same(to_local(into), to_local(state(2.0))), into


def check_flat_planners(flat: DeviceMesh) -> None:
    """Planners that do not flatten containers save a top-level value that is not a tensor as bytes."""

    def state(fill: float) -> dict[str, Any]:
        sharded = distribute(make_matrix(10, 2) * fill, flat, (Shard(0),))
        inner = {"a": torch.full((2,), fill), "b": fill}
        return {"sharded": sharded, "here": torch.full((3,), fill), "inner": inner}

    save(state(2.0), "flat", planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    into = state(0.0)
    # With `flatten_sharded_tensors`, torch fills a copy of the containers.
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(into, "flat", planner=planner)
    assert same(to_local(into), to_local(state(2.0))), into
    with tssd.Store(STORE) as store:
        assert set(store.get_state_dict("flat")) == {"sharded", "here", "inner", ".metadata"}


def check_partial_load(flat: DeviceMesh) -> None:
    def state(fill: float) -> dict[str, Any]:
        return {
            "a": {"w": distribute(make_matrix(10, 2) * fill, flat, (Shard(0),)), "step": fill},
            "b": [torch.full((3,), fill), distribute(make_matrix(3, 5) * fill, flat, (Shard(1),))],
        }

    save(state(2.0), "parts")
    into = {"a": {"w": state(0.0)["a"]["w"]}}
    load(into, "parts")
    assert same(to_local(into), {"a": {"w": to_local(state(2.0))["a"]["w"]}})
    extended = {**state(0.0), "new": torch.full((2,), 7.0), "newer": 7}
    load(extended, "parts", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert same(to_local(extended), {**to_local(state(2.0)), "new": torch.full((2,), 7.0), "newer": 7})


def assert_load_fails(attempt: Callable[[], None], *messages: str) -> None:
    """Asserts that a call fails with these texts. All ranks must call this: it ends with a barrier."""
    try:
        attempt()
        raise AssertionError(f"not refused: {messages}")
    except dcp.CheckpointException as error:
        assert all(part in str(error) for part in messages), error
    dist.barrier()


def check_strict_load(flat: DeviceMesh) -> None:
    def sharded(rows: int, dtype: torch.dtype = torch.float32) -> DTensor:
        return distribute(torch.full((rows, 2), 7).to(dtype), flat, (Shard(0),))

    save({"w": sharded(10), "i": sharded(10, torch.int32), "n": 1}, "strict")
    unchanged = sharded(10)
    assert_load_fails(lambda: load({"w": unchanged, "missing": sharded(10)}, "strict"), "Missing key", "missing")
    assert_load_fails(lambda: load({"w": sharded(12)}, "strict"), "Size mismatch", "w")
    assert_load_fails(lambda: load({"i": sharded(10)}, "strict"), "`i`", "int32")
    assert_load_fails(lambda: load({"w": unchanged}, "nobody"), "`nobody`")
    # Only rank 0 requests a missing tensor.
    request = {"w": unchanged} if RANK else {"w": unchanged, "x": torch.ones(1)}
    assert_load_fails(lambda: load(request, "strict"), "Missing key")
    assert same(to_local(unchanged), to_local(sharded(10)))


def check_rank_specific_state() -> None:
    """Each rank saves its own names, like a pipeline stage."""
    state = {"w": torch.full((RANK + 1, 2), float(RANK)), "rank": RANK}
    save({f"stage{RANK}": state, "common": torch.ones(3)}, "stages")
    other = (RANK + 1) % RANKS
    into = {f"stage{other}": {"w": torch.zeros(other + 1, 2), "rank": -1}, "common": torch.zeros(3)}
    load(into, "stages")
    assert same(into[f"stage{other}"], {"w": torch.full((other + 1, 2), float(other)), "rank": other})


def check_full_state_on_one_rank(flat: DeviceMesh) -> None:
    """Only rank 0 has the full state dict. Each rank loads its own shards of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=flat)
    expected = to_local(model.state_dict())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(full) == (RANK == 0)
    save({"model": full}, "full")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    into = {"model": model.state_dict()}
    load(into, "full")
    assert same(to_local(into["model"]), expected)


def check_sharded_tensor() -> None:
    def sharded(fill: float) -> Any:
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(RANKS)])
        return sharded_tensor.full(spec, (10, 3), fill)

    def local_tensors(tensor: Any) -> list[torch.Tensor]:
        return [shard.tensor for shard in tensor.local_shards()]

    save({"w": sharded(3.0)}, "sharded tensor")
    into = {"w": sharded(0.0)}
    load(into, "sharded tensor")
    assert same(local_tensors(into["w"]), local_tensors(sharded(3.0)))


class Counter:
    def __init__(self, mesh: DeviceMesh, fill: float) -> None:
        self.weight, self.count = distribute(make_matrix(6, 2) * fill, mesh, (Shard(0),)), int(fill)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.count = state["weight"], state["count"]


def check_stateful_object(flat: DeviceMesh) -> None:
    save({"counter": Counter(flat, 3.0)}, "stateful")
    into = Counter(flat, 0.0)
    load({"counter": into}, "stateful")
    assert same(to_local(into.state_dict()), to_local(Counter(flat, 3.0).state_dict()))


def check_load_on_fewer_ranks(flat: DeviceMesh) -> None:
    save({"w": distribute(make_matrix(10, 3), flat, (Shard(0),)), "step": 3}, "fewer")
    group = dist.new_group([0, 1])
    small_mesh = DeviceMesh("cpu", [0, 1])
    if RANK < 2:
        into = {"w": distribute(torch.zeros(10, 3), small_mesh, (Shard(0),)), "step": 0}
        load(into, "fewer", process_group=group)
        assert same(to_local(into), to_local({"w": distribute(make_matrix(10, 3), small_mesh, (Shard(0),)), "step": 3}))
        save(into, "fewer", process_group=group)
    dist.barrier()
    into = {"w": distribute(torch.zeros(10, 3), flat, (Shard(1),)), "step": 0}
    load(into, "fewer")
    assert same(to_local(into), to_local({"w": distribute(make_matrix(10, 3), flat, (Shard(1),)), "step": 3}))


def check_async_save_during_training(grid: DeviceMesh) -> None:
    model = Model(3, grid)
    optimizer = make_optimizer(model)
    for step in range(3):
        train(model, optimizer, step)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        expected = to_local({"model": model_state, "optimizer": optimizer_state})
        saving = dcp.async_save(
            {"model": model_state, "optimizer": optimizer_state},
            storage_writer=TssdWriter(STORE, "later", durability="memory"),
        )
        train(model, optimizer, step + 10)
        saving.result()
        dist.barrier()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        into = {"model": model_state, "optimizer": optimizer_state}
        assert not same(to_local(into), expected)
        load(into, "later")
        assert same(to_local(into), expected)


main()
