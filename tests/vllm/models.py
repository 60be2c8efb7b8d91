"""Small models for the tests of engines."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from tssd.mapping import Mapping, fuse, stack

PROMPT = [1, 5, 9, 200, 33]

# transformers stacks the experts of a module. Checkpoints, and engines, have them one by one.
EXPERT = "{p}.block_sparse_moe.experts.{e}."
MIXTRAL_CHECKPOINT = Mapping(
    {
        "{p:path}.mlp.experts.gate_up_proj": stack(fuse(EXPERT + "w1.weight", EXPERT + "w3.weight"), over="e"),
        "{p:path}.mlp.experts.down_proj": stack(EXPERT + "w2.weight", over="e"),
        "{p:path}.mlp.gate.weight": "{p}.block_sparse_moe.gate.weight",
    }
)


def make_config(kind: str) -> Any:
    """Returns the configuration of a model with grouped queries: "llama" has tied embeddings, "mixtral" experts."""
    common = {
        "vocab_size": 320,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "dtype": "float32",
        "initializer_range": 0.2,
    }
    if kind == "llama":
        return LlamaConfig(
            **common,
            intermediate_size=256,
            attention_bias=True,
            tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"],
        )
    return MixtralConfig(
        **common,
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        architectures=["MixtralForCausalLM"],
    )


def make_model(config: Any, seed: int) -> Any:
    """Returns a model with random weights. Biases are not zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


@torch.no_grad()
def greedy(model: Any, count: int) -> list[int]:
    """Returns the greedy continuation of the prompt. Each token is computed from the whole text before it."""
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@torch.no_grad()
def log_probability(model: Any, tokens: list[int]) -> float:
    """Returns the log-probability of the first token after the prompt."""
    return float(model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)[tokens[0]])
