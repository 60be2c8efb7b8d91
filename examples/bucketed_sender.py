"""Trainers gather their model tensor by tensor and publish each one. No process has the whole model.

    export TSSD_STORE=unix:sender
    torchrun --standalone --nproc-per-node 2 examples/bucketed_sender.py

`gather_tensors` has the interface of Megatron-Bridge's `export_hf_weights` and of a loop over DeepSpeed's
`GatheredParameters`: a generator of (name, whole tensor), whose steps are collective. If ranks can put their own shards
(FSDP2, DTensors), `put_state_dict` needs no gathering: see weight_sync.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import tssd
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LAYERS, WIDTH = 16, 512
TENSOR_BYTES = WIDTH * WIDTH * 4
BUCKET_BYTES = 4 * TENSOR_BYTES


class AliveBytes:
    """Counts the bytes of gathered tensors that are still alive, and their maximum."""

    def __init__(self) -> None:
        self.current = self.peak = 0

    def watch(self, tensor: Tensor) -> Tensor:
        self.current += tensor.nbytes
        self.peak = max(self.peak, self.current)
        weakref.finalize(tensor.untyped_storage(), self.release, tensor.nbytes)
        return tensor

    def release(self, size: int) -> None:
        self.current -= size


def gather_tensors(model: nn.Module, alive: AliveBytes) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        yield name, alive.watch(tensor.full_tensor())


def publish(store: tssd.Store, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Publishes tensors that every rank has. Each rank writes a part of them.

    The version becomes visible when all ranks have written theirs.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with store.publish("policy", version=version, writers=ranks, bucket_bytes=BUCKET_BYTES) as publisher:
        for index, (name, tensor) in enumerate(weights):
            if index % ranks == rank:
                publisher.put(name, tensor)


def publish_from_first(store: tssd.Store, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Publishes tensors that only rank 0 has, as with some exporters. Rank 0 writes all of them.

    The other ranks run the generator too, because its steps are collective.
    """
    if dist.get_rank() != 0:
        for _ in weights:
            pass
        return
    with store.publish("policy", version=version, writers=1, writer=0, bucket_bytes=BUCKET_BYTES) as publisher:
        for name, tensor in weights:
            publisher.put(name, tensor)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # to compare with
    fully_shard(model)
    with tssd.Store() as store:
        seen = store.head("policy")  # an earlier run may have left a version
        dist.barrier()
        for version, send in enumerate((publish, publish_from_first), start=1):
            with torch.no_grad():
                for tensor in [*model.parameters(), *whole.values()]:
                    tensor.mul_(2)
            alive = AliveBytes()
            send(store, gather_tensors(model, alive), version)
            # A bucket, and the tensors that are gathered in the meantime.
            assert alive.peak <= BUCKET_BYTES + 2 * TENSOR_BYTES, alive.peak
            with store.wait_for_version("policy", version, timeout=60, after=seen) as lease:
                assert sorted(lease.keys()) == sorted(whole)
                assert all(torch.equal(tensor, whole[name]) for name, tensor in lease.items())
            dist.barrier()
            if rank == 0:
                size = LAYERS * TENSOR_BYTES
                print(f"{send.__name__}: {size >> 20} MiB, {alive.peak >> 20} MiB at a time", flush=True)
        if rank == 0:
            store.delete("policy")  # a daemon that was started automatically exits when it is empty
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
