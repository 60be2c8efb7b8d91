"""Cases for torchstore and `tssd.torchstore`: python torchstore_cases.py MODULE OUT.json.

Runs every case on one of the two, in one process and in several Monarch processes. Writes the result of each case.
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


def import_torchstore(name: str) -> ModuleType:
    """Imports torchstore or `tssd.torchstore`.

    The released torchstore has actors with both asynchronous and synchronous methods. The Monarch versions that run
    without a GPU are newer and reject such actors, so all methods become asynchronous.
    """
    if name == "torchstore":
        import monarch.actor

        endpoint = monarch.actor.endpoint

        def asynchronous_endpoint(method: Any = None, **options: Any) -> Any:
            if method is None:
                return lambda method: asynchronous_endpoint(method, **options)
            if inspect.iscoroutinefunction(method):
                return endpoint(method, **options)

            @functools.wraps(method)
            async def call(*args: Any, **kwargs: Any) -> Any:
                return method(*args, **kwargs)

            return endpoint(call, **options)

        monarch.actor.endpoint = asynchronous_endpoint
    return importlib.import_module(name)


def to_json(value: Any) -> Any:
    """Returns a value in a form that JSON can represent."""
    if isinstance(value, DTensor):
        return {"DTensor": to_json(value.to_local())}
    if isinstance(value, torch.Tensor):
        return {str(value.dtype).removeprefix("torch."): value.tolist(), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [to_json(each) for each in value]}
    return value


async def error_name(call: Awaitable[Any]) -> str:
    """Returns the name of the built-in class of the error that a call raises, or "nothing"."""
    try:
        await call
    except Exception as error:
        return next(each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins")
    return "nothing"


async def error_contains(words: str, call: Awaitable[Any]) -> bool:
    """Returns whether the text of the error that a call raises contains these words."""
    try:
        await call
    except Exception as error:
        return words in str(error)
    return False


@case
async def dtypes_roundtrip(ts: Any, key: str) -> Any:
    names = ["float32", "bfloat16", "float16", "float64", "int8", "int64", "bool", "uint8", "complex64"]
    tensors = {name: torch.arange(6).to(getattr(torch, name)).reshape(2, 3) for name in names}
    for name, tensor in tensors.items():
        await ts.put(f"{key}.{name}", tensor)
    got = {name: await ts.get(f"{key}.{name}") for name in names}
    return all(torch.equal(got[name], tensors[name]) and got[name].dtype == tensors[name].dtype for name in names)


@case
async def scalar_roundtrip(ts: Any, key: str) -> Any:
    await ts.put(key, torch.tensor(3.5))
    return await ts.get(key)


@case
async def strided_tensors(ts: Any, key: str) -> Any:
    whole = torch.arange(24.0).reshape(4, 6)
    await ts.put(f"{key}.t", whole.T)
    await ts.put(f"{key}.column", whole[:, 1:3])
    return await ts.get(f"{key}.t"), await ts.get(f"{key}.column")


@case
async def parameter_becomes_tensor(ts: Any, key: str) -> Any:
    await ts.put(key, nn.Parameter(torch.ones(2)))
    got = await ts.get(key)
    return type(got).__name__, got.requires_grad


@case
async def plain_objects(ts: Any, key: str) -> Any:
    values = [{"rank": 0, "data": [1, 2, 3]}, "text", 7, 2.5, [1, "a", (2, None)], {"w": torch.ones(2)}, {}, []]
    for index, value in enumerate(values):
        await ts.put(f"{key}.{index}", value)
    return [await ts.get(f"{key}.{index}") for index in range(len(values))]


@case
async def object_of_custom_class(ts: Any, key: str) -> Any:
    return await error_name(ts.put(key, object()))


@case
async def change_after_put(ts: Any, key: str) -> Any:
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
async def key_existence(ts: Any, key: str) -> Any:
    before = await ts.exists(key)
    await ts.put(key, torch.ones(1))
    after = await ts.exists(key)
    await ts.delete(key)
    return before, after, await ts.exists(key), await error_name(ts.get(key))


@case
async def get_missing_key(ts: Any, key: str) -> Any:
    return await error_name(ts.get(key)), await error_name(ts.get_state_dict(key)), await ts.keys(key)


@case
async def delete_missing_key(ts: Any, key: str) -> Any:
    return await error_name(ts.delete(key))


@case
async def get_in_place(ts: Any, key: str) -> Any:
    await ts.put(key, torch.arange(6.0).reshape(2, 3))
    into = torch.zeros(2, 3)
    got = await ts.get(key, into)
    strided = torch.zeros(3, 2).T
    await ts.get(key, inplace_tensor=strided)
    return got is into, into, strided


@case
async def get_in_place_with_other_dtype(ts: Any, key: str) -> Any:
    await ts.put(key, torch.arange(4.0))
    return await ts.get(key, torch.zeros(4, dtype=torch.bfloat16))


@case
async def get_in_place_with_other_shape(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(1))
    return await error_name(ts.get(key, torch.zeros(4)))


@case
async def get_in_place_with_int_dtype(ts: Any, key: str) -> Any:
    await ts.put(key, torch.tensor([2.7]))
    return await error_name(ts.get(key, torch.zeros(1, dtype=torch.int64)))


@case
async def get_object_in_place(ts: Any, key: str) -> Any:
    await ts.put(key, "text")
    return await error_name(ts.get(key, torch.zeros(1)))


@case
async def get_slice(ts: Any, key: str) -> Any:
    await ts.put(key, torch.arange(100.0).reshape(10, 10))
    part = make_slice(ts, (1, 2), (10, 10), (3, 4))
    into = torch.zeros(3, 4)
    got = await ts.get(key, into, part)
    return await ts.get(key, tensor_slice_spec=part), got is into, into


@case
async def get_slice_with_other_target_shape(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(10, 10))
    return await error_name(ts.get(key, torch.zeros(2, 2), make_slice(ts, (0, 0), (10, 10), (3, 4))))


@case
async def get_slice_with_other_global_shape(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(10, 10))
    return await error_name(ts.get(key, tensor_slice_spec=make_slice(ts, (8, 8), (99, 99), (5, 5))))


@case
async def get_in_place_into_list(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(1))
    return await error_name(ts.get(key, [0.0]))


@case
async def put_with_other_shape(ts: Any, key: str) -> Any:
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
async def invalid_batches(ts: Any, key: str) -> Any:
    await ts.put(f"{key}.a", torch.ones(1))
    into = torch.zeros(1)
    return [
        await error_name(ts.put_batch({})),
        await error_name(ts.get_batch([])),
        await error_name(ts.get_batch({})),
        await error_name(ts.get_batch([f"{key}.a", f"{key}.a"])),
        await error_name(ts.get_batch((f"{key}.a",))),
        await error_name(ts.get_batch([f"{key}.a", f"{key}.nothing"])),
        await error_name(ts.get_batch({f"{key}.a": into, f"{key}.nothing": None})),
        await error_name(ts.delete_batch(f"{key}.a")),
        await error_name(ts.delete_batch([])),
        into,
    ]


@case
async def delete_batches(ts: Any, key: str) -> Any:
    await ts.put_batch({f"{key}.{name}": torch.ones(1) for name in "abc"})
    await ts.delete_batch([f"{key}.a", f"{key}.nothing", f"{key}.b", f"{key}.a"])
    await ts.delete_batch([f"{key}.a"])
    return await ts.keys(key)


def make_trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@case
async def state_dict_roundtrip(ts: Any, key: str) -> Any:
    model, optimizer = make_trained()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 3, "pair": (1, 2)}
    await ts.put_state_dict(state, key)
    got = await ts.get_state_dict(key)
    # torchstore converts all keys to strings.
    got["optimizer"]["state"] = {int(number): each for number, each in got["optimizer"]["state"].items()}
    return to_json(got) == to_json(state)


@case
async def state_dict_through_file(ts: Any, key: str) -> Any:
    model, optimizer = make_trained()
    await ts.put_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, key)
    with tempfile.TemporaryDirectory() as folder:
        tssd.save_file(await ts.get_state_dict(key), f"{folder}/moved.tssd")
        await ts.put_state_dict(tssd.load_file(f"{folder}/moved.tssd"), f"{key}.back")
    return to_json(await ts.get_state_dict(key)) == to_json(await ts.get_state_dict(f"{key}.back"))


@case
async def get_state_dict_in_place(ts: Any, key: str) -> Any:
    model, optimizer = make_trained()
    await ts.put_state_dict({"model": model.state_dict(), "step": 3}, key)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = {"model": other.state_dict(), "step": 0}
    got = await ts.get_state_dict(key, state)
    is_equal = all(torch.equal(one, two) for one, two in zip(model.state_dict().values(), other.state_dict().values()))
    is_in_place = all(got["model"][name] is tensor for name, tensor in state["model"].items())
    return is_equal, is_in_place, got["step"], list(got)


@case
async def state_dict_entries(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": {"b": torch.ones(2), "c": [1, 2]}, "d": (3, torch.ones(1)), "e": "text"}, key)
    names = sorted(each for each in await ts.keys() if each.startswith(key))
    values = [await ts.get(f"{key}/{name}") for name in ("a.b", "a.c", "d", "e", "MAPPING")]
    exist = [await ts.exists(key + name) for name in ("", "/a", "/a.b", "/MAPPING")]
    into = torch.zeros(2)
    return names, values, exist, await ts.get(f"{key}/a.b", into), await ts.keys(key), sorted(await ts.keys(f"{key}/a"))


@case
async def delete_entries(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": torch.zeros(1)}, key)
    await ts.delete(f"{key}/a")
    remaining = [each for each in await ts.keys() if each.startswith(key)]
    after_delete = await error_name(ts.get(f"{key}/a")), await ts.exists(f"{key}/a"), await ts.get(f"{key}/b")
    for name in remaining:
        await ts.delete(name)
    return (
        sorted(remaining),
        after_delete,
        [each for each in await ts.keys() if each.startswith(key)],
        await error_name(ts.get_state_dict(key)),
    )


@case
async def delete_mapping(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": torch.zeros(1)}, key)
    await ts.delete(f"{key}/MAPPING")
    remaining = sorted(each for each in await ts.keys() if each.startswith(key))
    got = await ts.get(f"{key}/a"), await ts.exists(f"{key}/MAPPING"), await error_name(ts.get_state_dict(key))
    for name in remaining:
        await ts.delete(name)
    return remaining, got, [each for each in await ts.keys() if each.startswith(key)]


@case
async def put_after_delete_of_entry(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": torch.zeros(1)}, key)
    await ts.delete(f"{key}/a")
    error_after_delete = await error_name(ts.get_state_dict(key))
    await ts.put_state_dict({"a": torch.ones(1), "c": torch.zeros(1)}, key)
    return error_after_delete, await ts.get_state_dict(key), await ts.exists(f"{key}/a")


@case
async def concurrent_deletes(ts: Any, key: str) -> Any:
    await ts.put_state_dict({name: torch.ones(1) for name in "abcdef"}, key)
    await asyncio.gather(*[ts.delete(f"{key}/{name}") for name in "abcd"])
    return sorted(each for each in await ts.keys() if each.startswith(key))


@case
async def put_of_single_entry(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": torch.zeros(1)}, key)
    await ts.put(f"{key}/a", torch.full((1,), 7.0))
    one = await ts.get(f"{key}/a")
    await ts.put_state_dict({"a": torch.full((1,), 2.0), "b": torch.zeros(1)}, key)
    two = await ts.get(f"{key}/a")
    await ts.delete(f"{key}/a")
    await ts.put_state_dict({"a": torch.full((1,), 3.0), "b": torch.zeros(1)}, key)
    return one, two, await ts.get(f"{key}/a")


@case
async def strict_get(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, key)
    superset = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    subset = {"a": torch.zeros(2)}
    errors = [await error_name(ts.get_state_dict(key, dict(each))) for each in (superset, subset)]
    unchanged = to_json(superset["a"])
    non_strict = [await ts.get_state_dict(key, dict(each), strict=False) for each in (superset, subset)]
    return errors, unchanged, [sorted(each) for each in non_strict], superset["c"], subset["a"], non_strict[1]["b"]


@case
async def get_state_dict_with_other_shape(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(4)}, key)
    return await error_name(ts.get_state_dict(key, {"a": torch.zeros(2, 4)}))


@case
async def get_state_dict_with_none_targets(ts: Any, key: str) -> Any:
    await ts.put_state_dict({"a": torch.ones(1), "b": "text"}, key)
    return await ts.get_state_dict(key, {"a": None, "b": None})


@case
async def state_dict_structure(ts: Any, key: str) -> Any:
    tied = torch.ones(2)
    state = OrderedDict([("one", tied), ("two", tied), ("empty", {}), ("ints", {0: 1})])
    await ts.put_state_dict(state, key)
    got = await ts.get_state_dict(key)
    return type(got).__name__, got["one"].data_ptr() == got["two"].data_ptr(), "empty" in got, list(got["ints"])


@case
async def empty_state_dict(ts: Any, key: str) -> Any:
    return await error_name(ts.put_state_dict({}, key))


@case
async def cast_with_transfer_dtype(ts: Any, key: str) -> Any:
    state = {"w": torch.tensor([1.001]), "n": torch.tensor([123457])}
    await ts.put_state_dict(state, key, transfer_dtype=torch.bfloat16)
    into = {"w": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int64)}
    await ts.get_state_dict(key, into)
    return await ts.get_state_dict(key), into, state["w"]


@case
async def initialize_twice(ts: Any, key: str) -> Any:
    return await error_name(ts.initialize()), await error_name(ts.initialize(num_storage_volumes=2, store_name=key))


@case
async def second_store(ts: Any, key: str) -> Any:
    await ts.initialize(num_storage_volumes=1, strategy=ts.LocalRankStrategy(), store_name=key)
    await ts.put("mine", torch.ones(1), store_name=key)
    before = await ts.exists("mine"), await ts.exists("mine", store_name=key), await ts.keys(store_name=key)
    cached = await ts.client(key) is await ts.client(key)
    await ts.shutdown(key)
    return before, cached, await ts.exists("mine")


@case
async def client_object(ts: Any, key: str) -> Any:
    client = await ts.client()
    await client.put(key, torch.ones(1))
    await client.put(f"{key}.object", "text")
    got = [await client.get(key), await client.get(f"{key}.object"), await client.exists(key)]
    await client.delete(key)
    ts.reset_client()
    return got, await ts.exists(key), await client.keys(key)


async def run_in_actors(ts: Any, key: str, count: int, role: str, **options: Any) -> list[Any]:
    """Runs a role in `count` processes. Returns the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        results = await spawn_actors(count).run.call(ts.__name__, role, key, count, f"{folder}/meet", options)
        return [value for _, value in sorted(results, key=lambda each: each[0].rank)]


@functools.cache
def spawn_actors(count: int) -> Any:
    from monarch.actor import Actor, current_rank, endpoint, this_host

    class Process(Actor):
        @endpoint
        async def run(self, module: str, role: str, key: str, count: int, meet: str, options: Any) -> Any:
            rank = current_rank().rank
            os.environ["LOCAL_RANK"] = str(rank)
            dist.init_process_group("gloo", init_method=f"file://{meet}", world_size=count, rank=rank)
            try:
                return await ROLES[role](import_torchstore(module), key, rank, **options)
            finally:
                dist.destroy_process_group()

    return this_host().spawn_procs(per_host={"gpus": count}).spawn(f"processes{count}", Process)


PLACEMENTS = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}


def shard_tensor(whole: torch.Tensor, mesh: tuple[int, ...], placements: str) -> DTensor:
    device_mesh = init_device_mesh("cpu", mesh)
    return distribute_tensor(whole, device_mesh, [PLACEMENTS[each] for each in placements.split()])


def make_range(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


async def put_shards(
    ts: Any, key: str, rank: int, mesh: Any = (2,), placements: str = "S0", shape: Any = (8, 8), skip: int = -1
) -> Any:
    tensor = shard_tensor(make_range(*shape), mesh, placements)
    if rank != skip:
        await ts.put(key, tensor)


async def get_shards(ts: Any, key: str, rank: int, mesh: Any, placements: str, shape: Any) -> Any:
    into = shard_tensor(torch.zeros(shape), mesh, placements)
    expected = shard_tensor(make_range(*shape), mesh, placements)
    got = await ts.get(key, into)
    # No collective here: another rank may have failed, and this one would wait for it.
    return (
        got is into,
        torch.equal(into.to_local(), expected.to_local()),
        torch.equal(await ts.get(key), make_range(*shape)),
    )


async def get_with_slice_and_dtensor(ts: Any, key: str, rank: int) -> Any:
    into = shard_tensor(torch.zeros(8, 8), (1,), "S0")
    whole = make_slice(ts, (0, 0), (8, 8), (8, 8))
    return (
        await error_name(ts.get(key, into, make_slice(ts, (0, 0), (8, 8), (1, 1)))),
        await error_contains("Cannot specify a tensor slice when fetching a DTensor", ts.get(key, into, whole)),
    )


async def put_own_expert(ts: Any, key: str, rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    expert = DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Replicate()], run_check=False)
    await ts.put(f"{key}.{rank}", expert)


async def put_sharded_state_dict(ts: Any, key: str, rank: int, number: int) -> Any:
    whole = torch.full((4, 4), float(number))
    await ts.put_state_dict({"w": shard_tensor(whole, (2,), "S0"), "n": number, "plain": whole}, key)


ROLES: dict[str, Callable[..., Awaitable[Any]]] = {
    role.__name__: role
    for role in (put_shards, get_shards, get_with_slice_and_dtensor, put_own_expert, put_sharded_state_dict)
}


async def run_reshards(ts: Any, key: str, shape: tuple[int, int]) -> Any:
    results = []
    for number, (one, other) in enumerate(
        [(((2,), "S0"), ((4,), "S1")), (((2, 2), "S1 S0"), ((2,), "S0")), (((2, 2), "R S0"), ((2,), "R"))]
    ):
        (put_mesh, put_placements), (get_mesh, get_placements) = one, other
        world = torch.Size(put_mesh).numel(), torch.Size(get_mesh).numel()
        name = f"{key}{number}"
        await run_in_actors(ts, name, world[0], "put_shards", mesh=put_mesh, placements=put_placements, shape=shape)
        got = await run_in_actors(
            ts, name, world[1], "get_shards", mesh=get_mesh, placements=get_placements, shape=shape
        )
        part = await ts.get(name, tensor_slice_spec=make_slice(ts, (2, 1), shape, (4, 4)))
        results.append([got, torch.equal(part, make_range(*shape)[2:6, 1:5])])
    return results


@case
async def reshard_even_shape(ts: Any, key: str) -> Any:
    return await run_reshards(ts, key, (8, 8))


@case
async def reshard_uneven_shape(ts: Any, key: str) -> Any:
    return await run_reshards(ts, key, (7, 6))


@case
async def get_slice_outside_tensor(ts: Any, key: str) -> Any:
    await run_in_actors(ts, key, 2, "put_shards")
    return await error_name(ts.get(key, tensor_slice_spec=make_slice(ts, (0, 0), (9, 9), (2, 2))))


@case
async def missing_shard(ts: Any, key: str) -> Any:
    await run_in_actors(ts, key, 2, "put_shards", skip=1)
    return await ts.exists(key), await error_name(ts.get(key)), await error_name(ts.delete(key)) != "nothing"


@case
async def words_of_errors(ts: Any, key: str) -> Any:
    """The words by which programs tell errors apart."""
    await run_in_actors(ts, f"{key}.part", 2, "put_shards", skip=1)
    await run_in_actors(ts, f"{key}.whole", 2, "put_shards")
    await ts.put(f"{key}.object", "text")
    outside, small = (make_slice(ts, (0, 0), (size, size), (2, 2)) for size in (9, 8))
    located = f"Unable to locate {key}.x in any storage volumes"
    calls: list[tuple[str, Awaitable[Any]]] = [
        (located, ts.get(f"{key}.x")),
        (located, ts.delete(f"{key}.x")),
        ("Unable to locate", ts.get(f"{key}.x/y")),
        ("Unable to locate", ts.get(f"{key}.part")),
        ("is only partially committed", ts.get(f"{key}.part")),
        ("is only partially committed", ts.get(f"{key}.part", torch.zeros(8, 8))),
        ("Mapping is missing from the store", ts.get_state_dict(f"{key}.x")),
        ("no matching 'push' call for this key", ts.get_state_dict(f"{key}.x")),
        (f"key='{key}.x'", ts.get_state_dict(f"{key}.x")),
        ("Must be None, torch.Tensor, or DTensor", ts.get(f"{key}.whole", [1])),
        ("is specified but the value stored is an object", ts.get(f"{key}.object", tensor_slice_spec=small)),
        ("does not match in-place tensor shape", ts.get(f"{key}.whole", torch.zeros(3, 3), small)),
        (f"No tensor slices found for key '{key}.whole'", ts.get(f"{key}.whole", tensor_slice_spec=outside)),
        ("intersect with the requested slice", ts.get(f"{key}.whole", tensor_slice_spec=outside)),
        ("Must specify controller strategy", ts.initialize(num_storage_volumes=2)),
    ]
    return [await error_contains(words, call) for words, call in calls]


@case
async def delete_incomplete_tensor(ts: Any, key: str) -> Any:
    await run_in_actors(ts, key, 2, "put_shards", skip=1)
    await ts.delete_batch([key])
    await run_in_actors(ts, key, 2, "put_shards")
    return torch.equal(await ts.get(key), make_range(8, 8))


@case
async def get_dtensor_with_slice(ts: Any, key: str) -> Any:
    await ts.put(key, torch.ones(8, 8))
    return await run_in_actors(ts, key, 1, "get_with_slice_and_dtensor")


@case
async def unsharded_experts(ts: Any, key: str) -> Any:
    await run_in_actors(ts, key, 2, "put_own_expert")
    return [await ts.get(f"{key}.{rank}") for rank in range(2)]


@case
async def ranks_put_state_dict(ts: Any, key: str) -> Any:
    got = []
    for number in (1, 2):
        await run_in_actors(ts, key, 2, "put_sharded_state_dict", number=number)
        got.append(await ts.get_state_dict(key))
    return got


def make_slice(ts: Any, offsets: Any, global_shape: Any, local_shape: Any) -> Any:
    module = ts if ts.__name__ != "torchstore" else importlib.import_module("torchstore.transport")
    return module.TensorSlice(
        offsets=offsets, coordinates=(), global_shape=global_shape, local_shape=local_shape, mesh_shape=()
    )


async def main(name: str, out: Path, names: list[str]) -> None:
    ts = import_torchstore(name)
    results: dict[str, Any] = {}
    store = {} if name == "torchstore" else {"store_name": "torchstore"}
    await ts.initialize(num_storage_volumes=4, strategy=ts.LocalRankStrategy(), **store)
    os.environ["LOCAL_RANK"] = "0"
    try:
        for each in names or CASES:
            try:
                results[each] = to_json(await asyncio.wait_for(CASES[each](ts, each), 120))
            except Exception as error:
                results[each] = {"raised": f"{type(error).__name__}: {error}"[:2000]}
            out.write_text(json.dumps(results))
    finally:
        await ts.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
