"""One rank of reshard.py: its part of each layout, and the methods that transfer it to other ranks."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from layouts import RESHARDS, Layout, make_matrices, shard_locally
from torch.distributed.device_mesh import DeviceMesh

State = dict[str, Any]


class TransferMethod(Protocol):
    """A method that transfers a state dict from writers to readers. `ranks` are the ranks that call it."""

    async def put(self, state: State, key: str, ranks: list[int]) -> None: ...
    async def get(self, key: str, into: State, ranks: list[int]) -> None: ...


class Rank:
    """A rank, with the tensors of one layout at a time."""

    def __init__(self, folder: Path, rank: int, nbytes: int, methods: dict[str, TransferMethod]) -> None:
        self.folder, self.rank, self.nbytes, self.methods = folder, rank, nbytes, methods
        self.meshes: dict[str, DeviceMesh] = {}
        self.layout = ""
        self.source: State = {}
        self.into: State = {}

    async def run_command(self, method: str, command: str, name: str) -> float:
        """Runs a put, a get, or a check of the last get. Returns its time in seconds.

        The time is 0 if this rank does not take part. All ranks begin at the same time.
        """
        self.select_layout(name)
        _, writers, readers = RESHARDS[name]
        layout = writers if command == "put" else readers
        if command == "put" and self.rank == 0:
            shutil.rmtree(self.folder / method / name, ignore_errors=True)
        if command == "put":
            # Cleared before the put, whose bytes then replace these in the cache.
            clear(self.into)
        dist.barrier()
        if self.rank not in layout.ranks:
            return 0
        start = time.perf_counter()
        if command == "put":
            await self.methods[method].put(self.source, name, layout.ranks)
        elif command == "get":
            await self.methods[method].get(name, self.into, layout.ranks)
        else:
            self.check(readers)
        return time.perf_counter() - start

    def check(self, layout: Layout) -> None:
        for tensor, expected in self.make_state(layout).items():
            if not torch.equal(self.into[tensor].to_local(), expected.to_local()):
                raise AssertionError(f"{tensor} is not what was put")

    def select_layout(self, name: str) -> None:
        if name != self.layout:
            self.layout = name
            self.source, self.into = {}, {}
            _, writers, readers = RESHARDS[name]
            self.source, self.into = self.make_state(writers), self.make_state(readers)
            clear(self.into)

    def make_state(self, layout: Layout) -> State:
        mesh = self.mesh(layout)
        if self.rank not in layout.ranks:
            return {}
        return {name: shard_locally(whole, mesh, layout) for name, whole in make_matrices(self.nbytes)}

    def mesh(self, layout: Layout) -> DeviceMesh:
        """Returns the mesh of a layout. All ranks must create it, even those outside it."""
        name = str(layout.mesh)
        if name not in self.meshes:
            self.meshes[name] = DeviceMesh("cpu", layout.mesh)
        return self.meshes[name]


def clear(state: State) -> None:
    for tensor in state.values():
        tensor.to_local().zero_()


def join(folder: Path, rank: int, ranks: int) -> None:
    """Initializes the process group, which connects this rank to the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", world_size=ranks, rank=rank)
