"""Puts and gets a state dict with torchstore: python torchstore_peer.py TRANSPORT.

Each line on stdin is one of these commands:

    use SIZE SPEC   creates the state dict of this spec of model.py
    put KEY         puts it
    get KEY         gets it into existing tensors, which are cleared before
    first KEY       as get, with a new client
    delete KEY      deletes it
    single KEY      puts and gets each tensor separately
    check KEY       compares the result of the last get with the values that were put

The answer to each is one line: the time in seconds. For `single`, it is the slowest put, the slowest get, and the
median of each. Writer and reader are separate clients, as those of tssd are. peer.py controls this process.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time

import torch
from model import State, copy_structure, expect_same, model_from_spec, zero_tensors

# Libraries print to stdout. So answers go to a copy of it, and stdout becomes stderr.
replies = os.fdopen(os.dup(1), "w")
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
        self.writer, self.reader = await new_client(), await new_client()

    async def answer(self, command: str, argument: str) -> list[float]:
        if command in ("get", "first"):
            zero_tensors(self.into)
        start = time.perf_counter()
        if command == "put":
            await put_state_dict(self.writer, self.state, argument)
        elif command == "get":
            await get_state_dict(self.reader, argument, self.into)
        elif command == "first":
            self.reader = await new_client()
            start = time.perf_counter()
            await get_state_dict(self.reader, argument, self.into)
        elif command == "delete":
            await self.delete(f"{argument}/")
        elif command == "single":
            return await self.single()
        elif command == "use":
            await self.delete("")
            size, _, spec = argument.partition(" ")
            self.state = model_from_spec(spec, int(size) or None).state
            self.into = copy_structure(self.state)
        else:
            # The returned dict has str keys where ints were put. So the filled tensors are compared.
            expect_same(self.into, self.state)
        return [time.perf_counter() - start]

    async def delete(self, prefix: str) -> None:
        # torchstore rejects an empty list.
        if keys := [key for key in await self.writer.keys() if key.startswith(prefix)]:
            await self.writer.delete_batch(keys)
        # A client keeps memory mapped that another client has deleted.
        self.reader = await new_client()

    async def single(self) -> list[float]:
        zero_tensors(self.into)
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
        command, argument = line.rstrip("\n").split(" ", 1)
        print(*await clients.answer(command, argument), file=replies, flush=True)
    await torchstore.shutdown()


async def new_client() -> torchstore.client.LocalClient:
    torchstore.reset_client()
    return await torchstore.client()


if __name__ == "__main__":
    asyncio.run(main())
