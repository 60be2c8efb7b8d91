"""State dicts for benchmarks: in the shapes of existing models, read from files, or generated.

A spec in text form identifies each, so that a peer in another process can create the same one:

    shape:NAME        one of tests/shapes.json, filled with N(0, 0.02)
    uniform:N:BYTES   N tensors of bfloat16 of the same size, with this number of bytes in total
    tiny:N            N tensors of one element
    adamw:SPEC        the checkpoint of a training with AdamW: the weights of SPEC, nested, and their moments
    DIR               the tensors in the *.safetensors files of a folder
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
    """A state dict with its name, its spec, and its sizes."""

    name: str
    spec: str
    state: State
    nbytes: int
    count: int

    def __str__(self) -> str:
        return f"{self.name}, {self.nbytes / 1e6:,.1f} MB in {self.count:,} tensors"


def model_from_spec(spec: str, size: int | None = None) -> Model:
    """Creates the state dict of a spec, cut to `size` bytes if it is given."""
    release_memory()
    kind, _, rest = spec.partition(":")
    if kind == "shape":
        return make_model(rest, spec, from_shape(rest, size))
    if kind == "uniform":
        tensors, _, nbytes = rest.partition(":")
        return make_model("of one size", spec, make_uniform(int(tensors), int(nbytes)))
    if kind == "tiny":
        return make_model("tiny", spec, make_tiny(int(rest)))
    if kind == "adamw":
        weights = model_from_spec(rest, size)
        return make_model(f"{weights.name} with AdamW", spec, make_adamw(weights.state))
    return make_model(Path(spec).name, spec, read_safetensors(Path(spec), size))


def release_memory() -> None:
    """Returns the memory of previous models to the system.

    Otherwise the allocator keeps it, and there is not enough memory for all models.
    """
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def make_model(name: str, spec: str, state: State) -> Model:
    all_tensors = list(iter_tensors(state))
    return Model(name, spec, state, sum(tensor.nbytes for tensor in all_tensors), len(all_tensors))


def from_shape(name: str, size: int | None) -> State:
    with open(SHAPES, encoding="utf-8") as file:
        shapes = json.load(file)
    if name not in shapes:
        raise SystemExit(f"there is no shape {name}, only {', '.join(shapes)}")
    config = shapes[name]
    dtype = getattr(torch, config["dtype"])
    shapes_by_name = dict(expand_tensors(config))
    kept = cut_to_size({name: math.prod(shape) * dtype.itemsize for name, shape in shapes_by_name.items()}, size)
    normal = NormalGenerator()
    return {name: normal.fill(torch.empty(shapes_by_name[name], dtype=dtype)) for name in kept}


def expand_tensors(config: State) -> Iterator[tuple[str, list[int]]]:
    """Yields the name and shape of each tensor of a model, layer by layer.

    A name with {layer} stands for a tensor in each layer, or in each layer of the range that follows the shape. A name
    with {expert} stands for a tensor of each expert.
    """
    layers_done = False
    for name, shape, *_ in config["tensors"]:
        if "{layer}" not in name:
            yield name, shape
        elif not layers_done:
            layers_done = True
            for layer in range(config["layers"]):
                yield from expand_layer(config, layer)


def expand_layer(config: State, layer: int) -> Iterator[tuple[str, list[int]]]:
    for name, shape, *limits in config["tensors"]:
        first, end = limits[0] if limits else (0, config["layers"])
        if "{layer}" in name and first <= layer < end:
            for expert in range(config["experts"] if "{expert}" in name else 1):
                yield name.replace("{layer}", str(layer)).replace("{expert}", str(expert)), shape


def cut_to_size(sizes: dict[str, int], size: int | None) -> list[str]:
    """Returns names of tensors with a total of at most `size` bytes. Keeps or drops each layer as a whole."""
    units: dict[str, list[str]] = {}
    for name in sizes:
        match = LAYER.search(name)
        units.setdefault(f"layer {match[1]}" if match else name, []).append(name)
    left = math.inf if size is None else size
    kept = []
    for unit, names in units.items():
        unit_bytes = sum(sizes[name] for name in names)
        if unit_bytes <= left:
            left -= unit_bytes
            kept.append(unit)
    layers = [unit for unit in units if unit.startswith("layer ")] or list(units)
    if not set(layers) & set(kept):
        smallest = min(sum(sizes[name] for name in units[unit]) for unit in layers)
        raise SystemExit(f"nothing fits in {size} bytes: the smallest layer has {smallest}")
    return [name for unit in kept for name in units[unit]]


def read_safetensors(folder: Path, size: int | None) -> State:
    """Reads the tensors of all files, without the safetensors library, which not every Python here has."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise SystemExit(f"there is no *.safetensors in {folder}")
    stored = {name: tensor for path in paths for name, tensor in map_safetensors(path)}
    # Clone them: otherwise the tensors are maps of the file, and their first use reads it.
    return {name: stored[name].clone() for name in cut_to_size({name: t.nbytes for name, t in stored.items()}, size)}


def map_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)[8 + length :]
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        # A part that is not aligned for its dtype is copied.
        part = data[start:end]
        dtype = DTYPES[entry["dtype"]]
        aligned = part if part.data_ptr() % dtype.itemsize == 0 else part.clone()
        yield name, aligned.view(dtype).view(entry["shape"])


def make_uniform(count: int, nbytes: int) -> State:
    normal = NormalGenerator()
    elements = nbytes // count // 2
    return {
        f"layers.{number}.weight": normal.fill(torch.empty(elements, dtype=torch.bfloat16))
        for number in range(count)
    }


def make_tiny(count: int) -> State:
    return {f"a.{number}": torch.tensor(float(number)) for number in range(count)}


def make_adamw(weights: State) -> State:
    """Returns a state dict as torch.optim.AdamW and a scheduler create it, with int keys, None and tuples."""
    normal = NormalGenerator()
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


class NormalGenerator:
    """A generator of N(0, 0.02) values at the speed of a copy. Each tensor gets different values."""

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


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        children: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for each in children:
            yield from iter_tensors(each)


def copy_structure(value: Any, *, warm: bool = True) -> Any:
    """Returns a copy with other tensors of the same shapes.

    Warm tensors are zeros in resident memory: filling them causes no page faults.
    """
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value).zero_() if warm else torch.empty_like(value)
    if isinstance(value, dict):
        return {key: copy_structure(each, warm=warm) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_structure(each, warm=warm) for each in value)
    return value


def zero_tensors(value: Any) -> None:
    """Fills all tensors with zeros, so that a check detects a get that writes nothing."""
    for tensor in iter_tensors(value):
        tensor.zero_()


def expect_same(found: Any, source: Any, path: str = "") -> None:
    """Raises an error unless both values are equal, including the types of keys and values."""
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
