"""One rank of reshard.py: its part of each layout, and the ways by which that gets to others."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from layouts import RESHARDS, Layout, placed, wholes
from torch.distributed.device_mesh import DeviceMesh

State = dict[str, Any]


class Way(Protocol):
    """How a state dict gets from writers to readers. The ranks are those that call it."""

    async def put(self, state: State, key: str, ranks: list[int]) -> None: ...
    async def get(self, key: str, into: State, ranks: list[int]) -> None: ...


class Rank:
    """It has the tensors of one layout at a time."""

    def __init__(self, folder: Path, rank: int, nbytes: int, ways: dict[str, Way]) -> None:
        self.folder, self.rank, self.nbytes, self.ways = folder, rank, nbytes, ways
        self.meshes: dict[str, DeviceMesh] = {}
        self.layout = ""
        self.source: State = {}
        self.into: State = {}

    async def answer(self, way: str, what: str, name: str) -> float:
        """The seconds that a put, a get or a check of what the last get has brought took here, 0 if this rank
        has no part in it. All ranks begin together."""
        self.use(name)
        _, writers, readers = RESHARDS[name]
        layout = writers if what == "put" else readers
        if what == "put" and self.rank == 0:
            shutil.rmtree(self.folder / way / name, ignore_errors=True)
        if what == "put":
            # Before the put, whose bytes take their place in the cache.
            clear(self.into)
        dist.barrier()
        if self.rank not in layout.ranks:
            return 0
        start = time.perf_counter()
        if what == "put":
            await self.ways[way].put(self.source, name, layout.ranks)
        elif what == "get":
            await self.ways[way].get(name, self.into, layout.ranks)
        else:
            self.check(readers)
        return time.perf_counter() - start

    def check(self, layout: Layout) -> None:
        for tensor, wanted in self.state(layout).items():
            if not torch.equal(self.into[tensor].to_local(), wanted.to_local()):
                raise AssertionError(f"{tensor} is not what was put")

    def use(self, name: str) -> None:
        if name != self.layout:
            self.layout = name
            self.source, self.into = {}, {}
            _, writers, readers = RESHARDS[name]
            self.source, self.into = self.state(writers), self.state(readers)
            clear(self.into)

    def state(self, layout: Layout) -> State:
        mesh = self.mesh(layout)
        if self.rank not in layout.ranks:
            return {}
        return {name: placed(whole, mesh, layout) for name, whole in wholes(self.nbytes)}

    def mesh(self, layout: Layout) -> DeviceMesh:
        """All ranks make it, whether they are inside or not."""
        name = str(layout.mesh)
        if name not in self.meshes:
            self.meshes[name] = DeviceMesh("cpu", layout.mesh)
        return self.meshes[name]


def clear(state: State) -> None:
    for tensor in state.values():
        tensor.to_local().zero_()


def join(folder: Path, rank: int, ranks: int) -> None:
    """The others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", world_size=ranks, rank=rank)
