"""Trainers gather their model tensor by tensor and publish it as they go: nobody ever has the whole model.

    export TSSD_STORE=unix:sender-$$
    torchrun --standalone --nproc-per-node 2 examples/bucketed_sender.py

`gathered` has the shape of Megatron-Bridge's `export_hf_weights` and of a loop over DeepSpeed's
`GatheredParameters`: a generator of (name, whole tensor), whose steps are collective. Where ranks can put
their own shards (FSDP2, DTensors), `put_state_dict` needs no gathering: see weight_sync.py.
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
TENSOR = WIDTH * WIDTH * 4
BUCKET = 4 * TENSOR


class Alive:
    """Counts the bytes of tensors that are gathered and still there, whoever holds them."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def watch(self, tensor: Tensor) -> Tensor:
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(tensor.untyped_storage(), self.ended, tensor.nbytes)
        return tensor

    def ended(self, size: int) -> None:
        self.now -= size


def gathered(model: nn.Module, alive: Alive) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        yield name, alive.watch(tensor.full_tensor())


def publish(store: tssd.Store, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Every rank has every tensor, and writes its share of them. Readers see the version when all have."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with store.publish("policy", version=version, writers=ranks, bucket_bytes=BUCKET) as publisher:
        for index, (name, tensor) in enumerate(weights):
            if index % ranks == rank:
                publisher.put(name, tensor)


def publish_from_first(store: tssd.Store, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Rank 0 writes all: for exporters that give no other rank the tensors. The others take the same steps."""
    if dist.get_rank() != 0:
        for _ in weights:
            pass
        return
    with store.publish("policy", version=version, writers=1, writer=0, bucket_bytes=BUCKET) as publisher:
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
        for version, send in enumerate((publish, publish_from_first), start=1):
            with torch.no_grad():
                for tensor in [*model.parameters(), *whole.values()]:
                    tensor.mul_(2)
            alive = Alive()
            send(store, gathered(model, alive), version)
            # A bucket, and the tensor that is gathered meanwhile.
            assert alive.most <= BUCKET + 2 * TENSOR, alive.most
            with store.wait_for_version("policy", version, timeout=60) as lease:
                assert sorted(lease.keys()) == sorted(whole)
                assert all(torch.equal(tensor, whole[name]) for name, tensor in lease.items())
            dist.barrier()
            if rank == 0:
                print(f"{send.__name__}: {LAYERS * TENSOR >> 20} MiB, {alive.most >> 20} MiB at a time", flush=True)
        if rank == 0:
            store.delete("policy")  # a daemon that nobody started by hand ends when it holds nothing
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
