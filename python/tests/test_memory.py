"""Peak anonymous memory of puts and gets, which must stay far below the size of the model."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import Daemon

# Size of the model, and limit of the peak above the start, in MiB.
MODEL_MIB, LIMIT_MIB = 256, 64

PREAMBLE = """
import re, sys, threading
import numpy as np
import tssd

def anonymous_mib():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1]) / 1024

class Peak:
    def __enter__(self):
        self.peak, self.start, self.stop = 0, anonymous_mib(), threading.Event()
        self.sampler = threading.Thread(target=self.sample)
        self.sampler.start()
        return self
    def sample(self):
        while not self.stop.wait(0.0005):
            self.peak = max(self.peak, anonymous_mib() - self.start)
    def __exit__(self, *_):
        self.stop.set()
        self.sampler.join()
        print(self.peak)

store = tssd.Store(sys.argv[1])
# The first load imports torch, if it is installed. That memory does not count.
tssd.load(tssd.save({"a": np.ones(3)}))
"""


def measure_peak(url: str, script: str) -> float:
    code = PREAMBLE + textwrap.dedent(script)
    # Freed blocks return to the system at once. Otherwise, each thread of the allocator keeps some of them.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", code, url]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return float(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="daemons need Linux")
def test_puts_and_gets_do_not_copy_the_model(tmp_path: Path) -> None:
    with Daemon(tmp_path / "socket") as url:
        # The caller creates tensors one by one. Buckets have 32 MiB.
        peak = measure_peak(
            url,
            f"""
            with Peak(), store.publish("policy", bucket_bytes=32 << 20) as publisher:
                for layer in range({MODEL_MIB}):
                    publisher.put(str(layer), np.full(1 << 20, layer % 251, np.uint8))
            """,
        )
        assert 0 < peak < LIMIT_MIB
        into = f"""
            into = {{str(layer): np.ones(1 << 20, np.uint8) for layer in range({MODEL_MIB})}}
            with Peak():
                store.get_state_dict("policy", into)
            assert all((into[str(layer)] == layer % 251).all() for layer in range({MODEL_MIB}))
            """
        assert measure_peak(url, into) < LIMIT_MIB
        # Views that are read use no anonymous memory.
        views = """
            with Peak():
                total = sum(int(each.sum()) for each in store.get_state_dict("policy").values())
            assert total > 0
            """
        assert measure_peak(url, views) < LIMIT_MIB
        # A cast stays below the limit.
        cast = f"""
            layer = np.ones(4 << 20, np.float32)
            with Peak(), store.publish("cast", bucket_bytes=32 << 20, transfer_dtype="float16") as publisher:
                for number in range({MODEL_MIB} // 16):
                    publisher.put(str(number), layer)
            """
        assert 0 < measure_peak(url, cast) < LIMIT_MIB
        # So does a cast of a tensor that is larger than a bucket.
        cast = f"""
            layers = np.ones(({MODEL_MIB} // 16, 4 << 20), np.float32)
            with Peak(), store.publish("cast", bucket_bytes=32 << 20, transfer_dtype="float16") as publisher:
                publisher.put("layers", layers)
            """
        assert 0 < measure_peak(url, cast) < LIMIT_MIB
        # So does a cast of a shard.
        cast = f"""
            layers = np.ones(({MODEL_MIB} // 16, 4 << 20), np.float32)
            shard = tssd.TensorShard(layers, tssd.TensorSlice([0, 0], None, layers.shape, layers.shape, []))
            with Peak(), store.publish(
                "cast", writer=0, writers=1, bucket_bytes=32 << 20, transfer_dtype="float16"
            ) as publisher:
                publisher.put("layers", shard)
            """
        assert 0 < measure_peak(url, cast) < LIMIT_MIB
        # So does a cast of a shard of several boxes.
        cast = f"""
            half = {MODEL_MIB} // 32
            layers = np.ones((2 * half, 4 << 20), np.float32)
            boxes = [tssd.TensorSlice([at, 0], None, [3 * half, 4 << 20], [half, 4 << 20], []) for at in (0, 2 * half)]
            with Peak(), store.publish(
                "cast", writer=0, writers=2, job="run", version=9, bucket_bytes=32 << 20, transfer_dtype="float16"
            ) as publisher:
                publisher.put("layers", tssd.TensorShard(layers, boxes))
            """
        assert 0 < measure_peak(url, cast) < LIMIT_MIB
        # So does a cast of local tensors that declare their offsets.
        cast = f"""
            import torch
            import tssd._torch  # Imports much of torch before the measurement.
            from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

            class Table(torch.Tensor):
                def __create_chunk_list__(self):
                    sizes = torch.Size((layers.shape[0] // 2, 4 << 20))
                    return [ChunkStorageMetadata(torch.Size((at * sizes[0], 0)), sizes) for at in range(2)]

                def local_shards(self):
                    return list(layers.chunk(2))

            layers = torch.ones({MODEL_MIB} // 16, 4 << 20)
            table = torch.empty_like(layers, device="meta").as_subclass(Table)
            with Peak(), store.publish(
                "cast", writer=0, writers=1, job="run", version=99, bucket_bytes=32 << 20, transfer_dtype="float16"
            ) as publisher:
                publisher.put("layers", table)
            """
        if find_spec("torch"):
            assert 0 < measure_peak(url, cast) < LIMIT_MIB
        # The measurement detects a copy. Otherwise, the checks above would prove nothing.
        copy = "with Peak(): kept = store.get_state_dict('policy', copy=True)"
        assert measure_peak(url, copy) > MODEL_MIB / 2
