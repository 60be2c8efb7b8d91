"""An engine with fused parameters and another sharding than the trainer, filled in place by the store.

    export TSSD_STORE=unix:fused  # any name: the first process starts a daemon
    torchrun --standalone --nproc-per-node 2 examples/fused_engine.py

The trainer's model has q, k, v, gate and up projections. The engine has `qkv_proj`, one matrix with the heads of its
rank, and `gate_up_proj`, with alternating rows of gate and up. For each stored tensor, a rank passes a view of its part
in the fused tensor, and the store writes there. Nothing is gathered, concatenated or copied twice.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import tssd
from torch import Tensor, nn
from torch.nn import functional as F

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


def shard(part: Tensor, dim: int) -> tssd.TensorShard[Tensor]:
    """Returns the shard of this rank, for a stored tensor that is sharded along a dimension."""
    offsets, whole = [0, 0], list(part.shape)
    offsets[dim], whole[dim] = dist.get_rank() * part.shape[dim], dist.get_world_size() * part.shape[dim]
    return tssd.TensorShard(part, tssd.TensorSlice(offsets, None, whole, list(part.shape), []))


class FusedBlock:
    """The part of the engine's block on one rank."""

    def __init__(self, ranks: int) -> None:
        self.q, self.kv, inner = HEADS * HEAD // ranks, KV_HEADS * HEAD // ranks, INNER // ranks
        self.qkv_proj = torch.empty(self.q + 2 * self.kv, HIDDEN)
        self.o_proj = torch.empty(HIDDEN, self.q)
        self.gate_up_proj = torch.empty(2 * inner, HIDDEN)
        self.down_proj = torch.empty(HIDDEN, inner)

    def targets(self) -> dict[str, tssd.TensorShard[Tensor]]:
        q, k, v = torch.split(self.qkv_proj, [self.q, self.kv, self.kv])
        gate, up = self.gate_up_proj[0::2], self.gate_up_proj[1::2]
        parts = {"q": (q, 0), "k": (k, 0), "v": (v, 0), "gate": (gate, 0), "up": (up, 0)}
        parts |= {"o": (self.o_proj, 1), "down": (self.down_proj, 1)}
        return {f"{name}_proj.weight": shard(part, dim) for name, (part, dim) in parts.items()}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.split(F.linear(x, self.qkv_proj), [self.q, self.kv, self.kv], dim=-1)
        dist.all_reduce(attention := F.linear(attend(q, k, v), self.o_proj))
        gate_up = F.linear(x := x + attention, self.gate_up_proj)
        dist.all_reduce(mlp := F.linear(F.silu(gate_up[..., 0::2]) * gate_up[..., 1::2], self.down_proj))
        return x + mlp


@torch.no_grad()
def main() -> None:
    dist.init_process_group("gloo")
    rank, engine = dist.get_rank(), FusedBlock(dist.get_world_size())
    targets = engine.targets()  # once: the parameters stay where they are
    with tssd.Store() as store:
        seen = store.head("policy")  # an earlier run may have left a version
        dist.barrier()
        for step in (1, 2):
            torch.manual_seed(step)
            trained = Block()
            if rank == 0:  # the other ranks only compare with it
                store.put_state_dict(trained.state_dict(), "policy", version=step, writers=1)
            with store.wait_for_version("policy", step, timeout=60, after=seen) as lease:
                _, report = store.get_state_dict("policy", into=targets, version=lease, return_report=True)
            # Bytes of other ranks were not transferred.
            assert report.bytes_transferred == sum(part.local.nbytes for part in targets.values())
            torch.testing.assert_close(engine.forward(PROMPT), trained(PROMPT))
        dist.barrier()
        if rank == 0:
            print(f"equal at both steps, {report.bytes_transferred} bytes per rank")
            store.delete("policy")  # a daemon that was started automatically exits when it is empty
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
