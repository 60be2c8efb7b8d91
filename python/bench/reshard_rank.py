"""One rank of reshard.py: python reshard_rank.py FOLDER RANK BYTES URL.

It puts and gets its part of a state dict, once for each line on stdin: `WAY put LAYOUT`, `WAY get LAYOUT` (into
tensors that are there) or `WAY check LAYOUT`, which compares what a get brings with what was put. A way is tssd,
dcp, copy or torchstore, which is there if URL is the word torchstore and alone then. All ranks begin
together. The answer is one line: the seconds that took on this rank, 0 if it has no part.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Protocol

# Libraries print there as well.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.setdefault("TORCHSTORE_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from layouts import RANKS, RESHARDS, Layout, placed, wholes
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh

FOLDER, RANK, BYTES, URL = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
State = dict[str, Any]


class Way(Protocol):
    """How a state dict gets from writers to readers."""

    async def put(self, state: State, key: str, ranks: list[int]) -> None: ...
    async def get(self, key: str, into: State, ranks: list[int]) -> None: ...


class Tssd:
    """Writer and reader each have a connection."""

    def __init__(self) -> None:
        import tssd

        self.writer, self.reader = tssd.Store(URL), tssd.Store(URL)

    async def put(self, state: State, key: str, ranks: list[int]) -> None:
        self.writer.put_state_dict(state, key, writers=ranks)

    async def get(self, key: str, into: State, ranks: list[int]) -> None:
        self.reader.get_state_dict(key, into)


class Dcp:
    """Files that nobody syncs to the disk."""

    def __init__(self) -> None:
        self.groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4, 8)}

    async def put(self, state: State, key: str, ranks: list[int]) -> None:
        writer = FileSystemWriter(str(FOLDER / key), sync_files=False)
        save_dcp(state, storage_writer=writer, process_group=self.groups[len(ranks)])

    async def get(self, key: str, into: State, ranks: list[int]) -> None:
        load_dcp(into, checkpoint_id=str(FOLDER / key), process_group=self.groups[len(ranks)])


class Copy:
    """Nothing but the bytes of this rank, from memory to memory."""

    def __init__(self) -> None:
        self.memory: State = {}

    async def put(self, state: State, key: str, ranks: list[int]) -> None:
        for name, tensor in state.items():
            local = tensor.to_local()
            at = f"{key} {name} {tuple(local.shape)}"
            if at not in self.memory:
                self.memory[at] = torch.empty_like(local).zero_()
            self.memory[at].copy_(local)

    async def get(self, key: str, into: State, ranks: list[int]) -> None:
        await self.put(into, key, ranks)


class Torchstore:
    """Each rank has a volume; the key is overwritten while nobody reads it."""

    @classmethod
    async def start(cls) -> Torchstore:
        import torchstore
        from torchstore.transport import TransportType

        strategy = torchstore.LocalRankStrategy(TransportType.SharedMemory)
        await torchstore.initialize_spmd(strategy=strategy)
        dist.barrier()
        return cls()

    async def put(self, state: State, key: str, ranks: list[int]) -> None:
        import torchstore

        await torchstore.put_state_dict(state, key)

    async def get(self, key: str, into: State, ranks: list[int]) -> None:
        import torchstore

        await torchstore.get_state_dict(key, into)


async def ways() -> dict[str, Way]:
    if URL == "torchstore":
        return {"torchstore": await Torchstore.start()}
    return {"tssd": Tssd(), "dcp": Dcp(), "copy": Copy()}


class Rank:
    """What this rank has of each layout."""

    def __init__(self, every: dict[str, Way]) -> None:
        self.ways = every
        self.meshes: dict[str, DeviceMesh] = {}
        self.states: dict[str, tuple[State, State]] = {}
        self.layout = ""

    def use(self, name: str) -> None:
        """All ranks make all meshes, whether they are inside or not; only one layout's tensors are there."""
        if name == self.layout:
            return
        self.layout = name
        self.states = {}
        _, writers, readers = RESHARDS[name]
        source, into = (self.state(layout) for layout in (writers, readers))
        for tensor in into.values():
            tensor.to_local().zero_()
        self.states[name] = (source, into)

    def state(self, layout: Layout) -> State:
        mesh = self.mesh(layout)
        if RANK not in layout.ranks:
            return {}
        return {name: placed(whole, mesh, layout) for name, whole in wholes(BYTES)}

    def mesh(self, layout: Layout) -> DeviceMesh:
        name = str(layout.mesh)
        if name not in self.meshes:
            self.meshes[name] = DeviceMesh("cpu", layout.mesh)
        return self.meshes[name]

    async def answer(self, way: str, what: str, name: str) -> float:
        self.use(name)
        _, writers, readers = RESHARDS[name]
        source, into = self.states[name]
        layout = writers if what == "put" else readers
        if what == "put" and way == "dcp" and RANK == 0:
            shutil.rmtree(FOLDER / name, ignore_errors=True)
        if what == "check":
            for tensor in into.values():
                tensor.to_local().zero_()
        dist.barrier()
        if RANK not in layout.ranks:
            return 0
        start = time.perf_counter()
        if what == "put":
            await self.ways[way].put(source, name, layout.ranks)
        else:
            await self.ways[way].get(name, into, layout.ranks)
        seconds = time.perf_counter() - start
        if what == "check":
            for tensor_name, wanted in self.state(readers).items():
                if not torch.equal(into[tensor_name].to_local(), wanted.to_local()):
                    raise AssertionError(f"{tensor_name} is not what was put")
        return seconds


async def main() -> None:
    torch.set_num_threads(1)
    # torch warns of what is meant here.
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", world_size=RANKS, rank=RANK)
    rank = Rank(await ways())
    for line in sys.stdin:
        print(await rank.answer(*line.split()), file=answers, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main())
