"""What torch.save and torch.distributed.checkpoint have written, as .tssd files, and the way back."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import tssd
from processes import run
from same import same
from tssd.convert import load_dcp, load_torch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage")


def command(*arguments: object, code: int = 0, cwd: Path | None = None) -> str:
    """Runs `tssd convert`, for which this Python reads."""
    name = os.path.abspath(os.environ["TSSD_BIN"]) if "TSSD_BIN" in os.environ else "tssd"
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    done = subprocess.run(
        [name, "convert", *map(str, arguments)], capture_output=True, text=True, env=environment, cwd=cwd
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout + done.stderr


def state() -> dict[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(3, 6)).sum().backward()
    optimizer.step()
    weight = torch.rand(4, 6)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tied": [weight, weight, weight[1:], weight.t()],
        "parameter": torch.nn.Parameter(torch.rand(3)),
        "frozen": torch.nn.Parameter(torch.rand(3), requires_grad=False),
        "bfloat16": torch.rand(3).bfloat16(),
        "channels": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(1.5),
        "empty": [torch.zeros(0, 3), {}, [], (), OrderedDict()],
        "plain": (1, -(1 << 70), 2.5, float("nan"), True, None, "text", b"bytes", 1j, torch.Size([2, 3])),
        "large": torch.rand(300, 1000),
        3: {True: "int and bool keys", -1: None},
    }


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_of_torch_save_is_kept_whole(tmp_path: Path, is_zip: bool) -> None:
    saved, old, new = state(), tmp_path / "old.pt", tmp_path / "new.tssd"
    torch.save(saved, old, _use_new_zipfile_serialization=is_zip)
    assert "leaves" in command(old, "-o", new)
    loaded = tssd.load_file(new)
    assert same(loaded, torch.load(old, weights_only=True)) and same(loaded, saved)
    one, two, rows, columns = loaded["tied"]
    assert {each.untyped_storage().data_ptr() for each in (one, two, rows, columns)} == {one.data_ptr()}
    assert loaded["model"]._metadata == saved["model"]._metadata
    assert sorted(os.listdir(tmp_path)) == ["new.tssd", "old.pt"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torch_reads_old_files_of_two_protocols(tmp_path: Path, protocol: int) -> None:
    """Others it does not read without running what they say."""
    old, new = tmp_path / "old.pt", tmp_path / "new.tssd"
    torch.save({"a": 1}, old, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    if protocol <= 3:
        command(old, "-o", new)
        assert tssd.load_file(new) == {"a": 1}
    else:
        assert "Unsupported operand" in command(old, "-o", new, code=5)


def test_options_hold_for_what_torch_has_written(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new.tssd"
    dcp.save({"large": torch.zeros(300, 1000), "other": torch.zeros(100_000)}, checkpoint_id=old)
    said = json.loads(
        command(old, "-o", new, "--zstd-only", "large", "--digest", "--align", "4096", "--json")
    )
    assert said["raw_bytes"] == 1_600_000 and said["file_len"] == new.stat().st_size < 500_000
    assert said["file_len_before"] == sum(file.stat().st_size for file in old.iterdir())
    loaded = tssd.load_file(new)
    assert same(loaded["large"], torch.zeros(300, 1000))


def evil(marker: Path) -> Any:
    """What leaves a mark if it is unpickled without care."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    return Evil()


def test_what_is_no_tensor_container_or_plain_value_is_refused_by_name(tmp_path: Path) -> None:
    old, new = tmp_path / "old.pt", tmp_path / "new.tssd"
    for value, name in (
        (evil(tmp_path / "ran"), "mkdir"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (PurePath("x"), "pathlib.PurePosixPath"),
        (range(3), "range"),
    ):
        for is_zip in (True, False):
            torch.save({"ok": 1, "value": [value]}, old, _use_new_zipfile_serialization=is_zip)
            with pytest.raises(tssd.TssdValueError, match=f"{name} is no tensor.*add_safe_globals") as refused:
                load_torch(old)
            assert refused.value.kind == "refused" and not isinstance(refused.value, tssd.TssdCorruptError)
    said = command(old, "-o", new, code=5)
    assert "range is no tensor" in said and "help: load it in a script of your own" in said
    torch.save({"ok": 1, "value": [{1, 2}]}, old)
    said = command(old, "-o", new, code=5)
    assert "set" in said and "`value.0`" in said
    assert sorted(os.listdir(tmp_path)) == ["old.pt"]


def test_what_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "old.pt"
    torch.save([torch.ones(1)], old)
    with pytest.raises(tssd.TssdValueError, match="it holds a list, no dict; save it under a name"):
        load_torch(old)
    with pytest.warns(FutureWarning):
        traced = torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1))  # type: ignore[no-untyped-call]
        torch.jit.save(traced, old)
    with pytest.raises(tssd.TssdValueError, match="TorchScript.*state_dict"):
        load_torch(old)
    with pytest.raises(tssd.TssdFileNotFoundError):
        load_torch(tmp_path / "nowhere.pt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_is_cut_off_is_an_error(tmp_path: Path, is_zip: bool) -> None:
    old, new = tmp_path / "old.pt", tmp_path / "new.tssd"
    torch.save(state(), old, _use_new_zipfile_serialization=is_zip)
    data = old.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 100):
        old.write_bytes(data[:size])
        with pytest.raises(tssd.TssdCorruptError, match="take another copy"):
            load_torch(old)
    assert "old.pt" in command(old, "-o", new, code=1)
    assert sorted(os.listdir(tmp_path)) == ["old.pt"]


def test_modules_beside_a_checkpoint_are_not_imported(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt")
    for name in ("tssd", "torch", "json", "re"):
        (tmp_path / f"{name}.py").write_text("import os; os.mkdir('ran')")
    command("old.pt", "-o", "new.tssd", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


def as_dcp_gives_it() -> dict[str, Any]:
    """What is the same after DCP has written and built it: it has text keys, lists and no empty dicts."""
    made = state()
    model, optimizer = made["model"], made["optimizer"]
    return {
        "model": dict(model),
        "optimizer": {
            "state": {str(key): value for key, value in optimizer["state"].items()},
            "param_groups": optimizer["param_groups"],
        },
        "bfloat16": made["bfloat16"],
        "scalar": made["scalar"],
        "plain": made["plain"],
        "nested": {"list": [made["large"], [torch.ones(2), {"x": 1}]], "tensors": (torch.ones(1),)},
        "no elements": torch.zeros(0, 3),
    }


def test_a_checkpoint_of_dcp_is_what_dcp_gives(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved, old, new = as_dcp_gives_it(), tmp_path / "old", tmp_path / "new.tssd"
    dcp.save(saved, checkpoint_id=old)
    command(old, "-o", new)
    dcp_to_torch_save(old, tmp_path / "theirs.pt")
    loaded = tssd.load_file(new)
    assert same(loaded, torch.load(tmp_path / "theirs.pt", weights_only=True))
    assert same(loaded, {name: loaded_as(value) for name, value in saved.items()})


def loaded_as(value: Any) -> Any:
    return {str(key): loaded_as(each) for key, each in value.items()} if type(value) is dict else value


def test_a_checkpoint_that_was_not_flattened_is_read(tmp_path: Path) -> None:
    saved = {"a": {"b": torch.ones(3), 1: 2}, "c": torch.zeros(2, 2), "d": OrderedDict(x=torch.ones(1))}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(saved, checkpoint_id=tmp_path / "old", planner=planner)
    rebuilt = {**saved, "a": {"b": torch.ones(3), "1": 2}, "d": {"x": torch.ones(1)}}
    assert same(load_dcp(tmp_path / "old"), rebuilt)


def test_what_several_ranks_have_saved_becomes_one_file(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new.tssd"
    run("convert_ranks.py", 4, tmp_path, str(old))
    assert len(list(old.glob("__*_*.distcp"))) >= 4
    command(old, "-o", new)
    assert same(tssd.load_file(new), torch.load(tmp_path / "full.pt", weights_only=True))


def with_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Writes a checkpoint whose metadata says something else."""
    dcp.save({"w": torch.ones(4, 2), "text": "x"}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    changed = change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))


def test_metadata_that_would_run_something_does_not(tmp_path: Path) -> None:
    new = tmp_path / "new.tssd"

    def inside(metadata: Any) -> None:
        metadata.planner_data["w"] = evil(tmp_path / "ran")

    for number, change in enumerate((lambda _: evil(tmp_path / "ran"), inside)):
        folder = tmp_path / str(number) / "old"
        with_metadata(folder, change)
        with pytest.raises(tssd.TssdValueError, match=r"old/\.metadata: .*mkdir is no tensor.*not unpickled"):
            load_dcp(folder)
        assert "mkdir is no tensor" in command(folder, "-o", new, code=5)
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists(), "the test would find it"


@pytest.mark.parametrize(
    "module, name",
    [
        ("builtins", "eval"),
        ("posix", "system"),
        # What the modules of the table have imported, or torch has.
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("torch.serialization", "load"),
        ("torch", "load"),
        ("torch", "Size.__new__"),
        ("torch", "float32.__class__"),
        ("torch", "os"),
        ("pathlib", "os.system"),
        ("collections", "namedtuple"),
    ],
)
def test_metadata_may_name_nothing_but_its_own_classes(tmp_path: Path, module: str, name: str) -> None:
    with_metadata(tmp_path, lambda _: None)
    spelled = [pickle.SHORT_BINUNICODE + bytes([len(part)]) + part.encode() for part in (module, name)]
    program = b"".join([pickle.PROTO, b"\x04", *spelled, pickle.STACK_GLOBAL, pickle.STOP])
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(tssd.TssdValueError, match="is no tensor, container or plain value"):
        load_dcp(tmp_path)


def test_byte_items_that_would_run_something_do_not(tmp_path: Path) -> None:
    folder, new = tmp_path / "old", tmp_path / "new.tssd"
    dcp.save({"ok": torch.ones(1), "evil": evil(tmp_path / "ran")}, checkpoint_id=folder)
    with pytest.raises(tssd.TssdValueError, match="mkdir is no tensor.*`evil`") as refused:
        load_dcp(folder)
    assert refused.value.fqn == "evil"
    assert "mkdir is no tensor" in command(folder, "-o", new, code=5)
    assert sorted(os.listdir(tmp_path)) == ["old"]


def test_tensors_that_would_run_something_do_not(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    written = io.BytesIO()
    torch.save(evil(tmp_path / "ran"), written)

    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(written.getvalue())

    with_metadata(folder, change)
    for file in folder.glob("*.distcp"):
        file.write_bytes(written.getvalue())
    with pytest.raises(tssd.TssdValueError, match="mkdir"):
        load_dcp(folder)
    assert not (tmp_path / "ran").exists()


def test_metadata_that_lies_is_an_error(tmp_path: Path) -> None:
    def elsewhere(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../old/__0_0.distcp"

    def hole(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([3, 2])

    def nowhere(metadata: Any) -> None:
        metadata.storage_data.clear()

    def no_storage(metadata: Any) -> None:
        metadata.storage_data = 7

    def no_path(metadata: Any) -> None:
        metadata.planner_data["w"] = ()

    def no_size(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].size = None

    changes: list[tuple[Callable[[Any], Any], str]] = [
        (elsewhere, "a file elsewhere"),
        (hole, "6 elements of 8"),
        (nowhere, "KeyError"),
        (no_storage, "AttributeError"),
        (no_path, "IndexError"),
        (no_size, "AttributeError"),
        (lambda _: {"a": 1}, "a dict, no Metadata"),
    ]
    for number, (change, said) in enumerate(changes):
        folder = tmp_path / str(number)
        with_metadata(folder, change)
        with pytest.raises(tssd.TssdCorruptError, match=said):
            load_dcp(folder)

    def huge(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = torch.Size([1 << 40, 1 << 20])

    with_metadata(tmp_path / "huge", huge)
    with pytest.raises(tssd.TssdMemoryError):
        load_dcp(tmp_path / "huge")
    (tmp_path / "0" / ".metadata").write_bytes(b"")
    with pytest.raises(tssd.TssdCorruptError, match="EOFError"):
        load_dcp(tmp_path / "0")


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with_metadata(tmp_path, lambda _: None)
    (file,) = tmp_path.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(tssd.TssdCorruptError):
        load_dcp(tmp_path)
    file.unlink()
    with pytest.raises(tssd.TssdFileNotFoundError, match=file.name):
        load_dcp(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(tssd.TssdFileNotFoundError, match=r"\.metadata"):
        load_dcp(tmp_path)


def test_torch_save_there_and_back(tmp_path: Path) -> None:
    old, new, back = tmp_path / "old.pt", tmp_path / "new.tssd", tmp_path / "back.pt"
    torch.save(state(), old)
    command(old, "-o", new)
    torch.save(tssd.load_file(new), back)
    assert same(torch.load(back, weights_only=True), torch.load(old, weights_only=True))
    again = tmp_path / "again.tssd"
    command(back, "-o", again)
    assert again.read_bytes() == new.read_bytes()


def test_dcp_there_and_back(tmp_path: Path) -> None:
    old, new, back = tmp_path / "old", tmp_path / "new.tssd", tmp_path / "back"
    dcp.save(as_dcp_gives_it(), checkpoint_id=old)
    command(old, "-o", new)
    dcp.save(tssd.load_file(new), checkpoint_id=back)
    assert same(load_dcp(back), load_dcp(old))
    into: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in state()["model"].items()}}
    dcp.load(into, checkpoint_id=back)
    assert same(into["model"], dict(state()["model"]))


def test_safetensors_there_and_back(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.rand(3, 4), "b": torch.rand(5).bfloat16(), "c": torch.zeros(0, 2)}
    old, new, back = (str(tmp_path / name) for name in ("old.safetensors", "new.tssd", "back.safetensors"))
    safetensors.save_file(tensors, old, metadata={"format": "pt"})
    with tssd_of(old) as file:
        metadata = file.metadata()
    tssd.save_file(safetensors.load_file(old), new, metadata=metadata)
    assert same(dict(sorted(tssd.load_file(new).items())), tensors)
    with tssd.safe_open(new, "pt") as opened:
        safetensors.save_file(tssd.load_file(new), back, metadata=opened.metadata())
    assert Path(back).read_bytes() == Path(old).read_bytes()


def tssd_of(path: str) -> Any:
    from safetensors import safe_open

    return safe_open(path, "pt")


def test_a_conversion_ends_with_the_command_that_asked_for_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-c", "import tssd.convert; tssd.convert.main()", str(pipe), "new"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        # Once it has begun to read, which would last.
        with pipe.open("wb"):
            assert process.poll() is None
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(timeout=60) == 1
