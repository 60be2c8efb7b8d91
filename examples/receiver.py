"""An engine answers requests, and loads newly published weights between two requests.

    export TSSD_STORE=unix:receiver  # the first process starts a daemon
    export RUN=$(date +%s)  # so that the engine waits for this trainer, and not for what an earlier run has left
    python examples/receiver.py train &
    python examples/receiver.py serve

`Engine.load_weights` has the interface of vLLM's and SGLang's: it takes (name, tensor) pairs, copies each to the tensor
of that name, and returns the names. To follow a store, an engine needs `update`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

import torch
import tssd
from torch import Tensor, nn

KEY, STEPS, RUN = "policy", 5, os.environ["RUN"]


class Engine:
    def __init__(self) -> None:
        self.model = make_model()
        self.version, self.loaded = 0, ""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        mine = self.model.state_dict()
        loaded = set()
        for name, tensor in weights:
            mine[name].copy_(tensor)
            loaded.add(name)
        return loaded

    @torch.no_grad()
    def answer(self, prompt: Tensor) -> Tensor:
        return torch.as_tensor(self.model(prompt))


def update(engine: Engine, store: tssd.Store) -> None:
    """Loads the newest version if the engine has another one. It skips versions that were replaced before."""
    newest = store.head(KEY)
    if newest is None or newest.id == engine.loaded:
        return
    # The version is not removed while it is open. Its tensors are read one by one, as views of shared memory.
    with store.open(KEY) as version:
        loaded = engine.load_weights(version.items())
        engine.version, engine.loaded = int(version), newest.id
    missing = engine.model.state_dict().keys() - loaded
    if missing:
        raise KeyError(f"version {engine.version} does not have what the engine needs: {missing}")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).to(torch.bfloat16)


def requests() -> Iterator[Tensor]:
    while True:
        yield torch.randn(2, 64, dtype=torch.bfloat16)


def serve(store: tssd.Store) -> None:
    engine, reported, answered = Engine(), 0, 0
    # The first answer needs weights.
    store.wait_for_version(KEY, 1, timeout=120, run=RUN).close()
    for request in requests():
        # Between two requests, so that no request uses weights of two versions.
        update(engine, store)
        answer = engine.answer(request)
        answered += 1
        if engine.version != reported:
            reported = engine.version
            store.put_state_dict({"request": request, "answer": answer}, "answers", version=reported)
        if reported == STEPS:
            break
    print(f"{answered} requests answered, with {STEPS} versions")


def train(store: tssd.Store) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answered = store.head("answers")  # the engine answers after the first version of this run
    for step in range(1, STEPS + 1):
        model(torch.randn(8, 64, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        store.put_state_dict(model.state_dict(), KEY, version=step, job=RUN, writer=0)

        with store.wait_for_version("answers", step, timeout=120, after=answered) as lease, torch.no_grad():
            seen = store.get_state_dict("answers", version=lease)
            assert int(lease) == step and torch.equal(seen["answer"], model(seen["request"]))
    for key in store.keys():
        store.delete(key)  # a daemon that was started automatically exits when it is empty


if __name__ == "__main__":
    with tssd.Store() as store:
        {"train": train, "serve": serve}[sys.argv[1]](store)
