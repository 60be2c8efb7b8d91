"""One rank of reshard.py: python reshard_rank.py FOLDER RANK BYTES URL.

It runs one command for each line on stdin: `METHOD put LAYOUT` puts its part of a state dict; `METHOD get LAYOUT` gets
it into existing tensors; `METHOD check LAYOUT` compares the result of the last get with the values that were put. A
method is tssd, dcp or copy. The answer is one line: the time on this rank, in seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import tssd
from layouts import RANKS
from rank import Rank, State, join
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.tensor import DTensor


class Tssd:
    """Transfer with tssd. Writer and reader have separate connections."""

    def __init__(self, url: str) -> None:
        self.writer, self.reader = tssd.Store(url), tssd.Store(url)

    async def put(self, state: State, key: str, ranks: list[int]) -> None:
        self.writer.put_state_dict(state, key, writers=ranks)

    async def get(self, key: str, into: State, ranks: list[int]) -> None:
        self.reader.get_state_dict(key, into)


class Dcp:
    """Transfer with files of DCP, which are not synced to the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4, 8)}

    async def put(self, state: State, key: str, ranks: list[int]) -> None:
        writer = FileSystemWriter(str(self.folder / key), sync_files=False)
        save_dcp(state, storage_writer=writer, process_group=self.groups[len(ranks)])

    async def get(self, key: str, into: State, ranks: list[int]) -> None:
        load_dcp(into, checkpoint_id=str(self.folder / key), process_group=self.groups[len(ranks)])


class Copy:
    """Copies of the bytes of this rank in memory only. Replicas are copied on one rank."""

    def __init__(self) -> None:
        self.memory: dict[torch.Size, torch.Tensor] = {}

    async def put(self, state: State, key: str, ranks: list[int]) -> None:
        for number, tensor in enumerate(state.values()):
            if is_replica(tensor):
                continue
            local = tensor.to_local()
            slot = torch.Size((number, *local.shape))
            if slot not in self.memory:
                self.memory[slot] = torch.empty_like(local).zero_()
            self.memory[slot].copy_(local)

    async def get(self, key: str, into: State, ranks: list[int]) -> None:
        await self.put(into, key, ranks)


def is_replica(tensor: DTensor) -> bool:
    """Returns whether a rank with lower coordinates has the same part."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return any(place and each.is_replicate() for place, each in zip(coordinate, tensor.placements, strict=True))


async def main(folder: Path, number: int, nbytes: int, url: str) -> None:
    # Libraries print to stdout. So answers go to a copy of it, and stdout becomes stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # torch warns of things that are intended here.
    warnings.simplefilter("ignore")
    join(folder, number, RANKS)
    rank = Rank(folder, number, nbytes, {"tssd": Tssd(url), "dcp": Dcp(folder / "dcp"), "copy": Copy()})
    for line in sys.stdin:
        print(await rank.run_command(*line.split()), file=replies, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
