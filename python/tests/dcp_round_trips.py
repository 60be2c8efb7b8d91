"""One rank of test_dcp.py: python dcp_round_trips.py FOLDER RANKS RANK STORE. Exits with 0 if all checks hold.

What users of DCP save and load: models with optimizers, parts of states, states that ranks do not share.
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
from same import same
from sharding import distributed
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
    rows_that_do_not_divide(flat, grid)
    a_run_is_resumed(grid)
    nested_containers(flat)
    flat_planners(flat)
    parts_are_loaded(flat)
    what_is_strict(flat)
    ranks_with_states_of_their_own()
    one_rank_has_all(flat)
    tensors_of_the_old_api()
    objects_with_a_state(flat)
    fewer_ranks_load(flat)
    later_while_training_goes_on(grid)
    dist.barrier()
    dist.destroy_process_group()


def save(state: dict[str, Any], key: str, **options: Any) -> None:
    dcp.save(state, storage_writer=TssdWriter(STORE, key, durability="memory"), **options)


def load(state: dict[str, Any], key: str, **options: Any) -> None:
    dcp.load(state, storage_reader=TssdReader(STORE, key), **options)


def local(state: Any) -> Any:
    """The same with the tensors that are here."""
    if isinstance(state, DTensor):
        return state.to_local().detach().clone()
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(local, state))
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def numbers(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(1.0, rows * columns + 1).reshape(rows, columns)


def rows_that_do_not_divide(flat: DeviceMesh, grid: DeviceMesh) -> None:
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
        whole = numbers(rows, 3)
        for number, (mesh, placements) in enumerate(layouts):
            save({"w": distributed(whole, mesh, placements)}, "uneven")
            for other, others in (layouts[number - 1], layouts[number - 3]):
                into = {"w": distributed(torch.zeros_like(whole), other, others)}
                load(into, "uneven")
                assert same(local(into), local({"w": distributed(whole, other, others)})), (rows, placements)


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


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in named if "bias" not in name], "weight_decay": 0.1},
        {"params": [named[name] for name in named if "bias" in name], "lr": 0.03, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.rand(4, 6)).pow(2).sum().backward()
    optimizer.step()


def a_run_is_resumed(grid: DeviceMesh) -> None:
    """FSDP over TP, with strided shards; groups of parameters with options of their own."""
    model = Model(1, grid)
    optimizer = optimizer_of(model)
    for step in range(3):
        train(model, optimizer, step)
    parts, optimizers = get_state_dict(model, optimizer)
    placements = {type(p) for value in parts.values() if isinstance(value, DTensor) for p in value.placements}
    assert _StridedShard in placements
    save({"model": parts, "optimizer": optimizers}, "run")
    train(model, optimizer, 3)

    resumed = Model(2, grid)
    other = optimizer_of(resumed)
    parts, optimizers = get_state_dict(resumed, other)
    state: dict[str, Any] = {"model": parts, "optimizer": optimizers}
    load(state, "run")
    set_state_dict(resumed, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    groups = [(group["lr"], group["weight_decay"]) for group in other.param_groups]
    assert groups == [(0.01, 0.1), (0.03, 0.0)], groups
    train(resumed, other, 3)
    assert same(local(get_state_dict(resumed, other)[0]), local(get_state_dict(model, optimizer)[0]))
    assert same(local(get_state_dict(resumed, other)[1]), local(get_state_dict(model, optimizer)[1]))


def nested_containers(flat: DeviceMesh) -> None:
    def state(fill: float) -> dict[str, Any]:
        rows = distributed(numbers(10, 2) * fill, flat, (Shard(0),))
        columns = distributed(numbers(4, 4) * fill, flat, (Shard(1),))
        return {
            "list": [rows, {"deep": [torch.full((2,), fill), {"x": columns}]}],
            "values": {"int": int(fill), "tuple": (fill, "x"), "none": None, "list": [1, fill], "empty": []},
            "scalar": torch.tensor(fill),
            "mask": torch.tensor([True, False]) if fill > 0 else torch.tensor([False, True]),
        }

    save(state(2.0), "nested")
    into = state(0.0)
    load(into, "nested")
    assert same(local(into), local(state(2.0))), into


def flat_planners(flat: DeviceMesh) -> None:
    """Planners that leave containers alone: what is no tensor at the top is bytes."""

    def state(fill: float) -> dict[str, Any]:
        sharded = distributed(numbers(10, 2) * fill, flat, (Shard(0),))
        inner = {"a": torch.full((2,), fill), "b": fill}
        return {"sharded": sharded, "here": torch.full((3,), fill), "inner": inner}

    save(state(2.0), "flat", planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    into = state(0.0)
    # With flatten_sharded_tensors, torch would fill a copy of the containers.
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(into, "flat", planner=planner)
    assert same(local(into), local(state(2.0))), into
    with tssd.Store(STORE) as store:
        assert set(store.get_state_dict("flat")) == {"sharded", "here", "inner", ".metadata"}


def parts_are_loaded(flat: DeviceMesh) -> None:
    def state(fill: float) -> dict[str, Any]:
        return {
            "a": {"w": distributed(numbers(10, 2) * fill, flat, (Shard(0),)), "step": fill},
            "b": [torch.full((3,), fill), distributed(numbers(3, 5) * fill, flat, (Shard(1),))],
        }

    save(state(2.0), "parts")
    into = {"a": {"w": state(0.0)["a"]["w"]}}
    load(into, "parts")
    assert same(local(into), {"a": {"w": local(state(2.0))["a"]["w"]}})
    more = {**state(0.0), "new": torch.full((2,), 7.0), "newer": 7}
    load(more, "parts", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert same(local(more), {**local(state(2.0)), "new": torch.full((2,), 7.0), "newer": 7})


def refused(attempt: Callable[[], None], *said: str) -> None:
    """On every rank, so that none waits for another."""
    try:
        attempt()
        raise AssertionError(f"not refused: {said}")
    except dcp.CheckpointException as error:
        assert all(part in str(error) for part in said), error
    dist.barrier()


def what_is_strict(flat: DeviceMesh) -> None:
    def sharded(rows: int, dtype: torch.dtype = torch.float32) -> DTensor:
        return distributed(torch.full((rows, 2), 7).to(dtype), flat, (Shard(0),))

    save({"w": sharded(10), "i": sharded(10, torch.int32), "n": 1}, "strict")
    untouched = sharded(10)
    refused(lambda: load({"w": untouched, "missing": sharded(10)}, "strict"), "Missing key", "missing")
    refused(lambda: load({"w": sharded(12)}, "strict"), "Size mismatch", "w")
    refused(lambda: load({"i": sharded(10)}, "strict"), "`i`", "int32")
    refused(lambda: load({"w": untouched}, "nobody"), "`nobody`")
    # One rank alone asks for what is not there.
    asked = {"w": untouched} if RANK else {"w": untouched, "x": torch.ones(1)}
    refused(lambda: load(asked, "strict"), "Missing key")
    assert same(local(untouched), local(sharded(10)))


def ranks_with_states_of_their_own() -> None:
    """As the stages of a pipeline have them."""
    own = {"w": torch.full((RANK + 1, 2), float(RANK)), "rank": RANK}
    save({f"stage{RANK}": own, "common": torch.ones(3)}, "stages")
    other = (RANK + 1) % RANKS
    into = {f"stage{other}": {"w": torch.zeros(other + 1, 2), "rank": -1}, "common": torch.zeros(3)}
    load(into, "stages")
    assert same(into[f"stage{other}"], {"w": torch.full((other + 1, 2), float(other)), "rank": other})


def one_rank_has_all(flat: DeviceMesh) -> None:
    """A full state dict is on rank 0 alone; each loads its own shards of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=flat)
    wanted = local(model.state_dict())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(full) == (RANK == 0)
    save({"model": full}, "full")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    into = {"model": model.state_dict()}
    load(into, "full")
    assert same(local(into["model"]), wanted)


def tensors_of_the_old_api() -> None:
    def sharded(fill: float) -> Any:
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(RANKS)])
        return sharded_tensor.full(spec, (10, 3), fill)

    def found(tensor: Any) -> list[torch.Tensor]:
        return [shard.tensor for shard in tensor.local_shards()]

    save({"w": sharded(3.0)}, "sharded tensor")
    into = {"w": sharded(0.0)}
    load(into, "sharded tensor")
    assert same(found(into["w"]), found(sharded(3.0)))


class Counter:
    def __init__(self, mesh: DeviceMesh, fill: float) -> None:
        self.weight, self.count = distributed(numbers(6, 2) * fill, mesh, (Shard(0),)), int(fill)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.count = state["weight"], state["count"]


def objects_with_a_state(flat: DeviceMesh) -> None:
    save({"counter": Counter(flat, 3.0)}, "stateful")
    into = Counter(flat, 0.0)
    load({"counter": into}, "stateful")
    assert same(local(into.state_dict()), local(Counter(flat, 3.0).state_dict()))


def fewer_ranks_load(flat: DeviceMesh) -> None:
    save({"w": distributed(numbers(10, 3), flat, (Shard(0),)), "step": 3}, "fewer")
    group = dist.new_group([0, 1])
    two = DeviceMesh("cpu", [0, 1])
    if RANK < 2:
        into = {"w": distributed(torch.zeros(10, 3), two, (Shard(0),)), "step": 0}
        load(into, "fewer", process_group=group)
        assert same(local(into), local({"w": distributed(numbers(10, 3), two, (Shard(0),)), "step": 3}))
        save(into, "fewer", process_group=group)
    dist.barrier()
    into = {"w": distributed(torch.zeros(10, 3), flat, (Shard(1),)), "step": 0}
    load(into, "fewer")
    assert same(local(into), local({"w": distributed(numbers(10, 3), flat, (Shard(1),)), "step": 3}))


def later_while_training_goes_on(grid: DeviceMesh) -> None:
    model = Model(3, grid)
    optimizer = optimizer_of(model)
    for step in range(3):
        train(model, optimizer, step)
        parts, optimizers = get_state_dict(model, optimizer)
        wanted = local({"model": parts, "optimizer": optimizers})
        saving = dcp.async_save(
            {"model": parts, "optimizer": optimizers},
            storage_writer=TssdWriter(STORE, "later", durability="memory"),
        )
        train(model, optimizer, step + 10)
        saving.result()
        dist.barrier()
        parts, optimizers = get_state_dict(model, optimizer)
        into = {"model": parts, "optimizer": optimizers}
        assert not same(local(into), wanted)
        load(into, "later")
        assert same(local(into), wanted)


main()
