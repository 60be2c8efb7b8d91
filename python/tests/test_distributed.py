"""DTensors of several processes, over gloo. The ranks run `ranks.py`; what they wrote is looked at here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import tssd
from processes import run
from same import same

RANKS = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks wrote: `N.tssd` and `full.pt`. That they exit with 0 says that all checks held."""
    folder = tmp_path_factory.mktemp("ranks")
    run("ranks.py", RANKS, folder)
    return folder


def shards(value: Any) -> list[tssd.TensorShard]:
    return value if isinstance(value, list) else [value]


def test_the_shards_of_all_ranks_are_the_tensor(written: Path) -> None:
    full: dict[str, torch.Tensor] = torch.load(written / "full.pt")
    files = [tssd.load_file(written / f"{rank}.tssd") for rank in range(RANKS)]
    assert len(full) > 50
    for name, wanted in full.items():
        found = torch.full_like(wanted, -1)
        seen = torch.zeros(wanted.shape, dtype=torch.int32)
        for file in files:
            if name not in file:
                continue
            shard = file[name]
            slices = shard.tensor_slice if isinstance(shard.tensor_slice, list) else [shard.tensor_slice]
            grid = tssd.load(tssd.save({"x": shard}))["x"]
            assert grid.tensor_slice == shard.tensor_slice
            for part, slice_ in boxes(shard.local, slices):
                assert slice_.global_shape == tuple(wanted.shape), name
                index = tuple(slice(o, o + n) for o, n in zip(slice_.offsets, slice_.local_shape))
                found[index] = part
                seen[index] += 1
        assert torch.equal(found, wanted), name
        assert (seen > 0).all(), name


def boxes(
    local: torch.Tensor, slices: list[tssd.TensorSlice]
) -> list[tuple[torch.Tensor, tssd.TensorSlice]]:
    """A local tensor cut along its first dimension, in which alone these tests have several boxes."""
    if len(slices) == 1:
        return [(local, slices[0])]
    parts = local.split([each.local_shape[0] for each in slices])
    return list(zip(parts, slices))


def test_equal_shards_are_equal_files(written: Path) -> None:
    file = tssd.load_file(written / "0.tssd")
    again = tssd.load(tssd.save(file))
    for name, value in file.items():
        for one, other in zip(shards(value), shards(again[name])):
            assert one.tensor_slice == other.tensor_slice and same(one.local, other.local)
