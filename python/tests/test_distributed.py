"""Archives of DTensors that several ranks wrote.

The ranks run `file_ranks.py` over gloo. The tests read the files of the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import tssd
from equality import same
from processes import run_ranks

RANKS = 4


@pytest.fixture(scope="module")
def rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the ranks. Returns the folder of their files: `N.tssd` and `full.pt`.

    A rank exits with 0 only if all its checks hold.
    """
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("file_ranks.py", RANKS, folder)
    return folder


def as_list(value: Any) -> list[tssd.TensorShard]:
    return value if isinstance(value, list) else [value]


def test_shards_of_all_ranks_cover_the_tensor(rank_folder: Path) -> None:
    full: dict[str, torch.Tensor] = torch.load(rank_folder / "full.pt")
    files = [tssd.load_file(rank_folder / f"{rank}.tssd") for rank in range(RANKS)]
    assert len(full) > 50
    for name, expected in full.items():
        restored = torch.full_like(expected, -1)
        coverage = torch.zeros(expected.shape, dtype=torch.int32)
        for file in files:
            if name not in file:
                continue
            shard = file[name]
            slices = shard.tensor_slice if isinstance(shard.tensor_slice, list) else [shard.tensor_slice]
            reloaded = tssd.load(tssd.save({"x": shard}))["x"]
            assert reloaded.tensor_slice == shard.tensor_slice
            for part, slice_ in split_boxes(shard.local, slices):
                assert slice_.global_shape == tuple(expected.shape), name
                index = tuple(slice(o, o + n) for o, n in zip(slice_.offsets, slice_.local_shape))
                restored[index] = part
                coverage[index] += 1
        assert torch.equal(restored, expected), name
        assert (coverage > 0).all(), name


def split_boxes(
    local: torch.Tensor, slices: list[tssd.TensorSlice]
) -> list[tuple[torch.Tensor, tssd.TensorSlice]]:
    """Splits a local tensor into its boxes. In these tests, boxes differ in the first dimension only."""
    if len(slices) == 1:
        return [(local, slices[0])]
    parts = local.split([each.local_shape[0] for each in slices])
    return list(zip(parts, slices))


def test_loaded_shards_roundtrip(rank_folder: Path) -> None:
    file = tssd.load_file(rank_folder / "0.tssd")
    reloaded = tssd.load(tssd.save(file))
    for name, value in file.items():
        for one, other in zip(as_list(value), as_list(reloaded[name])):
            assert one.tensor_slice == other.tensor_slice and same(one.local, other.local)
