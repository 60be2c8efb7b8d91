"""Reinforcement learning with a sharded trainer and a vLLM engine. The weights go through a store after each step.

    pip install tssd transformers vllm
    python examples/rl_loop.py

Four ranks train a small Llama with FSDP2. Two tensor-parallel workers of vLLM generate the answers. After each step every
rank puts its own shards, every worker fetches exactly its shard while the engine could serve, and the engine pauses only
to copy it. The reward of an answer is the share of its tokens that are even.

The workers reach the store over TCP, as they would on another host. Nothing needs a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from tssd.vllm import LLMClient, TrainerInit, TrainerTransfer
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

STEPS, RANKS, WORKERS = 5, 4, 2
PROMPT = [1, 5, 9, 200, 33]
ANSWERS, LENGTH, CHECKED = 32, 16, 8
LEARNING_RATE = 2e-3

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    max_position_embeddings=128,
    initializer_range=0.1,
    dtype="float32",
    architectures=["LlamaForCausalLM"],
)


class Engine(LLMClient):
    """A vLLM engine: generates answers, and is the client of the trainer's weight updates."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        CONFIG.save_pretrained(folder)
        llm = LLM(
            str(folder),
            load_format="dummy",  # the trainer has the weights
            weight_transfer_config={"backend": "tssd"},
            tensor_parallel_size=WORKERS,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=ANSWERS,
        )
        super().__init__(llm)

    def generate(self, count: int, length: int, temperature: float) -> list[list[int]]:
        from vllm import SamplingParams

        options = SamplingParams(n=count, max_tokens=length, temperature=temperature, ignore_eos=True, detokenize=False)
        (result,) = self.llm.generate([{"prompt_token_ids": PROMPT}], options, use_tqdm=False)
        return [list(answer.token_ids) for answer in result.outputs]


class EngineManager(BaseManager):
    """Lets rank 0 of the trainer call the engine, which is in another process. Servers of vLLM are called over HTTP."""


EngineManager.register("engine")


def broadcast(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def log_probabilities(model: LlamaForCausalLM, answers: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each token of the answers."""
    text = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], dim=1)
    logits = model(text).logits[:, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)


@torch.no_grad()
def greedy(model: LlamaForCausalLM) -> list[int]:
    """Returns the tokens that the trainer's own weights generate. All ranks take part."""
    tokens = list(PROMPT)
    for _ in range(CHECKED):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def train(rank: int, folder: str, store: str, engine_store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    engine: Any = None
    if rank == 0:
        manager = EngineManager(address=f"{folder}/engine", authkey=b"example")
        manager.connect()
        engine = manager.engine()  # type: ignore[attr-defined]

    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    trainer = WeightTransferTrainerFactory.trainer_init(
        TrainerInit(store, "policy", rank=rank, engine_store=engine_store),
        client=engine,
        source=ModuleSource(model),
    )
    assert isinstance(trainer, TrainerTransfer)
    for step in range(STEPS + 1):
        started = time.monotonic()
        trainer.put()
        put = time.monotonic()
        reports = trainer.stage()  # the engine goes on serving
        staged = time.monotonic()
        trainer.commit()  # it should not serve now
        committed = time.monotonic()

        tokens = greedy(model)
        answers: list[list[int]] = []
        if rank == 0:
            has_same_tokens = engine.generate(1, CHECKED, 0.0)[0] == tokens
            answers = engine.generate(ANSWERS, LENGTH, 1.0)
        batch = torch.tensor(broadcast(answers))
        rewards = (batch % 2 == 0).float().mean(1)
        if rank == 0:
            needed = sum(report["bytes_needed"] for report in reports.values())
            received = sum(report["bytes_received"] for report in reports.values())
            print(
                f"step {step}: reward {rewards.mean():.2f}, "
                f"put {1e3 * (put - started):.0f} ms, stage {1e3 * (staged - put):.0f} ms, "
                f"pause {1e3 * (committed - staged):.0f} ms, "
                f"received / needed {received / 1e6:.1f} / {needed / 1e6:.1f} MB, "
                f"tokens {'equal' if has_same_tokens else 'DIFFER'}",
                flush=True,
            )
            if not has_same_tokens or received != needed:
                sys.exit("the engine does not have the trainer's weights")

        # One step of a policy gradient. Each rank has its part of the answers.
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        own = slice(rank * ANSWERS // RANKS, (rank + 1) * ANSWERS // RANKS)
        loss = -(advantages[own, None] * log_probabilities(model, batch[own])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trainer.shutdown()
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # Without it, each worker of an engine on CPUs takes a NUMA node.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    folder = tempfile.mkdtemp(prefix="rl-loop-")
    command = [os.environ.get("TSSD_BIN", "tssd"), "serve", "--socket", f"{folder}/store", "--memory-limit", "1GB"]
    daemon = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    engine_store = daemon.stdout.readline().split()[-1]
    engine = Engine(Path(folder, "model"))
    try:
        EngineManager.register("engine", callable=lambda: engine)
        server = EngineManager(address=f"{folder}/engine", authkey=b"example").get_server()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        torch.multiprocessing.spawn(train, (folder, f"unix:{folder}/store", engine_store), nprocs=RANKS)
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        daemon.terminate()
        daemon.wait()


if __name__ == "__main__":
    main()
