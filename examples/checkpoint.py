"""One file contains the whole state of a run: a resumed run equals an uninterrupted one, bit for bit.

    python examples/checkpoint.py
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tssd
from torch import nn

STEPS = 6


class Training:
    """A training that uses the random generators of torch (dropout), Python and numpy (data)."""

    def __init__(self) -> None:
        self.step = 0
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)

    def advance(self) -> None:
        batch = torch.from_numpy(np.random.standard_normal((32, 16)).astype(np.float32))
        batch *= random.uniform(0.5, 2.0)
        self.optimizer.zero_grad()
        loss = (self.model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": np.random.get_state(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])
        np.random.set_state(state["rng"]["numpy"])


def run(checkpoint: Path, *, seed: int, until: int) -> None:
    """Trains up to a step. Resumes from the checkpoint if it exists."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    training = Training()
    if checkpoint.exists():
        training.load_state_dict(tssd.load_file(checkpoint))
    while training.step < until:
        training.advance()
        # The file replaces the old one atomically: after a crash, one of them exists.
        tssd.save_file(training.state_dict(), checkpoint, metadata={"step": training.step})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, interrupted = Path(folder, "whole.tssd"), Path(folder, "interrupted.tssd")
        run(whole, seed=0, until=STEPS)
        run(interrupted, seed=0, until=STEPS // 2)
        run(interrupted, seed=1, until=STEPS)  # another seed: the state in the file replaces it
        # Equal state dicts give equal files.
        assert interrupted.read_bytes() == whole.read_bytes()
        print(f"resumed at step {STEPS // 2} of {STEPS}: equal, {whole.stat().st_size} bytes")


if __name__ == "__main__":
    main()
