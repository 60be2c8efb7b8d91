"""torch.distributed.checkpoint (DCP) on stores, compared with the files that DCP writes itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import tssd
from equality import same
from processes import Daemon, run_ranks
from tssd.dcp import TssdReader, TssdWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage")


def test_ranks_load_in_another_sharding(tmp_path: Path) -> None:
    run_ranks("dcp_ranks.py", 8, tmp_path, str(tmp_path / "store"))


def test_dcp_use_cases_roundtrip(tmp_path: Path) -> None:
    with Daemon(tmp_path / "socket") as url:
        run_ranks("dcp_round_trips.py", 4, tmp_path, url)


def make_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(3, 6)).sum().backward()
    optimizer.step()
    whole = torch.rand(4, 6)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "nested": {"list": [seed, torch.rand(2), {"text": f"run {seed}"}], "tuple": (seed, None)},
        "deep": {"er": {"est": seed}},
        "scalar": torch.tensor(float(seed)),
        "empty": torch.zeros(0, 3),
        "bfloat16": torch.rand(3).bfloat16(),
        "mask": torch.rand(9) > 0.5,
        "strided": whole[:, 1::2],
        "transposed": whole.t(),
        "channels": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "bytes": b"\x00\x01" * seed,
        "parameter": torch.nn.Parameter(torch.rand(3)),
    }


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "not" / "yet" / "there")


def test_load_equals_load_of_dcp_files(path: str, tmp_path: Path) -> None:
    saved, actual, expected = make_state(1), make_state(2), make_state(2)
    dcp.save(saved, storage_writer=TssdWriter(path))
    dcp.save(saved, checkpoint_id=tmp_path / "files")
    dcp.load(actual, storage_reader=TssdReader(path))
    dcp.load(expected, checkpoint_id=tmp_path / "files")
    assert same(actual, expected)
    assert same(actual["model"], saved["model"]) and actual["bytes"] == saved["bytes"]


def test_checkpoint_is_rebuilt_from_its_metadata(path: str) -> None:
    """Loads by name without tensors to fill. DCP then needs the paths in the planner data."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    saved = make_state(1)
    dcp.save(saved, storage_writer=TssdWriter(path))
    loaded = _load_state_dict_from_keys({"model", "nested"}, storage_reader=TssdReader(path))
    assert list(loaded) == ["model", "nested"]
    assert same(loaded["model"], dict(saved["model"])) and same(loaded["nested"], saved["nested"])


def test_metadata_equals_that_of_dcp_files(path: str, tmp_path: Path) -> None:
    saved = make_state(1)
    dcp.save(saved, storage_writer=TssdWriter(path))
    dcp.save(saved, checkpoint_id=tmp_path / "files")
    actual, expected = TssdReader(path).read_metadata(), dcp.FileSystemReader(tmp_path / "files").read_metadata()
    assert actual.planner_data == expected.planner_data
    assert set(actual.state_dict_metadata) == set(expected.state_dict_metadata)
    for name, entry in expected.state_dict_metadata.items():
        loaded = actual.state_dict_metadata[name]
        assert type(loaded) is type(entry), name
        if isinstance(entry, dcp.TensorStorageMetadata):
            assert isinstance(loaded, dcp.TensorStorageMetadata)
            assert (loaded.size, loaded.properties.dtype) == (entry.size, entry.properties.dtype)
            assert loaded.chunks == entry.chunks


def test_checkpoint_id_selects_store(tmp_path: Path) -> None:
    writer, reader = TssdWriter(tmp_path / "never"), TssdReader(tmp_path / "never")
    for number in (1, 2):
        path = tmp_path / str(number)
        dcp.save({"w": torch.full((2,), number)}, checkpoint_id=path, storage_writer=writer)
        assert writer.checkpoint_id == str(path)
    for number in (1, 2):
        into = {"w": torch.zeros(2, dtype=torch.int64)}
        dcp.load(into, checkpoint_id=tmp_path / str(number), storage_reader=reader)
        assert into["w"].tolist() == [number, number]
    assert not (tmp_path / "never").exists()
    for cls in (TssdWriter, TssdReader):
        assert all(cls.validate_checkpoint_id(id_) for id_ in ("unix:default", "s3://bucket/x", tmp_path / "x"))
        assert not cls.validate_checkpoint_id("http://host/x")


def test_daemon_stores_checkpoints(tmp_path: Path) -> None:
    with Daemon(tmp_path / "socket") as url:
        with pytest.raises(dcp.CheckpointException, match="in memory"):
            dcp.save(make_state(1), storage_writer=TssdWriter(url))
        dcp.save(make_state(1), storage_writer=TssdWriter(url, durability="memory"))
        into = make_state(2)
        dcp.load(into, storage_reader=TssdReader(url))
        assert same(into["model"], make_state(1)["model"])


def test_dcp_and_store_read_each_other(path: str) -> None:
    """DCP loads the tensors of a put, and a get returns the tensors of a DCP save."""
    saved = {"model": {"weight": torch.rand(3, 2), "bias": torch.rand(3)}, "step": 7}
    with tssd.Store(path) as store:
        store.put_state_dict(saved, "policy")
        into = {"model": {"weight": torch.zeros(3, 2).double(), "bias": torch.zeros(3)}}
        dcp.load(into, storage_reader=TssdReader(path, "policy"))
        assert torch.equal(into["model"]["weight"], saved["model"]["weight"].double())  # type: ignore[index]
        dcp.save(saved, storage_writer=TssdWriter(path))
        loaded = store.get_state_dict("checkpoint")
        assert same(loaded["model.weight"], saved["model"]["weight"])  # type: ignore[index]
        assert set(loaded) == {"model.weight", "model.bias", "step", ".metadata"}


def test_inspect_command_shows_checkpoint(path: str) -> None:
    dcp.save({"model": {"weight": torch.rand(3, 2)}}, storage_writer=TssdWriter(path))
    folder = next(Path(path).glob("checkpoint/*/manifest.tssd")).parent
    command = [os.environ.get("TSSD_BIN", "tssd"), "inspect", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.weight" in result.stdout and "[3, 2]" in result.stdout


def test_reader_loads_older_version_by_number(path: str) -> None:
    with tssd.Store(path) as store:
        store.retain("checkpoint", 2)
    for number in (1, 2):
        dcp.save({"w": torch.full((2,), number)}, storage_writer=TssdWriter(path))
    for version, expected in ((1, 1), (2, 2), (None, 2)):
        into = {"w": torch.zeros(2, dtype=torch.int64)}
        dcp.load(into, storage_reader=TssdReader(path, version=version))
        assert into["w"].tolist() == [expected, expected]


def test_version_is_retained_during_load(path: str) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=TssdWriter(path))

    class SaveDuringLoadPlanner(dcp.DefaultLoadPlanner):
        def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
            dcp.save({"w": torch.zeros(2), "more": 1}, storage_writer=TssdWriter(path))
            return super().finish_plan(new_plan)

    into = {"w": torch.full((2,), -1.0)}
    dcp.load(into, storage_reader=TssdReader(path), planner=SaveDuringLoadPlanner())
    assert into["w"].tolist() == [1, 1]


def test_ranks_with_different_versions_are_rejected(path: str) -> None:
    reader = TssdReader(path)
    plans = [dcp.LoadPlan([], storage_data=version) for version in (3, 4)]
    with pytest.raises(ValueError, match=r"versions \[3, 4\]"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[:1]) == plans[:1]


def test_missing_data_is_an_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="No such file or directory.*not/yet/there"):
        dcp.load(make_state(1), storage_reader=TssdReader(path))
    assert not (tmp_path / "not").exists()
    dcp.save({"w": torch.ones(2), "i": torch.ones(2, dtype=torch.int8)}, storage_writer=TssdWriter(path))
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: b"):
        dcp.load({"b": torch.ones(2)}, storage_reader=TssdReader(path))
    with pytest.raises(dcp.CheckpointException, match="key `other`: no version is visible"):
        dcp.load({"w": torch.ones(2)}, storage_reader=TssdReader(path, "other"))
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.ones(3)}, storage_reader=TssdReader(path))
    unchanged = {"w": torch.zeros(2), "i": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException, match="int8"):
        dcp.load(unchanged, storage_reader=TssdReader(path))
    assert unchanged["w"].tolist() == [0, 0]
    with pytest.raises(tssd.TssdFileNotFoundError):
        TssdReader(tmp_path / "nowhere").read_metadata()


def test_damage_is_detected(path: str) -> None:
    dcp.save({"w": torch.ones(1000)}, storage_writer=TssdWriter(path))
    archive = max(Path(path).glob("checkpoint/*/0-*.tssd"), key=lambda file: file.stat().st_size)
    archive.chmod(0o644)
    data = bytearray(archive.read_bytes())
    offset = data.index(torch.ones(4).numpy().tobytes())
    data[offset] ^= 1
    archive.write_bytes(data)
    with pytest.raises(dcp.CheckpointException, match="Corrupt"):
        dcp.load({"w": torch.zeros(1000)}, storage_reader=TssdReader(path))


def test_planners_with_plan_caching_are_rejected(path: str) -> None:
    def save(number: int) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": torch.full((2,), number)}, storage_writer=TssdWriter(path), planner=planner)

    save(1)
    with pytest.raises(dcp.CheckpointException, match="enable_plan_caching=False"):
        save(2)
    into = {"w": torch.zeros(2, dtype=torch.int64)}
    dcp.load(into, storage_reader=TssdReader(path))
    assert into["w"].tolist() == [1, 1]


def test_reserved_name_is_rejected(path: str) -> None:
    for value in (torch.ones(2), "text"):
        with pytest.raises(dcp.CheckpointException, match="another name"):
            dcp.save({"w": torch.ones(2), ".metadata": value}, storage_writer=TssdWriter(path))
    names = ["", "a\0b", "..", "a/b", "0", "deeper.metadata"]
    saved = {name: torch.full((2,), number) for number, name in enumerate(names)}
    dcp.save(saved, storage_writer=TssdWriter(path))
    into = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    dcp.load(into, storage_reader=TssdReader(path))
    assert same(into, saved)
