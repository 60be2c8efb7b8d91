"""Small models, and a training that is the same in each run, for test_transformers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from tssd.transformers import TssdTrainerMixin

INPUT = torch.tensor([[1, 5, 9, 40, 33, 2], [7, 7, 0, 11, 60, 3]])


class MyTrainer(TssdTrainerMixin, Trainer):
    pass


def make_config(kind: str, **changes: Any) -> Any:
    """Returns a configuration: "llama", "tied" (llama with tied embeddings), "mixtral" or "qwen3_moe"."""
    common: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": kind == "tied",
        **changes,
    }
    if kind in ("llama", "tied"):
        return LlamaConfig(**{"intermediate_size": 64, "architectures": ["LlamaForCausalLM"], **common})
    if kind == "mixtral":
        return MixtralConfig(
            **{"intermediate_size": 24, "architectures": ["MixtralForCausalLM"], **common},
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    assert kind == "qwen3_moe"
    return Qwen3MoeConfig(
        **{"intermediate_size": 40, "architectures": ["Qwen3MoeForCausalLM"], **common},
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
    )


def make_model(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(INPUT).logits
    return result


def train_data(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 64, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def train_arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Returns arguments for 6 steps, with accumulated gradients, AdamW, a scheduler, and a save after 3 steps."""
    options: dict[str, Any] = {
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "weight_decay": 0.1,
        "optim": "adamw_torch",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
        **changes,
    }
    return TrainingArguments(str(folder), **options)


class StopAfter(TrainerCallback):
    """Stops a training after a step, as if the time of a job had ended."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def train_model(kind: str = "tied", seed: int = 0) -> Any:
    """Returns a model with dropout."""
    return make_model(make_config(kind, attention_dropout=0.2, attn_implementation="eager"), seed)


def losses(trainer: Any) -> dict[int, float]:
    """Returns the loss and the norm of the gradients after each step."""
    history = trainer.state.log_history
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry}
