"""Trainers publish weights after every step; generators with another sharding pull them.

    export TSSD_STORE=unix:weight-sync  # the first process starts a daemon
    export RUN=$(date +%s)  # so that the generators wait for these trainers, and not for what an earlier run has left
    torchrun --standalone --nproc-per-node 4 examples/weight_sync.py train &
    torchrun --standalone --nproc-per-node 2 examples/weight_sync.py generate

The trainers shard a Qwen3 model with FSDP2, the generators with tensor parallelism. The generators send
the logits of a prompt back, and the trainers compare them with their own.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import tssd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM

RUN = os.environ["RUN"]
STEPS, BATCH, LENGTH, VOCABULARY = 3, 4, 16, 256
PROMPT = torch.arange(LENGTH).reshape(1, LENGTH)


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
        )
    )


def train(store: tssd.Store, rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    model = make_model(seed=0)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    seen = store.head("logits")  # the generators put theirs after the first version of this run
    for step in range(1, STEPS + 1):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()

        # Every rank puts its shards. The version becomes visible when all ranks have put theirs.
        store.put_state_dict(model.state_dict(), "policy", version=step, job=RUN)

        with torch.no_grad():
            mine = model(PROMPT).logits
        with store.wait_for_version("logits", step, timeout=120, after=seen) as answer:
            theirs = store.get("logits", version=answer)
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
        if rank == 0:
            error = (theirs - mine).abs().max()
            print(f"step {step}: loss {loss:.4f}, logits differ by {error:.1e} at most", flush=True)
    dist.barrier()
    if rank == 0:
        for key in store.keys():
            store.delete(key)  # a daemon that was started automatically exits when it is empty


def generate(store: tssd.Store, rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    model = make_model(seed=1).train(False)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    model.lm_head.weight = model.model.embed_tokens.weight  # parallelize_module untied them
    weights = model.state_dict()
    for step in range(1, STEPS + 1):
        # The lease retains the version while it is read, even if the trainers publish newer ones.
        with store.wait_for_version("policy", step, timeout=120, run=RUN) as lease:
            store.get_state_dict("policy", into=weights, version=lease)
        with torch.no_grad():
            logits = model(PROMPT).logits
        if rank == 0:
            store.put("logits", logits, version=step)


def main() -> None:
    role = {"train": train, "generate": generate}[sys.argv[1]]
    dist.init_process_group("gloo")
    with tssd.Store() as store:
        role(store, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
