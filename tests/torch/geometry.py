"""Compares the regions that Rust computed for placements with the shards of torch.

Usage: python geometry.py CASES.json

CASES.json is a list of {"global_shape", "mesh_shape", "coordinates", "placements", "regions"}, with
placements spelled ["R"], ["S", dim] or ["SS", dim, split_factor], and regions as pairs of offsets
and shape, in the order in which the local tensor stores them. The test `write_torch_cases` (ignored
by default) writes it to the path in TSSD_TORCH_CASES.

Exits with 0 if all cases agree, with 1 if one differs, and with 2 if there are no cases.
"""

import inspect
import itertools
import json
import sys

import torch
from torch.distributed.tensor import Replicate, Shard, _utils
from torch.distributed.tensor.placement_types import _StridedShard

MAX_REPORTED = 20


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with open(sys.argv[1], encoding="utf-8") as file:
        cases = json.load(file)
    offset_comparisons = 0
    passed = failed = 0
    for case in cases:
        problem, compared_offsets = check(case)
        offset_comparisons += compared_offsets
        if problem is None:
            passed += 1
            continue
        failed += 1
        if failed <= MAX_REPORTED:
            print(f"{problem}\n    {json.dumps(case)}")
    print(f"torch {torch.__version__}: {offset_comparisons} cases compared with its offsets as well")
    print(f"{passed} passed, {failed} failed")
    if passed + failed == 0:
        return 2
    return 1 if failed else 0


def check(case: dict) -> tuple[str | None, bool]:
    """Returns the problem of a case, or None, and whether the offset of torch was compared, too."""
    global_shape = case["global_shape"]
    placements = [parse_placement(encoded) for encoded in case["placements"]]
    local = split(global_shape, case["mesh_shape"], case["coordinates"], placements)
    regions = case["regions"]

    actual, actual_shape = make_local_tensor(global_shape, regions)
    if actual_shape != list(local.shape):
        return f"local shape {actual_shape}, torch splits off {list(local.shape)}", False
    if not torch.equal(actual, local):
        return f"indices {actual.tolist()}, torch splits off {local.tolist()}", False

    expected = torch_shape_and_offset(
        global_shape, case["mesh_shape"], case["coordinates"], placements
    )
    if expected is None or len(regions) != 1:
        return None, False
    offset, shape = regions[0]
    if (shape, offset) != expected:
        return f"shape and offset {(shape, offset)}, torch has {expected}", True
    return None, True


def parse_placement(encoded: list):
    match encoded:
        case ["R"]:
            return Replicate()
        case ["S", dim]:
            return Shard(dim)
        case ["SS", dim, split_factor]:
            return _StridedShard(dim, split_factor=split_factor)
    raise ValueError(f"unknown placement {encoded}")


def split(global_shape, mesh_shape, coordinates, placements) -> torch.Tensor:
    """Returns the local shard of a tensor of global indices, which torch splits per mesh dimension."""
    local = make_global_indices(global_shape)
    for placement, parts, part in zip(placements, mesh_shape, coordinates, strict=True):
        if not isinstance(placement, Replicate):
            shards, _ = placement._split_tensor(local, parts, with_padding=False, contiguous=True)
            local = shards[part]
    return local


def make_local_tensor(global_shape: list, regions: list) -> tuple[torch.Tensor, list]:
    """Returns the local tensor of regions in storage order, and its shape.

    The regions are the product of the ranges that occur in each dimension.
    """
    ranges = [
        list(dict.fromkeys((offset[dim], shape[dim]) for offset, shape in regions))
        for dim in range(len(global_shape))
    ]
    boxes = itertools.product(*ranges)
    if [[list(column) for column in zip(*box)] or [[], []] for box in boxes] != regions:
        raise ValueError(f"regions are no product in storage order: {regions}")
    local = make_global_indices(global_shape)
    for dim, dim_ranges in enumerate(ranges):
        indices = [index for start, size in dim_ranges for index in range(start, start + size)]
        local = local.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return local, list(local.shape)


def make_global_indices(global_shape: list) -> torch.Tensor:
    return torch.arange(torch.Size(global_shape).numel()).reshape(global_shape)


def torch_shape_and_offset(global_shape, mesh_shape, coordinates, placements):
    """Returns what `compute_local_shape_and_global_offset` would, or None if this torch cannot.

    The public function needs a process group. Since torch 2.6, it calls a private function that takes
    plain values. Versions that do not compute the indices of `_StridedShard` one by one reject or
    approximate a strided shard.
    """
    compute = getattr(_utils, "_compute_local_shape_and_global_offset", None)
    if compute is None:
        return None
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    if strided and not hasattr(_utils, "_get_shard_size_and_offsets"):
        return None
    count = len(inspect.signature(compute).parameters)
    assert count >= 4, f"unknown signature of {compute}"
    shape, offset = compute(tuple(global_shape), tuple(mesh_shape), list(coordinates), placements)
    return list(shape), list(offset)


if __name__ == "__main__":
    sys.exit(main())
