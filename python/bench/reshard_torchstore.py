"""The ranks of reshard.py with torchstore: python reshard_torchstore.py FOLDER BYTES.

torchstore starts the ranks itself, as actors. Keys are overwritten, but never while a rank reads. The lines and answers
are those of reshard_rank.py, with the method torchstore. One process answers for all ranks: the time of the slowest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("TORCHSTORE_LOG_LEVEL", "ERROR")

import torchstore
from layouts import RANKS
from monarch.actor import Actor, current_rank, endpoint
from rank import Rank, State, join
from torchstore.transport import TransportType
from torchstore.utils import spawn_actors


class Torchstore:
    """Transfer with torchstore."""

    async def put(self, state: State, key: str, ranks: list[int]) -> None:
        await torchstore.put_state_dict(state, key)

    async def get(self, key: str, into: State, ranks: list[int]) -> None:
        await torchstore.get_state_dict(key, into)


class RankActor(Actor):  # type: ignore[misc]
    """The actor of one rank."""

    def __init__(self, folder: str, nbytes: int) -> None:
        # Otherwise the time of log messages would count.
        logging.disable(logging.INFO)
        number = current_rank().rank
        self.rank = Rank(Path(folder), number, nbytes, {"torchstore": Torchstore()})

    @endpoint  # type: ignore[untyped-decorator]
    async def join(self) -> None:
        join(self.rank.folder, self.rank.rank, RANKS)

    @endpoint  # type: ignore[untyped-decorator]
    async def answer(self, method: str, command: str, name: str) -> float:
        return await self.rank.run_command(method, command, name)


async def main(folder: str, nbytes: int) -> None:
    # Libraries print to stdout. So answers go to a copy of it, and stdout becomes stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    strategy = torchstore.ControllerStorageVolumes(TransportType.SharedMemory)
    await torchstore.initialize(strategy=strategy)
    ranks = await spawn_actors(RANKS, RankActor, "ranks", folder=folder, nbytes=nbytes)
    await ranks.join.call()
    for line in sys.stdin:
        seconds = await ranks.answer.call(*line.split())
        print(max(value for _, value in seconds.items()), file=replies, flush=True)
    await torchstore.shutdown()


if __name__ == "__main__":
    # The processes of the actors import this module by its name.
    import reshard_torchstore

    asyncio.run(reshard_torchstore.main(sys.argv[1], int(sys.argv[2])))
