"""Puts and gets a state dict with torchstore, once for each line on stdin: python torchstore_peer.py TRANSPORT.

A line is `use SIZE WORD`, which makes the state dict that model.py has under this word, `put KEY`, `get KEY`
(into tensors that are there, which were cleared), `first KEY` (the same by a client that is new), `delete KEY`,
`single KEY`, which puts and gets each tensor for itself, or `check KEY`, which compares what the last get has
brought with what was put. The answer is one line: the seconds that took; of `single`, the slowest put and the slowest get,
then the median of each. Writer and reader are clients of their own, as ours are. peer.py lets it take turns
with us.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time

import torch
from model import State, clear, expect_same, like, named

# Libraries print there as well.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.setdefault("TORCHSTORE_LOG_LEVEL", "ERROR")

import torchstore
from torchstore.state_dict_utils import get_state_dict, put_state_dict
from torchstore.strategy import ControllerStorageVolumes
from torchstore.transport import TransportType


class Clients:
    """A writer and a reader of one state dict."""

    state: State = {}
    into: State = {}

    async def connect(self) -> None:
        self.writer, self.reader = await client(), await client()

    async def answer(self, what: str, argument: str) -> list[float]:
        if what in ("get", "first"):
            clear(self.into)
        start = time.perf_counter()
        if what == "put":
            await put_state_dict(self.writer, self.state, argument)
        elif what == "get":
            await get_state_dict(self.reader, argument, self.into)
        elif what == "first":
            self.reader = await client()
            start = time.perf_counter()
            await get_state_dict(self.reader, argument, self.into)
        elif what == "delete":
            await self.delete(f"{argument}/")
        elif what == "single":
            return await self.single()
        elif what == "use":
            await self.delete("")
            size, _, word = argument.partition(" ")
            self.state = named(word, int(size) or None).state
            self.into = like(self.state)
        else:
            # What is returned has keys that are words where numbers were put: what was filled is compared.
            expect_same(self.into, self.state)
        return [time.perf_counter() - start]

    async def delete(self, prefix: str) -> None:
        # An empty list is refused.
        if keys := [key for key in await self.writer.keys() if key.startswith(prefix)]:
            await self.writer.delete_batch(keys)
        # A client keeps mapped what another one has deleted.
        self.reader = await client()

    async def single(self) -> list[float]:
        clear(self.into)
        puts, gets = [], []
        for key, tensor in self.state.items():
            start = time.perf_counter()
            await self.writer.put(f"single/{key}", tensor)
            puts.append(time.perf_counter() - start)
        for key, tensor in self.into.items():
            start = time.perf_counter()
            found = await self.reader.get(f"single/{key}", tensor)
            gets.append(time.perf_counter() - start)
            if not torch.equal(found, self.state[key]):
                raise AssertionError(f"{key} is not what was put")
        return [max(puts), max(gets), statistics.median(puts), statistics.median(gets)]


async def main() -> None:
    await torchstore.initialize(strategy=ControllerStorageVolumes(TransportType[sys.argv[1]]))
    clients = Clients()
    await clients.connect()
    for line in sys.stdin:
        what, argument = line.rstrip("\n").split(" ", 1)
        print(*await clients.answer(what, argument), file=answers, flush=True)
    await torchstore.shutdown()


async def client() -> torchstore.client.LocalClient:
    torchstore.reset_client()
    return await torchstore.client()


if __name__ == "__main__":
    asyncio.run(main())
