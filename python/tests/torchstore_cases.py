"""What torchstore does, and what stands in for it: python torchstore_cases.py MODULE OUT.json.

Runs every case on one of them, in one process and in several of Monarch's, and writes what came of each.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import os
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import tssd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

Case = Callable[[Any, str], Awaitable[Any]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def imported(name: str) -> ModuleType:
    """torchstore, or what stands in for it.

    The torchstore that is released is older than any Monarch that does without a GPU: these refuse an actor that
    has asynchronous methods and others.
    """
    if name == "torchstore":
        import monarch.actor

        endpoint = monarch.actor.endpoint

        def asynchronous(method: Any = None, **options: Any) -> Any:
            if method is None:
                return lambda method: asynchronous(method, **options)
            if inspect.iscoroutinefunction(method):
                return endpoint(method, **options)

            @functools.wraps(method)
            async def call(*args: Any, **kwargs: Any) -> Any:
                return method(*args, **kwargs)

            return endpoint(call, **options)

        monarch.actor.endpoint = asynchronous
    return importlib.import_module(name)


def told(value: Any) -> Any:
    """A value as JSON can say it."""
    if isinstance(value, DTensor):
        return {"DTensor": told(value.to_local())}
    if isinstance(value, torch.Tensor):
        return {str(value.dtype).removeprefix("torch."): value.tolist(), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[told(key), told(each)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [told(each) for each in value]}
    return value


async def failed(call: Awaitable[Any]) -> str:
    """The class of the error that a call raises, as Python itself names it."""
    try:
        await call
    except Exception as error:
        return next(each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins")
    return "nothing"


@case
async def dtypes(ts: Any, key: str) -> Any:
    names = ["float32", "bfloat16", "float16", "float64", "int8", "int64", "bool", "uint8", "complex64"]
    tensors = {name: torch.arange(6).to(getattr(torch, name)).reshape(2, 3) for name in names}
    for name, tensor in tensors.items():
        await ts.put(f"{key}.{name}", tensor)
    got = {name: await ts.get(f"{key}.{name}") for name in names}
    return all(torch.equal(got[name], tensors[name]) and got[name].dtype == tensors[name].dtype for name in names)


@case
async def a_scalar(ts: Any, key: str) -> Any:
    await ts.put(key, torch.tensor(3.5))
    return await ts.get(key)


@case
async def strides(ts: Any, key: str) -> Any:
    whole = torch.arange(24.0).reshape(4, 6)
    await ts.put(f"{key}.t", whole.T)
    await ts.put(f"{key}.column", whole[:, 1:3])
    return await ts.get(f"{key}.t"), await ts.get(f"{key}.column")


@case
async def a_parameter_comes_back_as_a_tensor(ts: Any, key: str) -> Any:
    await ts.put(key, nn.Parameter(torch.ones(2)))
    got = await ts.get(key)
    return type(got).__name__, got.requires_grad


@case
async def objects(ts: Any, key: str) -> Any:
    values = [{"rank": 0, "data": [1, 2, 3]}, "text", 7, 2.5, [1, "a", (2, None)], {"w": torch.ones(2)}, {}, []]
    for place, value in enumerate(values):
        await ts.put(f"{key}.{place}", value)
    return [await ts.get(f"{key}.{place}") for place in range(len(values))]


@case
async def an_object_of_a_class(ts: Any, key: str) -> Any:
    return await failed(ts.put(key, object()))


@case
async def it_may_change_after_the_put(ts: Any, key: str) -> Any:
    tensor = torch.ones(3)
    await ts.put(key, tensor)
    tensor.zero_()
    got = await ts.get(key)
    got.add_(5)
    return got, await ts.get(key)


@case
async def keys_by_segments(ts: Any, key: str) -> Any:
    for name in ("", ".x", "v0.x", "v0.y", "v0.x.z", "v0/a", "v01", "v1.x"):
        await ts.put(f"{key}.{name}", torch.ones(1))
    prefixes = ["", ".v0", ".v0.x", ".v0.x.z", ".", ".v1", ".v", ".nothing"]
    everything = [each for each in await ts.keys() if each.startswith(key)]
    return sorted(everything), [sorted(await ts.keys(key + prefix)) for prefix in prefixes]


@case
async def whether_it_exists(ts: Any, key: str) -> Any:
    before = await ts.exists(key)
    await ts.put(key, torch.ones(1))
    after = await ts.exists(key)
    await ts.delete(key)
    return before, after, await ts.exists(key), await failed(ts.get(key))


@case
async def what_is_missing(ts: Any, key: str) -> Any:
    return await failed(ts.get(key)), await failed(ts.get_state_dict(key)), await ts.keys(key)


@case
async def deleting_what_is_missing(ts: Any, key: str) -> Any:
    return await failed(ts.delete(key))


@case
async def in_place(ts: Any, key: str) -> Any:
    await ts.put(key, torch.arange(6.0).reshape(2, 3))
    into = torch.zeros(2, 3)
    got = await ts.get(key, into)
    strided = torch.zeros(3, 2).T
    await ts.get(key, inplace_tensor=strided)
    return got is into, into, strided


@case
async def in_place_of_another_dtype(ts: Any, key: str) -> Any:
    await ts.put(key, torch.arange(4.0))
    return await ts.get(key, torch.zeros(4, dtype=torch.bfloat16))


@case
async def in_place_of_another_shape(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(1))
    return await failed(ts.get(key, torch.zeros(4)))


@case
async def in_place_of_ints(ts: Any, key: str) -> Any:
    await ts.put(key, torch.tensor([2.7]))
    return await failed(ts.get(key, torch.zeros(1, dtype=torch.int64)))


@case
async def in_place_of_an_object(ts: Any, key: str) -> Any:
    await ts.put(key, "text")
    return await failed(ts.get(key, torch.zeros(1)))


@case
async def a_slice(ts: Any, key: str) -> Any:
    await ts.put(key, torch.arange(100.0).reshape(10, 10))
    part = slice_of(ts, (1, 2), (10, 10), (3, 4))
    into = torch.zeros(3, 4)
    got = await ts.get(key, into, part)
    return await ts.get(key, tensor_slice_spec=part), got is into, into


@case
async def a_slice_of_another_shape_than_the_tensor(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(10, 10))
    return await failed(ts.get(key, torch.zeros(2, 2), slice_of(ts, (0, 0), (10, 10), (3, 4))))


@case
async def a_slice_of_another_global_shape(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(10, 10))
    return await failed(ts.get(key, tensor_slice_spec=slice_of(ts, (8, 8), (99, 99), (5, 5))))


@case
async def what_is_no_tensor_in_place(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(1))
    return await failed(ts.get(key, [0.0]))


@case
async def another_shape_under_the_same_key(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(5))
    await ts.put(key, torch.zeros(2, dtype=torch.int32))
    got = [await ts.get(key)]
    await ts.put(key, "text")
    return [*got, await ts.get(key)]


@case
async def batches(ts: Any, key: str) -> Any:
    entries = {f"{key}.a": torch.arange(3.0), f"{key}.b": "text", f"{key}.c": torch.ones(2, 2)}
    await ts.put_batch(entries)
    into = torch.zeros(3)
    got = await ts.get_batch({f"{key}.a": into, f"{key}.b": None})
    return await ts.get_batch(list(entries)), got, got[f"{key}.a"] is into


@case
async def batches_that_are_none(ts: Any, key: str) -> Any:
    await ts.put(f"{key}.a", torch.ones(1))
    into = torch.zeros(1)
    return [
        await failed(ts.put_batch({})),
        await failed(ts.get_batch([])),
        await failed(ts.get_batch({})),
        await failed(ts.get_batch([f"{key}.a", f"{key}.a"])),
        await failed(ts.get_batch((f"{key}.a",))),
        await failed(ts.get_batch([f"{key}.a", f"{key}.nothing"])),
        await failed(ts.get_batch({f"{key}.a": into, f"{key}.nothing": None})),
        await failed(ts.delete_batch(f"{key}.a")),
        await failed(ts.delete_batch([])),
        into,
    ]


@case
async def deleting_batches(ts: Any, key: str) -> Any:
    await ts.put_batch({f"{key}.{name}": torch.ones(1) for name in "abc"})
    await ts.delete_batch([f"{key}.a", f"{key}.nothing", f"{key}.b", f"{key}.a"])
    await ts.delete_batch([f"{key}.a"])
    return await ts.keys(key)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@case
async def a_state_dict(ts: Any, key: str) -> Any:
    model, optimizer = trained()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 3, "pair": (1, 2)}
    await ts.put_state_dict(state, key)
    got = await ts.get_state_dict(key)
    # The peer makes all keys strings.
    got["optimizer"]["state"] = {int(number): each for number, each in got["optimizer"]["state"].items()}
    return told(got) == told(state)


@case
async def a_state_dict_to_a_file_and_back(ts: Any, key: str) -> Any:
    model, optimizer = trained()
    await ts.put_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, key)
    with tempfile.TemporaryDirectory() as folder:
        tssd.save_file(await ts.get_state_dict(key), f"{folder}/moved.tssd")
        await ts.put_state_dict(tssd.load_file(f"{folder}/moved.tssd"), f"{key}.back")
    return told(await ts.get_state_dict(key)) == told(await ts.get_state_dict(f"{key}.back"))


@case
async def a_state_dict_in_place(ts: Any, key: str) -> Any:
    model, optimizer = trained()
    await ts.put_state_dict({"model": model.state_dict(), "step": 3}, key)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = {"model": other.state_dict(), "step": 0}
    got = await ts.get_state_dict(key, state)
    same = all(torch.equal(one, two) for one, two in zip(model.state_dict().values(), other.state_dict().values()))
    is_in_place = all(got["model"][name] is tensor for name, tensor in state["model"].items())
    return same, is_in_place, got["step"], list(got)


@case
async def entries_of_a_state_dict(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": {"b": torch.ones(2), "c": [1, 2]}, "d": (3, torch.ones(1)), "e": "text"}, key)
    names = sorted(each for each in await ts.keys() if each.startswith(key))
    values = [await ts.get(f"{key}/{name}") for name in ("a.b", "a.c", "d", "e", "MAPPING")]
    exist = [await ts.exists(key + name) for name in ("", "/a", "/a.b", "/MAPPING")]
    into = torch.zeros(2)
    return names, values, exist, await ts.get(f"{key}/a.b", into), await ts.keys(key), sorted(await ts.keys(f"{key}/a"))


@case
async def deleting_entries(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": torch.zeros(1)}, key)
    await ts.delete(f"{key}/a")
    left = [each for each in await ts.keys() if each.startswith(key)]
    gone = await failed(ts.get(f"{key}/a")), await ts.exists(f"{key}/a"), await ts.get(f"{key}/b")
    for name in left:
        await ts.delete(name)
    return sorted(left), gone, [each for each in await ts.keys() if each.startswith(key)], await failed(ts.get_state_dict(key))


@case
async def deleting_the_mapping(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": torch.zeros(1)}, key)
    await ts.delete(f"{key}/MAPPING")
    left = sorted(each for each in await ts.keys() if each.startswith(key))
    got = await ts.get(f"{key}/a"), await ts.exists(f"{key}/MAPPING"), await failed(ts.get_state_dict(key))
    for name in left:
        await ts.delete(name)
    return left, got, [each for each in await ts.keys() if each.startswith(key)]


@case
async def deleting_entries_and_putting_them(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": torch.zeros(1)}, key)
    await ts.delete(f"{key}/a")
    broken = await failed(ts.get_state_dict(key))
    await ts.put_state_dict({"a": torch.ones(1), "c": torch.zeros(1)}, key)
    return broken, await ts.get_state_dict(key), await ts.exists(f"{key}/a")


@case
async def deleting_at_the_same_time(ts: Any, key: str) -> Any:
    await ts.put_state_dict({name: torch.ones(1) for name in "abcdef"}, key)
    await asyncio.gather(*[ts.delete(f"{key}/{name}") for name in "abcd"])
    return sorted(each for each in await ts.keys() if each.startswith(key))


@case
async def entries_by_themselves(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": torch.zeros(1)}, key)
    await ts.put(f"{key}/a", torch.full((1,), 7.0))
    one = await ts.get(f"{key}/a")
    await ts.put_state_dict({"a": torch.full((1,), 2.0), "b": torch.zeros(1)}, key)
    two = await ts.get(f"{key}/a")
    await ts.delete(f"{key}/a")
    await ts.put_state_dict({"a": torch.full((1,), 3.0), "b": torch.zeros(1)}, key)
    return one, two, await ts.get(f"{key}/a")


@case
async def strict(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, key)
    more = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    fewer = {"a": torch.zeros(2)}
    errors = [await failed(ts.get_state_dict(key, dict(each))) for each in (more, fewer)]
    untouched = told(more["a"])
    loose = [await ts.get_state_dict(key, dict(each), strict=False) for each in (more, fewer)]
    return errors, untouched, [sorted(each) for each in loose], more["c"], fewer["a"], loose[1]["b"]


@case
async def a_state_dict_of_another_shape(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(4)}, key)
    return await failed(ts.get_state_dict(key, {"a": torch.zeros(2, 4)}))


@case
async def a_tensor_where_an_object_is(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": "text"}, key)
    return await ts.get_state_dict(key, {"a": None, "b": None})


@case
async def what_a_state_dict_keeps(ts: Any, key: str) -> Any:
    tied = torch.ones(2)
    state = OrderedDict([("one", tied), ("two", tied), ("empty", {}), ("ints", {0: 1})])
    await ts.put_state_dict(state, key)
    got = await ts.get_state_dict(key)
    return type(got).__name__, got["one"].data_ptr() == got["two"].data_ptr(), "empty" in got, list(got["ints"])


@case
async def an_empty_state_dict(ts: Any, key: str) -> Any:
    return await failed(ts.put_state_dict({}, key))


@case
async def a_transfer_dtype(ts: Any, key: str) -> Any:
    state = {"w": torch.tensor([1.001]), "n": torch.tensor([123457])}
    await ts.put_state_dict(state, key, transfer_dtype=torch.bfloat16)
    into = {"w": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int64)}
    await ts.get_state_dict(key, into)
    return await ts.get_state_dict(key), into, state["w"]


@case
async def initializing_again(ts: Any, key: str) -> Any:
    return await failed(ts.initialize()), await failed(ts.initialize(num_storage_volumes=2, store_name=key))


@case
async def another_store(ts: Any, key: str) -> Any:
    await ts.initialize(num_storage_volumes=1, strategy=ts.LocalRankStrategy(), store_name=key)
    await ts.put("mine", torch.ones(1), store_name=key)
    before = await ts.exists("mine"), await ts.exists("mine", store_name=key), await ts.keys(store_name=key)
    cached = await ts.client(key) is await ts.client(key)
    await ts.shutdown(key)
    return before, cached, await ts.exists("mine")


@case
async def the_client(ts: Any, key: str) -> Any:
    client = await ts.client()
    await client.put(key, torch.ones(1))
    await client.put(f"{key}.object", "text")
    got = [await client.get(key), await client.get(f"{key}.object"), await client.exists(key)]
    await client.delete(key)
    ts.reset_client()
    return got, await ts.exists(key), await client.keys(key)


async def in_actors(ts: Any, key: str, count: int, role: str, **options: Any) -> list[Any]:
    """What a role has returned in so many processes, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        results = await actors(count).run.call(ts.__name__, role, key, count, f"{folder}/meet", options)
        return [value for _, value in sorted(results, key=lambda each: each[0].rank)]


@functools.cache
def actors(count: int) -> Any:
    from monarch.actor import Actor, current_rank, endpoint, this_host

    class Process(Actor):
        @endpoint
        async def run(self, module: str, role: str, key: str, count: int, meet: str, options: Any) -> Any:
            rank = current_rank().rank
            os.environ["LOCAL_RANK"] = str(rank)
            dist.init_process_group("gloo", init_method=f"file://{meet}", world_size=count, rank=rank)
            try:
                return await ROLES[role](imported(module), key, rank, **options)
            finally:
                dist.destroy_process_group()

    return this_host().spawn_procs(per_host={"gpus": count}).spawn(f"processes{count}", Process)


PLACEMENTS = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}


def sharded(whole: torch.Tensor, mesh: tuple[int, ...], placements: str) -> DTensor:
    device_mesh = init_device_mesh("cpu", mesh)
    return distribute_tensor(whole, device_mesh, [PLACEMENTS[each] for each in placements.split()])


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


async def puts(
    ts: Any, key: str, rank: int, mesh: Any = (2,), placements: str = "S0", shape: Any = (8, 8), skip: int = -1
) -> Any:
    tensor = sharded(counted(*shape), mesh, placements)
    if rank != skip:
        await ts.put(key, tensor)


async def gets(ts: Any, key: str, rank: int, mesh: Any, placements: str, shape: Any) -> Any:
    into = sharded(torch.zeros(shape), mesh, placements)
    right = sharded(counted(*shape), mesh, placements)
    got = await ts.get(key, into)
    # Nothing here waits for the others, one of which may have failed.
    return got is into, torch.equal(into.to_local(), right.to_local()), torch.equal(await ts.get(key), counted(*shape))


async def refuses(ts: Any, key: str, rank: int) -> Any:
    into = sharded(torch.zeros(8, 8), (1,), "S0")
    return await failed(ts.get(key, into, slice_of(ts, (0, 0), (8, 8), (1, 1))))


async def puts_its_expert(ts: Any, key: str, rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    expert = DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Replicate()], run_check=False)
    await ts.put(f"{key}.{rank}", expert)


async def puts_a_state_dict(ts: Any, key: str, rank: int, number: int) -> Any:
    whole = torch.full((4, 4), float(number))
    await ts.put_state_dict({"w": sharded(whole, (2,), "S0"), "n": number, "plain": whole}, key)


ROLES: dict[str, Callable[..., Awaitable[Any]]] = {
    role.__name__: role for role in (puts, gets, refuses, puts_its_expert, puts_a_state_dict)
}


async def resharded(ts: Any, key: str, shape: tuple[int, int]) -> Any:
    results = []
    for number, (one, other) in enumerate(
        [(((2,), "S0"), ((4,), "S1")), (((2, 2), "S1 S0"), ((2,), "S0")), (((2, 2), "R S0"), ((2,), "R"))]
    ):
        (put_mesh, puts), (get_mesh, gets) = one, other
        world = torch.Size(put_mesh).numel(), torch.Size(get_mesh).numel()
        name = f"{key}{number}"
        await in_actors(ts, name, world[0], "puts", mesh=put_mesh, placements=puts, shape=shape)
        got = await in_actors(ts, name, world[1], "gets", mesh=get_mesh, placements=gets, shape=shape)
        part = await ts.get(name, tensor_slice_spec=slice_of(ts, (2, 1), shape, (4, 4)))
        results.append([got, torch.equal(part, counted(*shape)[2:6, 1:5])])
    return results


@case
async def another_sharding(ts: Any, key: str) -> Any:
    return await resharded(ts, key, (8, 8))


@case
async def an_uneven_sharding(ts: Any, key: str) -> Any:
    return await resharded(ts, key, (7, 6))


@case
async def a_slice_that_nobody_has(ts: Any, key: str) -> Any:
    await in_actors(ts, key, 2, "puts")
    return await failed(ts.get(key, tensor_slice_spec=slice_of(ts, (0, 0), (9, 9), (2, 2))))


@case
async def a_part_is_missing(ts: Any, key: str) -> Any:
    await in_actors(ts, key, 2, "puts", skip=1)
    return await ts.exists(key), await failed(ts.get(key)), await failed(ts.delete(key)) != "nothing"


@case
async def deleting_a_part(ts: Any, key: str) -> Any:
    await in_actors(ts, key, 2, "puts", skip=1)
    await ts.delete_batch([key])
    await in_actors(ts, key, 2, "puts")
    return torch.equal(await ts.get(key), counted(8, 8))


@case
async def a_dtensor_with_a_slice(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(8, 8))
    return await in_actors(ts, key, 1, "refuses")


@case
async def experts_that_are_whole(ts: Any, key: str) -> Any:
    await in_actors(ts, key, 2, "puts_its_expert")
    return [await ts.get(f"{key}.{rank}") for rank in range(2)]


@case
async def ranks_put_a_state_dict(ts: Any, key: str) -> Any:
    got = []
    for number in (1, 2):
        await in_actors(ts, key, 2, "puts_a_state_dict", number=number)
        got.append(await ts.get_state_dict(key))
    return got


def slice_of(ts: Any, offsets: Any, global_shape: Any, local_shape: Any) -> Any:
    module = ts if ts.__name__ != "torchstore" else importlib.import_module("torchstore.transport")
    return module.TensorSlice(
        offsets=offsets, coordinates=(), global_shape=global_shape, local_shape=local_shape, mesh_shape=()
    )


async def main(name: str, out: Path, wanted: list[str]) -> None:
    ts = imported(name)
    results: dict[str, Any] = {}
    store = {} if name == "torchstore" else {"store_name": "torchstore"}
    await ts.initialize(num_storage_volumes=4, strategy=ts.LocalRankStrategy(), **store)
    os.environ["LOCAL_RANK"] = "0"
    try:
        for each in wanted or CASES:
            try:
                results[each] = told(await asyncio.wait_for(CASES[each](ts, each), 120))
            except Exception as error:
                results[each] = {"raised": f"{type(error).__name__}: {error}"[:2000]}
            out.write_text(json.dumps(results))
    finally:
        await ts.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
