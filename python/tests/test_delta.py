"""Deltas: made, applied, loaded and folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import tssd
import tssd.delta
from equality import same


def make_versions(count: int) -> list[dict[str, Any]]:
    """Returns versions of a model that AdamW trains."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    versions = []
    for step in range(count):
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        weights = {name: tensor.bfloat16() for name, tensor in state.items() if tensor.is_floating_point()}
        versions.append({"weights": weights, "exact": state, "step": step, "name": "run"})
        model(torch.rand(8, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return versions


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.tssd" for number in range(4)]
    for number, (path, version) in enumerate(zip(paths, make_versions(4), strict=True)):
        tssd.save_file(version, path, digest="blake3" if number % 2 else None)
    return paths


@pytest.mark.parametrize("classes", [1, 2, 4, "auto"])
def test_apply_gives_the_new_version(files: list[Path], tmp_path: Path, classes: Any) -> None:
    delta, again = tmp_path / "delta.tssd", tmp_path / "again.tssd"
    report = tssd.delta.make(files[0], files[1], delta, classes=classes)
    assert report.file_len == delta.stat().st_size
    assert report.listed_elements + report.dense_elements > 0
    expected = tssd.load_file(files[1])
    tssd.delta.apply(files[0], delta, again)
    assert same(tssd.load_file(again), expected)
    tssd.delta.apply(files[0], delta, again, compression="planes")
    assert same(tssd.load_file(again), expected)
    assert same(tssd.delta.load(files[0], delta), expected)
    tssd.verify(delta)


def test_fold_gives_one_delta(files: list[Path], tmp_path: Path) -> None:
    deltas = [tmp_path / f"{number}-{number + 1}.tssd" for number in range(3)]
    for delta, base, result in zip(deltas, files, files[1:], strict=False):
        tssd.delta.make(base, result, delta)
    folded = tmp_path / "folded.tssd"
    assert tssd.delta.fold(deltas, folded) == folded.stat().st_size
    assert same(tssd.delta.load(files[0], folded), tssd.load_file(files[3]))
    with pytest.raises(tssd.TssdValueError, match="does not continue"):
        tssd.delta.fold([deltas[0], deltas[2]], folded)
    with pytest.raises(TypeError, match="not one path"):
        tssd.delta.fold(str(deltas[0]), folded)
    for few in ([], deltas[:1]):
        with pytest.raises(ValueError, match="two deltas or more"):
            tssd.delta.fold(few, folded)


def test_wrong_bases_are_refused(files: list[Path], tmp_path: Path) -> None:
    delta, out = tmp_path / "delta.tssd", tmp_path / "out.tssd"
    tssd.delta.make(files[0], files[1], delta)
    with pytest.raises(tssd.TssdValueError, match="content") as refused:
        tssd.delta.apply(files[2], delta, out)
    assert refused.value.kind == "WrongBase"
    with pytest.raises(tssd.TssdValueError, match="no delta"):
        tssd.delta.apply(files[0], files[1], out)
    with pytest.raises(tssd.TssdValueError, match="no delta"):
        tssd.delta.fold([files[0], delta], out)
    assert not out.exists()
    # The base is the result already: it has no digests in one case.
    for number in (0, 1):
        tssd.delta.make(files[1 - number], files[number], delta)
        tssd.delta.apply(files[number], delta, out)
        assert same(tssd.load_file(out), tssd.load_file(files[number]))
    tssd.delta.make(files[0], files[1], delta)
    with pytest.raises(tssd.TssdValueError, match="base is not open") as refused:
        tssd.load_file(delta)
    assert refused.value.kind == "BaseMissing"


def test_damage_is_found(files: list[Path], tmp_path: Path) -> None:
    delta, out = tmp_path / "delta.tssd", tmp_path / "out.tssd"
    tssd.delta.make(files[1], files[2], delta)
    for path in (files[1], delta):
        damaged = bytearray(path.read_bytes())
        damaged[4096 + 100] ^= 1
        copy = tmp_path / f"damaged-{path.name}"
        copy.write_bytes(damaged)
        base, chosen = (copy, delta) if path == files[1] else (files[1], copy)
        with pytest.raises(tssd.TssdCorruptError):
            tssd.delta.apply(base, chosen, out)
        assert not out.exists()


def test_arguments_and_paths_are_checked(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="classes is 1, 2, 4"):
        tssd.delta.make(files[0], files[1], tmp_path / "out.tssd", classes=3)  # type: ignore[arg-type]
    with pytest.raises(tssd.TssdFileNotFoundError):
        tssd.delta.make(tmp_path / "none.tssd", files[1], tmp_path / "out.tssd")
