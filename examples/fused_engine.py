"""An engine with fused parameters and another sharding than the trainer, filled in place by the store.

    export TSSD_STORE=unix:fused  # any name: the first process starts a daemon
    torchrun --standalone --nproc-per-node 2 examples/fused_engine.py

The trainer's model has q, k, v, gate and up projections. The engine has `qkv_proj`, one matrix with the heads of its
rank, and `gate_up_proj`. A mapping says which stored tensors these consist of, and the store writes each part to its
place. Nothing is gathered, concatenated or copied twice.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import tssd
from torch import Tensor, nn
from torch.nn import functional as F
from tssd.mapping import Expression, Mapping, fuse, shard

HIDDEN, HEADS, KV_HEADS, HEAD, INNER = 64, 8, 4, 16, 128
PROMPT = torch.randn(2, 10, HIDDEN, generator=torch.Generator().manual_seed(0))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.view(*x.shape[:2], -1, HEAD).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """The block of the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        return torch.add(x, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class FusedBlock:
    """The part of the engine's block on one rank."""

    def __init__(self, ranks: int) -> None:
        self.q, self.kv, inner = HEADS * HEAD // ranks, KV_HEADS * HEAD // ranks, INNER // ranks
        self.qkv_proj = torch.empty(self.q + 2 * self.kv, HIDDEN)
        self.o_proj = torch.empty(HIDDEN, self.q)
        self.gate_up_proj = torch.empty(2 * inner, HIDDEN)
        self.down_proj = torch.empty(HIDDEN, inner)

    def parameters(self) -> dict[str, Tensor]:
        names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        return {f"{name}.weight": getattr(self, name) for name in names}

    @staticmethod
    def mapping(rank: int, ranks: int) -> Mapping:
        def rows(*names: str) -> list[Expression]:
            return [shard(f"{name}_proj.weight", 0, rank, ranks) for name in names]

        def columns(name: str) -> Expression:
            return shard(f"{name}_proj.weight", 1, rank, ranks)

        return Mapping(
            {
                "qkv_proj.weight": fuse(*rows("q", "k", "v")),
                "gate_up_proj.weight": fuse(*rows("gate", "up")),
                "o_proj.weight": columns("o"),
                "down_proj.weight": columns("down"),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.split(F.linear(x, self.qkv_proj), [self.q, self.kv, self.kv], dim=-1)
        dist.all_reduce(attention := F.linear(attend(q, k, v), self.o_proj))
        gate, up = F.linear(x := x + attention, self.gate_up_proj).chunk(2, dim=-1)
        dist.all_reduce(mlp := F.linear(F.silu(gate) * up, self.down_proj))
        return x + mlp


@torch.no_grad()
def main() -> None:
    dist.init_process_group("gloo")
    rank, engine = dist.get_rank(), FusedBlock(dist.get_world_size())
    parameters, mapping = engine.parameters(), engine.mapping(rank, dist.get_world_size())
    with tssd.Store() as store:
        seen = store.head("policy")  # an earlier run may have left a version
        dist.barrier()
        for step in (1, 2):
            torch.manual_seed(step)
            trained = Block()
            if rank == 0:  # the other ranks only compare with it
                store.put_state_dict(trained.state_dict(), "policy", version=step, writers=1)
            with store.wait_for_version("policy", step, timeout=60, after=seen) as lease:
                _, report = store.get_state_dict(
                    "policy", into=parameters, mapping=mapping, version=lease, return_report=True
                )
            # Bytes of other ranks were not transferred.
            assert report.bytes_transferred == sum(parameter.nbytes for parameter in parameters.values())
            torch.testing.assert_close(engine.forward(PROMPT), trained(PROMPT))
        dist.barrier()
        if rank == 0:
            print(f"equal at both steps, {report.bytes_transferred} bytes per rank")
            store.delete("policy")  # a daemon that was started automatically exits when it is empty
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
