"""Comparison with reference implementations: torch.save, safetensors and DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.filterwarnings("ignore")
def test_load_equals_dcp_load(path: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": dict(make_model().state_dict()), "step": torch.tensor(3)}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    tssd.save_file(state, path)
    expected = {"model": {key: torch.zeros_like(t) for key, t in state["model"].items()}, "step": torch.tensor(0)}
    dcp.load(expected, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert same(tssd.load_file(path), expected)


def test_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = Path(__file__).parents[2] / "README.md"
    example = readme.read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert torch.equal(names["row"], names["model"].weight[0])
    assert same(names["loaded"], names["state"])
    assert names["store"].head("policy").version == 3
