"""Comparison with reference implementations: torch.save, safetensors and DCP."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import tssd
from equality import same
from torch import nn


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64).to(torch.bfloat16)


def test_load_equals_torch_load(path: Path, tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": make_model().state_dict(), "step": 3, "lrs": [1e-3, (2, None)]}
    state["tied"] = state["model"]["linear1.weight"].t()
    torch.save(state, tmp_path / "x.pt")
    tssd.save_file(state, path)
    expected = torch.load(tmp_path / "x.pt")
    actual = tssd.load_file(path)
    assert same(actual, expected)
    for loaded in (actual, expected):
        weight = loaded["model"]["linear1.weight"]
        assert weight.untyped_storage().data_ptr() == loaded["tied"].untyped_storage().data_ptr()


def test_load_equals_safetensors_load(path: Path, tmp_path: Path) -> None:
    state = dict(make_model().state_dict())
    safetensors.torch.save_file(state, tmp_path / "x.safetensors", {"a": "b"})
    tssd.save_file(state, path, {"a": "b"})
    expected = safetensors.torch.load_file(tmp_path / "x.safetensors")
    actual = tssd.load_file(path)
    assert same({key: actual[key] for key in expected}, expected)
    with (
        tssd.safe_open(path, framework="pt", device="cpu") as a,
        safetensors.safe_open(tmp_path / "x.safetensors", framework="pt", device="cpu") as b,
    ):
        assert set(a.keys()) == set(b.keys())
        assert a.metadata() == b.metadata()
        for key in b.keys():
            assert same(a.get_tensor(key), b.get_tensor(key))
            a_slice, b_slice = a.get_slice(key), b.get_slice(key)
            assert a_slice.get_shape() == b_slice.get_shape()
            assert torch.equal(a_slice[2:20], b_slice[2:20])


# Indices of a tensor of shape (4, 6, 5) that safetensors accepts with torch, with numpy or with both.
SLICES = [
    *np.s_[:, ..., (), 0, 3, -4, 1:, :-1, 1:3, 2:2, :0, (1, 2), (1, 2, 3), (-1, -2, -3), (0, slice(2))],
    *np.s_[(slice(1, 3), 4), (slice(None), slice(3)), (slice(None), slice(None), slice(1, 2)), (slice(2, None), -1)],
    *np.s_[(..., 1), (0, ..., 1)],
    *np.s_[::2, 1::3, (slice(None, None, 3), slice(0, 6, 5)), (slice(0, 100), 2), 3:100],
    None, (None, 1), (1, None, slice(2)), (..., None), True, False, (True, 1), (slice(1), None, False),
    [], [0], [2, 2, 0], [-1, 1], ([0, 3], 1), ([1, 2], slice(2, 4)), ([0, 1], [2, 3], [4, 0]), (1, slice(None), [0, 2]),
    ([3, 0], ..., [4, 4]), [True, False, False, True], (slice(2), [False] * 3 + [True] * 3), [[0, 1], [2, 3]],
    range(3), ((0, 2), slice(2)),
    np.int64(1), np.int32(-2), np.uint8(3), np.array(2), (np.int16(1), slice(np.int64(1), np.int64(5))), np.True_,
    np.array([3, 1]), np.array([[0, 1], [3, 3]]), np.arange(4) > 1, (slice(None), np.arange(6) % 2 == 1),
    torch.tensor(1), torch.tensor(-1, dtype=torch.int32), (torch.tensor(2), slice(torch.tensor(1), torch.tensor(3))),
    torch.tensor([2, 0]), torch.tensor([[1], [3]]), torch.tensor([]).long(), torch.tensor([1, 2], dtype=torch.int32),
    (0, torch.tensor([5, -6])), (slice(1, 3), torch.tensor([4, 1]), 2), torch.arange(4) < 2, torch.tensor(True),
    torch.arange(120).view(4, 6, 5) % 11 == 0, (torch.arange(24).view(4, 6) > 20), (..., torch.arange(5) == 2),
    torch.tensor([0, 1, 1, 0], dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8), (None, torch.tensor([1]), 2),
    torch.tensor([1]), (torch.tensor(True), slice(1, 3)),
]  # fmt: skip

def is_int_in_safetensors(index: Any) -> bool:
    """Returns whether safetensors takes a part of an index for an int, unless it indexes a mapped file with torch.

    Such parts are bools, and tensors of one element that torch does not take for an int.
    """
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        type(part) is bool
        or isinstance(part, torch.Tensor)
        and part.numel() == 1
        and (part.ndim > 0 or part.dtype in (torch.bool, torch.uint8))
        for part in parts
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("index", SLICES, ids=lambda index: repr(index).replace("\n", ""))
def test_slice_takes_what_safetensors_takes(
    path: Path, tmp_path: Path, framework: str, backend: str, index: Any
) -> None:
    state = {"w": torch.arange(120, dtype=torch.float32).view(4, 6, 5)}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    tssd.save_file(state, path)
    whole: Any = state["w"].numpy() if framework == "np" else state["w"]
    with (
        tssd.safe_open(path, framework, backend=backend) as actual,  # type: ignore[arg-type]
        safetensors.safe_open(tmp_path / "x.safetensors", framework, backend=backend) as reference,
    ):
        part = actual.get_slice("w")
        try:
            expected = whole[index]
        except (IndexError, TypeError):
            with pytest.raises((IndexError, TypeError)):
                part[index]
            with pytest.raises((IndexError, TypeError, safetensors.SafetensorError)):
                reference.get_slice("w")[index]
            return
        assert type(part[index]) is type(whole) and part[index].dtype == whole.dtype
        assert part[index].shape == expected.shape and (part[index] == expected).all()
        if not is_int_in_safetensors(index):
            with contextlib.suppress(OverflowError, TypeError, safetensors.SafetensorError):
                assert (reference.get_slice("w")[index] == expected).all()
    with tssd.Store("memory:") as store:
        store.put_state_dict({"w": whole}, "x")
        with store.open("x") as version:
            stored = version.get_slice("w")
            assert stored.dtype == whole.dtype and stored[index].shape == expected.shape
            assert (stored[index] == expected).all()


def test_handle_has_methods_of_safetensors(path: Path, tmp_path: Path) -> None:
    state = dict(make_model().state_dict())
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    tssd.save_file(state, path)
    with (
        tssd.safe_open(path, "pt") as actual,
        safetensors.safe_open(tmp_path / "x.safetensors", "pt") as reference,
    ):
        tensors, weight = actual.get_tensors(), state["linear1.weight"]
        assert same(dict(actual), state) and list(tensors) == actual.offset_keys()
        assert same({key: tensors[key] for key in state}, state) and tensors.keys() == reference.get_tensors().keys()
        part = actual.get_slice("linear1.weight")
        assert (part.shape, part.dtype) == (weight.shape, torch.bfloat16) and same(part[[3, 1]], weight[[3, 1]])
        assert not [name for name in dir(reference) if not hasattr(actual, name)]
        assert not [name for name in dir(reference.get_slice("linear1.weight")) if not hasattr(part, name)]


@pytest.mark.filterwarnings("ignore")
def test_load_equals_dcp_load(path: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": dict(make_model().state_dict()), "step": torch.tensor(3)}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    tssd.save_file(state, path)
    expected = {"model": {key: torch.zeros_like(t) for key, t in state["model"].items()}, "step": torch.tensor(0)}
    dcp.load(expected, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert same(tssd.load_file(path), expected)


def test_readme_example_runs_any_number_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = Path(__file__).parents[2] / "README.md"
    example = "import torch" + readme.read_text().split("```python\nimport torch")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    for version in range(1, 4):
        names: dict[str, Any] = {}
        exec(example, names)
        assert torch.equal(names["row"], names["model"].weight[0])
        assert same(names["loaded"], names["state"])
        assert names["store"].head("policy").version == version
