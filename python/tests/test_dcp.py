"""torch.distributed.checkpoint in stores, beside its own files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import tssd
from processes import run
from same import same
from test_store import daemon
from tssd.dcp import TssdReader, TssdWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage")


def test_what_ranks_save_others_load_in_their_sharding(tmp_path: Path) -> None:
    run("dcp_ranks.py", 8, tmp_path, str(tmp_path / "store"))


def test_what_users_of_dcp_save_and_load(tmp_path: Path) -> None:
    with daemon(tmp_path / "socket") as url:
        run("dcp_round_trips.py", 4, tmp_path, url)


def state(seed: int) -> dict[str, Any]:
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


def test_one_process_loads_what_its_own_files_would_give(path: str, tmp_path: Path) -> None:
    saved, mine, theirs = state(1), state(2), state(2)
    dcp.save(saved, storage_writer=TssdWriter(path))
    dcp.save(saved, checkpoint_id=tmp_path / "files")
    dcp.load(mine, storage_reader=TssdReader(path))
    dcp.load(theirs, checkpoint_id=tmp_path / "files")
    assert same(mine, theirs)
    assert same(mine["model"], saved["model"]) and mine["bytes"] == saved["bytes"]


def test_a_checkpoint_is_built_from_its_metadata(path: str) -> None:
    """Without tensors to fill, which takes the paths that the planner noted."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    saved = state(1)
    dcp.save(saved, storage_writer=TssdWriter(path))
    found = _load_state_dict_from_keys({"model", "nested"}, storage_reader=TssdReader(path))
    assert list(found) == ["model", "nested"]
    assert same(found["model"], dict(saved["model"])) and same(found["nested"], saved["nested"])


def test_metadata_is_that_of_dcp_but_for_chunks(path: str, tmp_path: Path) -> None:
    saved = state(1)
    dcp.save(saved, storage_writer=TssdWriter(path))
    dcp.save(saved, checkpoint_id=tmp_path / "files")
    mine, theirs = TssdReader(path).read_metadata(), dcp.FileSystemReader(tmp_path / "files").read_metadata()
    assert mine.planner_data == theirs.planner_data
    assert set(mine.state_dict_metadata) == set(theirs.state_dict_metadata)
    for name, entry in theirs.state_dict_metadata.items():
        found = mine.state_dict_metadata[name]
        assert type(found) is type(entry), name
        if isinstance(entry, dcp.TensorStorageMetadata):
            assert isinstance(found, dcp.TensorStorageMetadata)
            assert (found.size, found.properties.dtype) == (entry.size, entry.properties.dtype)
            assert found.chunks == entry.chunks


def test_checkpoint_ids_say_where(tmp_path: Path) -> None:
    writer, reader = TssdWriter(tmp_path / "never"), TssdReader(tmp_path / "never")
    for number in (1, 2):
        where = tmp_path / str(number)
        dcp.save({"w": torch.full((2,), number)}, checkpoint_id=where, storage_writer=writer)
        assert writer.checkpoint_id == str(where)
    for number in (1, 2):
        into = {"w": torch.zeros(2, dtype=torch.int64)}
        dcp.load(into, checkpoint_id=tmp_path / str(number), storage_reader=reader)
        assert into["w"].tolist() == [number, number]
    assert not (tmp_path / "never").exists()
    for place in (TssdWriter, TssdReader):
        assert all(place.validate_checkpoint_id(it) for it in ("unix:default", "s3://bucket/x", tmp_path / "x"))
        assert not place.validate_checkpoint_id("http://host/x")


def test_a_daemon_has_checkpoints(tmp_path: Path) -> None:
    with daemon(tmp_path / "socket") as url:
        with pytest.raises(dcp.CheckpointException, match="in memory"):
            dcp.save(state(1), storage_writer=TssdWriter(url))
        dcp.save(state(1), storage_writer=TssdWriter(url, durability="memory"))
        into = state(2)
        dcp.load(into, storage_reader=TssdReader(url))
        assert same(into["model"], state(1)["model"])


def test_what_a_store_has_dcp_loads(path: str) -> None:
    """Tensors of a put; and the other way round."""
    saved = {"model": {"weight": torch.rand(3, 2), "bias": torch.rand(3)}, "step": 7}
    with tssd.Store(path) as store:
        store.put_state_dict(saved, "policy")
        into = {"model": {"weight": torch.zeros(3, 2).double(), "bias": torch.zeros(3)}}
        dcp.load(into, storage_reader=TssdReader(path, "policy"))
        assert torch.equal(into["model"]["weight"], saved["model"]["weight"].double())  # type: ignore[index]
        dcp.save(saved, storage_writer=TssdWriter(path))
        found = store.get_state_dict("checkpoint")
        assert same(found["model.weight"], saved["model"]["weight"])  # type: ignore[index]
        assert set(found) == {"model.weight", "model.bias", "step", ".metadata"}


def test_the_command_shows_it(path: str) -> None:
    dcp.save({"model": {"weight": torch.rand(3, 2)}}, storage_writer=TssdWriter(path))
    folder = next(Path(path).glob("checkpoint/*/manifest.tssd")).parent
    command = [os.environ.get("TSSD_BIN", "tssd"), "inspect", str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.weight" in shown.stdout and "[3, 2]" in shown.stdout


def test_an_older_version_is_read_by_its_number(path: str) -> None:
    with tssd.Store(path) as store:
        store.retain("checkpoint", 2)
    for number in (1, 2):
        dcp.save({"w": torch.full((2,), number)}, storage_writer=TssdWriter(path))
    for version, wanted in ((1, 1), (2, 2), (None, 2)):
        into = {"w": torch.zeros(2, dtype=torch.int64)}
        dcp.load(into, storage_reader=TssdReader(path, version=version))
        assert into["w"].tolist() == [wanted, wanted]


def test_a_version_that_is_read_stays(path: str) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=TssdWriter(path))

    class Overtaken(dcp.DefaultLoadPlanner):
        def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
            dcp.save({"w": torch.zeros(2), "more": 1}, storage_writer=TssdWriter(path))
            return super().finish_plan(new_plan)

    into = {"w": torch.full((2,), -1.0)}
    dcp.load(into, storage_reader=TssdReader(path), planner=Overtaken())
    assert into["w"].tolist() == [1, 1]


def test_ranks_that_opened_different_versions_are_refused(path: str) -> None:
    reader = TssdReader(path)
    plans = [dcp.LoadPlan([], storage_data=version) for version in (3, 4)]
    with pytest.raises(ValueError, match=r"versions \[3, 4\]"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[:1]) == plans[:1]


def test_what_is_not_there_is_an_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="No such file or directory.*not/yet/there"):
        dcp.load(state(1), storage_reader=TssdReader(path))
    assert not (tmp_path / "not").exists()
    dcp.save({"w": torch.ones(2), "i": torch.ones(2, dtype=torch.int8)}, storage_writer=TssdWriter(path))
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: b"):
        dcp.load({"b": torch.ones(2)}, storage_reader=TssdReader(path))
    with pytest.raises(dcp.CheckpointException, match="key `other`: no version is visible"):
        dcp.load({"w": torch.ones(2)}, storage_reader=TssdReader(path, "other"))
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.ones(3)}, storage_reader=TssdReader(path))
    untouched = {"w": torch.zeros(2), "i": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException, match="int8"):
        dcp.load(untouched, storage_reader=TssdReader(path))
    assert untouched["w"].tolist() == [0, 0]
    with pytest.raises(tssd.TssdFileNotFoundError):
        TssdReader(tmp_path / "nowhere").read_metadata()


def test_damage_is_found(path: str) -> None:
    dcp.save({"w": torch.ones(1000)}, storage_writer=TssdWriter(path))
    archive = max(Path(path).glob("checkpoint/*/0-*.tssd"), key=lambda file: file.stat().st_size)
    archive.chmod(0o644)
    data = bytearray(archive.read_bytes())
    at = data.index(torch.ones(4).numpy().tobytes())
    data[at] ^= 1
    archive.write_bytes(data)
    with pytest.raises(dcp.CheckpointException, match="Corrupt"):
        dcp.load({"w": torch.zeros(1000)}, storage_reader=TssdReader(path))


def test_planners_that_keep_their_plans_are_refused(path: str) -> None:
    def save(number: int) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": torch.full((2,), number)}, storage_writer=TssdWriter(path), planner=planner)

    save(1)
    with pytest.raises(dcp.CheckpointException, match="enable_plan_caching=False"):
        save(2)
    into = {"w": torch.zeros(2, dtype=torch.int64)}
    dcp.load(into, storage_reader=TssdReader(path))
    assert into["w"].tolist() == [1, 1]


def test_the_one_name_that_is_taken_is_refused(path: str) -> None:
    for value in (torch.ones(2), "text"):
        with pytest.raises(dcp.CheckpointException, match="another name"):
            dcp.save({"w": torch.ones(2), ".metadata": value}, storage_writer=TssdWriter(path))
    names = ["", "a\0b", "..", "a/b", "0", "deeper.metadata"]
    saved = {name: torch.full((2,), number) for number, name in enumerate(names)}
    dcp.save(saved, storage_writer=TssdWriter(path))
    into = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    dcp.load(into, storage_reader=TssdReader(path))
    assert same(into, saved)
