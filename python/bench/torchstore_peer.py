"""Puts and gets a model with torchstore by shared memory, once for each line on stdin.

Usage: python torchstore_peer.py MB TENSORS

A line is `put KEY`, `get KEY` (into tensors that are there), `delete KEY` or `check KEY`, which compares what
a get brings with what was put. The answer is one line: the seconds that took. Writer and reader are clients
of their own, as ours are. store.py lets it take turns with us.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from race import expect_same, like, model

# Libraries print there as well.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.setdefault("TORCHSTORE_LOG_LEVEL", "ERROR")

import torchstore
from torchstore.state_dict_utils import get_state_dict, put_state_dict
from torchstore.strategy import ControllerStorageVolumes
from torchstore.transport import TransportType


async def main(megabytes: int, tensors: int) -> None:
    await torchstore.initialize(strategy=ControllerStorageVolumes(TransportType.SharedMemory))
    state = model(megabytes, tensors)
    into = like(state)
    writer, reader = await client(), await client()
    for line in sys.stdin:
        what, key = line.split()
        start = time.perf_counter()
        if what == "put":
            await put_state_dict(writer, state, key)
        elif what == "get":
            await get_state_dict(reader, key, into)
        elif what == "delete":
            await writer.delete_batch([f"{key}/{name}" for name in [*state, "MAPPING"]])
            # A client keeps mapped what another one has deleted.
            reader = await client()
        else:
            for tensor in into.values():
                tensor.zero_()
            await get_state_dict(reader, key, into)
            expect_same(into, state)
        print(time.perf_counter() - start, file=answers, flush=True)
    await torchstore.shutdown()


async def client() -> torchstore.client.LocalClient:
    torchstore.reset_client()
    return await torchstore.client()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
