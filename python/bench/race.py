"""Races: ours and others take turns in one process, so that what else the machine does slows all alike.

A figure is the median of its rounds, a ratio the median of the ratios within rounds: how many times as fast
ours was. Above 1 ours is faster; a target is what the ratio must reach, or the milliseconds it may take.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Runner:
    """Something that is timed: it runs once and says how many seconds that took."""

    name: str
    run: Callable[[], float]
    #: How many times as fast ours must be.
    ratio: float | None = None


def timed(
    work: Callable[[], object],
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> Callable[[], float]:
    """Its seconds; what happens before and after takes none. What it returns lives until the clock has stopped."""

    def run() -> float:
        if before is not None:
            before()
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        del result
        if after is not None:
            after()
        return seconds

    return run


def race(
    title: str,
    *runners: Runner,
    rounds: int,
    nbytes: int | None = None,
    milliseconds: float | None = None,
) -> None:
    """Lets all take turns and prints the row of each. The first runner is ours. The first round warms up."""
    ours = runners[0]
    times: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for number in range(rounds + 1):
        # Nobody always comes after the same one.
        for runner in random.Random(number).sample(runners, len(runners)):
            gc.collect()
            seconds = runner.run()
            if number > 0:
                times[runner.name].append(seconds)
    print(f"{title} ({rounds} rounds, interleaved; medians)")
    for runner in runners:
        own = times[runner.name]
        median = statistics.median(own)
        line = f"  {runner.name:<38} {median * 1e3:>9.3f} ms ({min(own) * 1e3:.1f}..{max(own) * 1e3:.1f})"
        if nbytes is not None:
            line += f"{nbytes / 1e9 / median:>8.2f} GB/s"
        if runner is not ours:
            ratio = statistics.median(
                other / mine for other, mine in zip(own, times[ours.name], strict=True)
            )
            line += f"   ratio {ratio:>7.3f}"
            if runner.ratio is not None:
                line += f"   target {runner.ratio:g}: {verdict(ratio >= runner.ratio)}"
        elif milliseconds is not None:
            line += f"   target {milliseconds:g} ms: {verdict(median * 1e3 <= milliseconds)}"
        print(line, flush=True)
    print()


def verdict(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"


def options(description: str | None) -> argparse.ArgumentParser:
    """What all of them are asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=340)
    parser.add_argument("--rounds", type=int, default=9)
    return parser


def model(megabytes: int, tensors: int) -> State:
    """Weights in the proportions of a Qwen3: big matrices, and norms between them."""
    torch.manual_seed(0)
    layers = max(1, tensors // 11)
    hidden = int((megabytes * 1e6 / 2 / layers / 12) ** 0.5) // 64 * 64
    state: State = {}
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 2, hidden),
            "self_attn.v_proj": (hidden // 2, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            "mlp.gate_proj": (3 * hidden, hidden),
            "mlp.up_proj": (3 * hidden, hidden),
            "mlp.down_proj": (hidden, 3 * hidden),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            tensor = torch.empty(shape, dtype=torch.bfloat16)
            state[f"model.layers.{layer}.{name}.weight"] = tensor.normal_(0, 0.02)
    return state


def size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def described(state: State) -> str:
    return f"{size(state) / 1e6:.0f} MB in {len(state)} tensors"


def like(state: State) -> State:
    """Tensors of the same shapes, of zeros that are there: no page of them is new when they are filled."""
    return {name: torch.empty_like(tensor).zero_() for name, tensor in state.items()}


def expect_same(found: State, source: State) -> None:
    for name, tensor in source.items():
        if not torch.equal(found[name], tensor):
            raise AssertionError(f"{name} is not what was put")
