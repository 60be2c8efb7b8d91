"""Compares the regions that Rust computed for placements with what torch itself splits off.

Usage: python geometry.py CASES.json

CASES.json is a list of {"global_shape", "mesh_shape", "coordinates", "placements", "regions"}, with
placements spelled ["R"], ["S", dim] or ["SS", dim, split_factor], and regions as pairs of offsets
and shape, in the order in which the local tensor stores them. The test `write_torch_cases` (ignored
by default) writes it to the path in TSSD_TORCH_CASES.

Exits 0 if all cases agree, 1 if one does not, 2 if there was nothing to compare.
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
    offsets_of_torch = 0
    passed = failed = 0
    for case in cases:
        problem, compared_offsets = check(case)
        offsets_of_torch += compared_offsets
        if problem is None:
            passed += 1
            continue
        failed += 1
        if failed <= MAX_REPORTED:
            print(f"{problem}\n    {json.dumps(case)}")
    print(f"torch {torch.__version__}: {offsets_of_torch} cases compared with its offsets as well")
    print(f"{passed} passed, {failed} failed")
    if passed + failed == 0:
        return 2
    return 1 if failed else 0


def check(case: dict) -> tuple[str | None, bool]:
    """What is wrong with a case, if anything, and whether torch's offset was compared too."""
    global_shape = case["global_shape"]
    placements = [placement(spelled) for spelled in case["placements"]]
    local = split(global_shape, case["mesh_shape"], case["coordinates"], placements)
    regions = case["regions"]

    ours, our_shape = local_tensor(global_shape, regions)
    if our_shape != list(local.shape):
        return f"local shape {our_shape}, torch splits off {list(local.shape)}", False
    if not torch.equal(ours, local):
        return f"indices {ours.tolist()}, torch splits off {local.tolist()}", False

    expected = torch_shape_and_offset(
        global_shape, case["mesh_shape"], case["coordinates"], placements
    )
    if expected is None or len(regions) != 1:
        return None, False
    offset, shape = regions[0]
    if (shape, offset) != expected:
        return f"shape and offset {(shape, offset)}, torch has {expected}", True
    return None, True


def placement(spelled: list):
    match spelled:
        case ["R"]:
            return Replicate()
        case ["S", dim]:
            return Shard(dim)
        case ["SS", dim, split_factor]:
            return _StridedShard(dim, split_factor=split_factor)
    raise ValueError(f"unknown placement {spelled}")


def split(global_shape, mesh_shape, coordinates, placements) -> torch.Tensor:
    """The local shard of a tensor of global indices, split per mesh dimension by torch."""
    local = global_indices(global_shape)
    for place, parts, part in zip(placements, mesh_shape, coordinates, strict=True):
        if not isinstance(place, Replicate):
            shards, _ = place._split_tensor(local, parts, with_padding=False, contiguous=True)
            local = shards[part]
    return local


def local_tensor(global_shape: list, regions: list) -> tuple[torch.Tensor, list]:
    """The local tensor that regions in storage order make: they are the product of the ranges that
    occur in each dimension."""
    ranges = [
        list(dict.fromkeys((offset[dim], shape[dim]) for offset, shape in regions))
        for dim in range(len(global_shape))
    ]
    product = itertools.product(*ranges)
    if [[list(column) for column in zip(*box)] or [[], []] for box in product] != regions:
        raise ValueError(f"regions are no product in storage order: {regions}")
    local = global_indices(global_shape)
    for dim, runs in enumerate(ranges):
        indices = [index for start, size in runs for index in range(start, start + size)]
        local = local.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return local, list(local.shape)


def global_indices(global_shape: list) -> torch.Tensor:
    return torch.arange(torch.Size(global_shape).numel()).reshape(global_shape)


def torch_shape_and_offset(global_shape, mesh_shape, coordinates, placements):
    """What `compute_local_shape_and_global_offset` says, or None where this torch cannot say it.

    The public function wants a process group; what it calls takes plain values from torch 2.6 on.
    Until the version that walks `_StridedShard` index by index, it refuses or only approximates a
    strided shard."""
    compute = getattr(_utils, "_compute_local_shape_and_global_offset", None)
    if compute is None:
        return None
    strided = any(isinstance(place, _StridedShard) for place in placements)
    if strided and not hasattr(_utils, "_get_shard_size_and_offsets"):
        return None
    count = len(inspect.signature(compute).parameters)
    assert count >= 4, f"unknown signature of {compute}"
    shape, offset = compute(tuple(global_shape), tuple(mesh_shape), list(coordinates), placements)
    return list(shape), list(offset)


if __name__ == "__main__":
    sys.exit(main())
