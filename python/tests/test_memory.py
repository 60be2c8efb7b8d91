"""How much memory of their own puts and gets need: less than the model, whatever it has."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_store import daemon

# A model of 256 MiB; what is allowed beside it, in MiB.
MODEL, ALLOWED = 256, 64

PREAMBLE = """
import re, sys, threading
import numpy as np
import tssd

def private():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1]) / 1024

class Peak:
    def __enter__(self):
        self.most, self.before, self.done = 0, private(), threading.Event()
        self.watch = threading.Thread(target=self.look)
        self.watch.start()
        return self
    def look(self):
        while not self.done.wait(0.0005):
            self.most = max(self.most, private() - self.before)
    def __exit__(self, *_):
        self.done.set()
        self.watch.join()
        print(self.most)

store = tssd.Store(sys.argv[1])
# What is imported for a get takes memory too: torch, where it is installed.
tssd.load(tssd.save({"a": np.ones(3)}))
"""


def peak(url: str, script: str) -> float:
    code = PREAMBLE + textwrap.dedent(script)
    # What is freed goes back at once: else threads keep blocks of it each for itself, some more, some fewer.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", code, url]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="daemons need Linux")
def test_no_call_needs_the_model_once_more(tmp_path: Path) -> None:
    with daemon(tmp_path / "socket") as url:
        # Tensors are made one by one, in buckets of 32 MiB.
        most = peak(
            url,
            f"""
            with Peak(), store.publish("policy", bucket_bytes=32 << 20) as publisher:
                for layer in range({MODEL}):
                    publisher.put(str(layer), np.full(1 << 20, layer % 251, np.uint8))
            """,
        )
        assert 0 < most < ALLOWED
        into = f"""
            into = {{str(layer): np.ones(1 << 20, np.uint8) for layer in range({MODEL})}}
            with Peak():
                store.get_state_dict("policy", into)
            assert all((into[str(layer)] == layer % 251).all() for layer in range({MODEL}))
            """
        assert peak(url, into) < ALLOWED
        # Views that are read take none either.
        views = """
            with Peak():
                total = sum(int(each.sum()) for each in store.get_state_dict("policy").values())
            assert total > 0
            """
        assert peak(url, views) < ALLOWED
        # Nor does the bucket take more where tensors are cast.
        cast = f"""
            layer = np.ones(4 << 20, np.float32)
            with Peak(), store.publish("cast", bucket_bytes=32 << 20, transfer_dtype="float16") as publisher:
                for number in range({MODEL} // 16):
                    publisher.put(str(number), layer)
            """
        assert 0 < peak(url, cast) < ALLOWED
        # Nor where one is larger than the bucket.
        cast = f"""
            layers = np.ones(({MODEL} // 16, 4 << 20), np.float32)
            with Peak(), store.publish("cast", bucket_bytes=32 << 20, transfer_dtype="float16") as publisher:
                publisher.put("layers", layers)
            """
        assert 0 < peak(url, cast) < ALLOWED
        # Nor where that is a shard.
        cast = f"""
            layers = np.ones(({MODEL} // 16, 4 << 20), np.float32)
            shard = tssd.TensorShard(layers, tssd.TensorSlice([0, 0], None, layers.shape, layers.shape, []))
            with Peak(), store.publish(
                "cast", writer=0, writers=1, bucket_bytes=32 << 20, transfer_dtype="float16"
            ) as publisher:
                publisher.put("layers", shard)
            """
        assert 0 < peak(url, cast) < ALLOWED
        # Nor where the shard is several boxes of a tensor.
        cast = f"""
            half = {MODEL} // 32
            layers = np.ones((2 * half, 4 << 20), np.float32)
            boxes = [tssd.TensorSlice([at, 0], None, [3 * half, 4 << 20], [half, 4 << 20], []) for at in (0, 2 * half)]
            with Peak(), store.publish(
                "cast", writer=0, writers=2, job="run", version=9, bucket_bytes=32 << 20, transfer_dtype="float16"
            ) as publisher:
                publisher.put("layers", tssd.TensorShard(layers, boxes))
            """
        assert 0 < peak(url, cast) < ALLOWED
        # Nor where they are local tensors that name their offsets.
        cast = f"""
            import torch
            import tssd._torch  # It imports much of torch.
            from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

            class Table(torch.Tensor):
                def __create_chunk_list__(self):
                    sizes = torch.Size((layers.shape[0] // 2, 4 << 20))
                    return [ChunkStorageMetadata(torch.Size((at * sizes[0], 0)), sizes) for at in range(2)]

                def local_shards(self):
                    return list(layers.chunk(2))

            layers = torch.ones({MODEL} // 16, 4 << 20)
            table = torch.empty_like(layers, device="meta").as_subclass(Table)
            with Peak(), store.publish(
                "cast", writer=0, writers=1, job="run", version=99, bucket_bytes=32 << 20, transfer_dtype="float16"
            ) as publisher:
                publisher.put("layers", table)
            """
        if find_spec("torch"):
            assert 0 < peak(url, cast) < ALLOWED
        # What the watch sees if there is a copy: else the rest would prove nothing.
        copy = "with Peak(): kept = store.get_state_dict('policy', copy=True)"
        assert peak(url, copy) > MODEL / 2
