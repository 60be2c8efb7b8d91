"""Files beside those of others: save and load of one state dict, in turns.

Usage: python bench/files.py [--mb 512] [--tensors 340] [--rounds 7] [--folder DIR] [--fsync]

Prints for each the median of all rounds and the ratio to ours (above 1: ours is faster). Each save makes
a new file. A load counts until one thread has touched one byte of each page; ours proves all checksums.
With `--fsync` all files are on the disk in the end, else none is waited for.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import tssd

State = dict[str, torch.Tensor]


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


def touch(state: State) -> int:
    """One byte of each page."""
    total = 0
    for tensor in state.values():
        total += int(tensor.detach().view(torch.uint8).flatten()[::4096].sum(dtype=torch.int64))
    return total


def load_dcp(path: str, like: State) -> State:
    state = {key: torch.empty_like(tensor) for key, tensor in like.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=340)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--fsync", action="store_true", help="files are on the disk in the end")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    state = model(arguments.mb, arguments.tensors)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    print(f"{nbytes / 1e6:.0f} MB in {len(state)} tensors, {torch.get_num_threads()} threads, {folder}")

    def at(name: str) -> str:
        return str(folder / name)

    def synced(path: str) -> None:
        if arguments.fsync:
            for file in [Path(path)] if Path(path).is_file() else Path(path).iterdir():
                fd = os.open(file, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

    def save_dcp() -> None:
        dcp.save(dict(state), checkpoint_id=at("dcp"), no_dist=True)

    saves: dict[str, Callable[[], Any]] = {
        "tssd": lambda: tssd.save_file(state, at("x.tssd"), fsync=arguments.fsync),
        "safetensors": lambda: (
            safetensors.torch.save_file(state, at("x.safetensors")),
            synced(at("x.safetensors")),
        ),
        "torch.save": lambda: (torch.save(state, at("x.pt")), synced(at("x.pt"))),
        "DCP": lambda: (save_dcp(), synced(at("dcp"))),
    }
    loads: dict[str, Callable[[], State]] = {
        "tssd": lambda: tssd.load_file(at("x.tssd")),
        "tssd, verify off": lambda: tssd.load_file(at("x.tssd"), verify="off"),
        "tssd, pread": lambda: tssd.load_file(at("x.tssd"), backend="pread"),
        "safetensors": lambda: safetensors.torch.load_file(at("x.safetensors")),
        "torch.load": lambda: torch.load(at("x.pt")),
        "torch.load, mmap": lambda: torch.load(at("x.pt"), mmap=True),
        "DCP": lambda: load_dcp(at("dcp"), state),
    }
    wanted = touch(state)

    def saved(save: Callable[[], Any]) -> float:
        # What replaces a file waits for the file system to part with the old one.
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        start = time.perf_counter()
        save()
        return time.perf_counter() - start

    def loaded(load: Callable[[], State]) -> float:
        start = time.perf_counter()
        found = touch(load())
        time_ = time.perf_counter() - start
        assert found == wanted
        return time_

    try:
        report("save", saves, saved, arguments.rounds, nbytes)
        for save in saves.values():
            save()
        report("load", loads, loaded, arguments.rounds, nbytes)
        tiny(folder)
    finally:
        shutil.rmtree(folder)


def report(
    what: str,
    ways: dict[str, Callable[[], Any]],
    run: Callable[[Callable[[], Any]], float],
    rounds: int,
    nbytes: int,
) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        # What one leaves to the disk is not always the next one's burden.
        for name in random.Random(number).sample(list(ways), len(ways)):
            way = ways[name]
            gc.collect()
            time_ = run(way)
            # The first round warms up.
            if number > 0:
                times[name].append(time_)
    medians = {name: statistics.median(each) for name, each in times.items()}
    ours = medians["tssd"]
    for name, median in medians.items():
        spread = f"{min(times[name]) * 1e3:.0f}..{max(times[name]) * 1e3:.0f}"
        speed = nbytes / median / 1e9
        print(f"{what:5} {name:18} {median * 1e3:8.1f} ms ({spread:>11}) {speed:6.2f} GB/s  {median / ours:5.2f}")


def tiny(folder: Path) -> None:
    """10,000 tensors of one element: saved and loaded."""
    state = {f"a.{i}": torch.tensor(float(i)) for i in range(10_000)}
    path = str(folder / "tiny")
    for _ in range(3):
        start = time.perf_counter()
        tssd.save_file(state, path, fsync=False)
        middle = time.perf_counter()
        tssd.load_file(path)
        end = time.perf_counter()
    print(f"10,000 tiny tensors: save {(middle - start) * 1e3:.0f} ms, load {(end - middle) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
