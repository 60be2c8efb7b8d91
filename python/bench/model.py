"""State dicts to be measured: in the shapes of models that exist, read from files, or made up.

A word names each, so that a peer in a process of its own makes the same one:

    shape:NAME        one of tests/shapes.json, filled with N(0, 0.02)
    uniform:N:BYTES   N tensors of bfloat16 of the same size, together so many bytes
    tiny:N            N tensors of one element
    adamw:WORD        what a training with AdamW saves: the weights that WORD names, nested, and their moments
    DIR               a folder of *.safetensors, whose tensors are read
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

State = dict[str, Any]
SHAPES = Path(__file__).parents[2] / "tests" / "shapes.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Model:
    """A state dict, what it is called beside how many tensors it has, and the word that names it."""

    name: str
    word: str
    state: State
    nbytes: int
    count: int

    def __str__(self) -> str:
        return f"{self.name}, {self.nbytes / 1e6:,.1f} MB in {self.count:,} tensors"


def named(word: str, size: int | None = None) -> Model:
    """The state dict of this word, cut to this size."""
    give_back()
    kind, _, rest = word.partition(":")
    if kind == "shape":
        return model(rest, word, shaped(rest, size))
    if kind == "uniform":
        tensors, _, nbytes = rest.partition(":")
        return model("of one size", word, uniform(int(tensors), int(nbytes)))
    if kind == "tiny":
        return model("tiny", word, tiny(int(rest)))
    if kind == "adamw":
        weights = named(rest, size)
        return model(f"{weights.name} with AdamW", word, adamw(weights.state))
    return model(Path(word).name, word, read(Path(word), size))


def give_back() -> None:
    """What the models before had: the allocator would keep it, and there is not room for all."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def model(name: str, word: str, state: State) -> Model:
    each = list(tensors(state))
    return Model(name, word, state, sum(tensor.nbytes for tensor in each), len(each))


def shaped(name: str, size: int | None) -> State:
    with open(SHAPES, encoding="utf-8") as file:
        shapes = json.load(file)
    if name not in shapes:
        raise SystemExit(f"there is no shape {name}, only {', '.join(shapes)}")
    about = shapes[name]
    dtype = getattr(torch, about["dtype"])
    every = dict(expanded(about))
    kept = cut({name: math.prod(shape) * dtype.itemsize for name, shape in every.items()}, size)
    normal = Normal()
    return {name: normal.fill(torch.empty(every[name], dtype=dtype)) for name in kept}


def expanded(about: State) -> Iterator[tuple[str, list[int]]]:
    """Each tensor of a model, layer by layer: a name with {layer} is in all layers, or in those from one up to
    another that are given with it; one with {expert} is there for each expert."""
    layers_done = False
    for name, shape, *_ in about["tensors"]:
        if "{layer}" not in name:
            yield name, shape
        elif not layers_done:
            layers_done = True
            for layer in range(about["layers"]):
                yield from layer_of(about, layer)


def layer_of(about: State, layer: int) -> Iterator[tuple[str, list[int]]]:
    for name, shape, *limits in about["tensors"]:
        first, end = limits[0] if limits else (0, about["layers"])
        if "{layer}" in name and first <= layer < end:
            for expert in range(about["experts"] if "{expert}" in name else 1):
                yield name.replace("{layer}", str(layer)).replace("{expert}", str(expert)), shape


def cut(sizes: dict[str, int], size: int | None) -> list[str]:
    """Names that together have this size: a layer is kept whole or not at all. What no longer fits is left out."""
    units: dict[str, list[str]] = {}
    for name in sizes:
        found = LAYER.search(name)
        units.setdefault(f"layer {found[1]}" if found else name, []).append(name)
    left = math.inf if size is None else size
    kept = []
    for unit, names in units.items():
        wanted = sum(sizes[name] for name in names)
        if wanted <= left:
            left -= wanted
            kept.append(unit)
    layers = [unit for unit in units if unit.startswith("layer ")] or list(units)
    if not set(layers) & set(kept):
        smallest = min(sum(sizes[name] for name in units[unit]) for unit in layers)
        raise SystemExit(f"nothing fits in {size} bytes: the smallest layer has {smallest}")
    return [name for unit in kept for name in units[unit]]


def read(folder: Path, size: int | None) -> State:
    """The tensors of all files, read without a library: not every Python that runs this has one."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise SystemExit(f"there is no *.safetensors in {folder}")
    stored = {name: tensor for path in paths for name, tensor in mapped(path)}
    # A copy: else the tensors are maps of the file, and their first use reads it.
    return {name: stored[name].clone() for name in cut({name: t.nbytes for name, t in stored.items()}, size)}


def mapped(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)[8 + length :]
    header.pop("__metadata__", None)
    for name, about in header.items():
        start, end = about["data_offsets"]
        # Copied if it does not begin where its dtype may.
        part = data[start:end]
        dtype = DTYPES[about["dtype"]]
        aligned = part if part.data_ptr() % dtype.itemsize == 0 else part.clone()
        yield name, aligned.view(dtype).view(about["shape"])


def uniform(count: int, nbytes: int) -> State:
    normal = Normal()
    elements = nbytes // count // 2
    return {
        f"layers.{number}.weight": normal.fill(torch.empty(elements, dtype=torch.bfloat16))
        for number in range(count)
    }


def tiny(count: int) -> State:
    return {f"a.{number}": torch.tensor(float(number)) for number in range(count)}


def adamw(weights: State) -> State:
    """As torch.optim.AdamW and a scheduler give it: keys that are numbers, None, tuples and all."""
    normal = Normal()
    moments = {
        number: {
            "step": torch.tensor(1000.0),
            "exp_avg": normal.fill(torch.empty(weight.shape)),
            "exp_avg_sq": normal.fill(torch.empty(weight.shape)),
        }
        for number, weight in enumerate(weights.values())
    }
    group = {
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "amsgrad": False,
        "foreach": None,
        "maximize": False,
        "params": list(range(len(weights))),
    }
    scheduler = {"base_lrs": [3e-4], "last_epoch": 1000, "_step_count": 1001, "T_max": 100_000, "eta_min": 0}
    return {
        "model": weights,
        "optimizer": {"state": moments, "param_groups": [group]},
        "lr_scheduler": scheduler,
        "step": 1000,
    }


class Normal:
    """Numbers of N(0, 0.02), other ones for each tensor, and made as fast as they are copied."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numbers = torch.empty(1 << 22).normal_(0, 0.02, generator=generator)
        self.dtypes: dict[torch.dtype, torch.Tensor] = {}
        self.start = 0

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        numbers = self.dtypes.setdefault(tensor.dtype, self.numbers.to(tensor.dtype))
        flat = tensor.view(-1)
        done = 0
        while done < flat.numel():
            part = numbers[self.start : self.start + flat.numel() - done]
            flat[done : done + part.numel()].copy_(part)
            done += part.numel()
            self.start = (self.start + part.numel() + 977) % numbers.numel()
        return tensor


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All of them, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        inside: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for each in inside:
            yield from tensors(each)


def like(value: Any, *, warm: bool = True) -> Any:
    """The same with other tensors. Warm ones are of zeros that are there: no page of them is new when they are
    filled."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value).zero_() if warm else torch.empty_like(value)
    if isinstance(value, dict):
        return {key: like(each, warm=warm) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(like(each, warm=warm) for each in value)
    return value


def clear(value: Any) -> None:
    """Zeros in all tensors, so that a get that brings nothing is seen."""
    for tensor in tensors(value):
        tensor.zero_()


def expect_same(found: Any, source: Any, path: str = "") -> None:
    """Fails unless both hold the same, types of keys and values included."""
    same: object = type(found) is type(source)
    if same and isinstance(source, torch.Tensor):
        same = found.dtype == source.dtype and torch.equal(found, source)
    elif same and isinstance(source, dict):
        same = list(found) == list(source) or sorted(map(repr, found)) == sorted(map(repr, source))
        for key in source if same else ():
            expect_same(found[key], source[key], f"{path}.{key}")
    elif same and isinstance(source, (list, tuple)):
        same = len(found) == len(source)
        for number, each in enumerate(source if same else ()):
            expect_same(found[number], each, f"{path}.{number}")
    elif same:
        same = found == source
    if not same:
        raise AssertionError(f"{path.lstrip('.')} is not what was put")
