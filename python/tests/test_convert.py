"""Conversion of files of torch.save and of DCP checkpoints to .tssd files, and back."""

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
from equality import same
from processes import run_ranks
from tssd.convert import load_dcp, load_torch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage")


def run_convert(*arguments: object, code: int = 0, cwd: Path | None = None) -> str:
    """Runs `tssd convert`, which loads checkpoints with this Python. Returns its output."""
    name = os.path.abspath(os.environ["TSSD_BIN"]) if "TSSD_BIN" in os.environ else "tssd"
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    result = subprocess.run(
        [name, "convert", *map(str, arguments)], capture_output=True, text=True, env=environment, cwd=cwd
    )
    assert result.returncode == code, (result.stdout, result.stderr)
    return result.stdout + result.stderr


def make_state() -> dict[Any, Any]:
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
def test_torch_save_file_is_converted_losslessly(tmp_path: Path, is_zip: bool) -> None:
    saved, old, new = make_state(), tmp_path / "old.pt", tmp_path / "new.tssd"
    torch.save(saved, old, _use_new_zipfile_serialization=is_zip)
    assert "leaves" in run_convert(old, "-o", new)
    loaded = tssd.load_file(new)
    assert same(loaded, torch.load(old, weights_only=True)) and same(loaded, saved)
    one, two, rows, columns = loaded["tied"]
    assert {each.untyped_storage().data_ptr() for each in (one, two, rows, columns)} == {one.data_ptr()}
    assert loaded["model"]._metadata == saved["model"]._metadata
    assert sorted(os.listdir(tmp_path)) == ["new.tssd", "old.pt"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_legacy_file_requires_pickle_protocol_2_or_3(tmp_path: Path, protocol: int) -> None:
    """torch cannot load other protocols with `weights_only=True`."""
    old, new = tmp_path / "old.pt", tmp_path / "new.tssd"
    torch.save({"a": 1}, old, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    if protocol <= 3:
        run_convert(old, "-o", new)
        assert tssd.load_file(new) == {"a": 1}
    else:
        assert "Unsupported operand" in run_convert(old, "-o", new, code=5)


def test_options_apply_to_checkpoints(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new.tssd"
    dcp.save({"large": torch.zeros(300, 1000), "other": torch.zeros(100_000)}, checkpoint_id=old)
    summary = json.loads(
        run_convert(old, "-o", new, "--codec", "zstd", "--only", "large", "--digest", "--align", "4096", "--json")
    )
    assert summary["raw_bytes"] == 1_600_000 and summary["file_len"] == new.stat().st_size < 500_000
    assert summary["file_len_before"] == sum(file.stat().st_size for file in old.iterdir())
    loaded = tssd.load_file(new)
    assert same(loaded["large"], torch.zeros(300, 1000))


def make_malicious(marker: Path) -> Any:
    """Returns an object that creates a directory when a pickle of it is loaded without restrictions."""

    class Malicious:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    return Malicious()


def test_unsupported_class_is_rejected_by_name(tmp_path: Path) -> None:
    old, new = tmp_path / "old.pt", tmp_path / "new.tssd"
    for value, name in (
        (make_malicious(tmp_path / "ran"), "mkdir"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (PurePath("x"), "pathlib.PurePosixPath"),
        (range(3), "range"),
    ):
        for is_zip in (True, False):
            torch.save({"ok": 1, "value": [value]}, old, _use_new_zipfile_serialization=is_zip)
            with pytest.raises(tssd.TssdValueError, match=f"{name} is no tensor.*add_safe_globals") as caught:
                load_torch(old)
            assert caught.value.kind == "refused" and not isinstance(caught.value, tssd.TssdCorruptError)
    output = run_convert(old, "-o", new, code=5)
    assert "range is no tensor" in output and "help: load it in a script of your own" in output
    torch.save({"ok": 1, "value": [{torch.float32}]}, old)
    output = run_convert(old, "-o", new, code=5)
    assert "cannot be a key" in output and "`value.0`" in output
    assert sorted(os.listdir(tmp_path)) == ["old.pt"]


def test_file_that_is_not_a_state_dict_is_rejected(tmp_path: Path) -> None:
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
def test_truncated_file_is_rejected(tmp_path: Path, is_zip: bool) -> None:
    old, new = tmp_path / "old.pt", tmp_path / "new.tssd"
    torch.save(make_state(), old, _use_new_zipfile_serialization=is_zip)
    data = old.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 100):
        old.write_bytes(data[:size])
        with pytest.raises(tssd.TssdCorruptError, match="take another copy"):
            load_torch(old)
    assert "old.pt" in run_convert(old, "-o", new, code=1)
    assert sorted(os.listdir(tmp_path)) == ["old.pt"]


def test_modules_next_to_checkpoint_are_not_imported(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt")
    for name in ("tssd", "torch", "json", "re"):
        (tmp_path / f"{name}.py").write_text("import os; os.mkdir('ran')")
    run_convert("old.pt", "-o", "new.tssd", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


def make_dcp_state() -> dict[str, Any]:
    """Returns a state dict that DCP restores unchanged: with text keys and lists, and without empty dicts."""
    state = make_state()
    model, optimizer = state["model"], state["optimizer"]
    return {
        "model": dict(model),
        "optimizer": {
            "state": {str(key): value for key, value in optimizer["state"].items()},
            "param_groups": optimizer["param_groups"],
        },
        "bfloat16": state["bfloat16"],
        "scalar": state["scalar"],
        "plain": state["plain"],
        "nested": {"list": [state["large"], [torch.ones(2), {"x": 1}]], "tensors": (torch.ones(1),)},
        "no elements": torch.zeros(0, 3),
    }


def test_dcp_checkpoint_is_converted_like_dcp_to_torch_save(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved, old, new = make_dcp_state(), tmp_path / "old", tmp_path / "new.tssd"
    dcp.save(saved, checkpoint_id=old)
    run_convert(old, "-o", new)
    dcp_to_torch_save(old, tmp_path / "theirs.pt")
    loaded = tssd.load_file(new)
    assert same(loaded, torch.load(tmp_path / "theirs.pt", weights_only=True))
    assert same(loaded, {name: with_text_keys(value) for name, value in saved.items()})


def with_text_keys(value: Any) -> Any:
    return {str(key): with_text_keys(each) for key, each in value.items()} if type(value) is dict else value


def test_unflattened_dcp_checkpoint_is_loaded(tmp_path: Path) -> None:
    saved = {"a": {"b": torch.ones(3), 1: 2}, "c": torch.zeros(2, 2), "d": OrderedDict(x=torch.ones(1))}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(saved, checkpoint_id=tmp_path / "old", planner=planner)
    expected = {**saved, "a": {"b": torch.ones(3), "1": 2}, "d": {"x": torch.ones(1)}}
    assert same(load_dcp(tmp_path / "old"), expected)


def test_checkpoint_of_several_ranks_becomes_one_file(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new.tssd"
    run_ranks("convert_ranks.py", 4, tmp_path, str(old))
    assert len(list(old.glob("__*_*.distcp"))) >= 4
    run_convert(old, "-o", new)
    assert same(tssd.load_file(new), torch.load(tmp_path / "full.pt", weights_only=True))


def write_checkpoint_with_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Writes a DCP checkpoint and applies a change to its metadata."""
    dcp.save({"w": torch.ones(4, 2), "text": "x"}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    changed = change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))


def test_malicious_metadata_is_not_executed(tmp_path: Path) -> None:
    new = tmp_path / "new.tssd"

    def insert_malicious(metadata: Any) -> None:
        metadata.planner_data["w"] = make_malicious(tmp_path / "ran")

    for number, change in enumerate((lambda _: make_malicious(tmp_path / "ran"), insert_malicious)):
        folder = tmp_path / str(number) / "old"
        write_checkpoint_with_metadata(folder, change)
        with pytest.raises(tssd.TssdValueError, match=r"old/\.metadata: .*mkdir is no tensor.*not unpickled"):
            load_dcp(folder)
        assert "mkdir is no tensor" in run_convert(folder, "-o", new, code=5)
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists(), "the test would find it"


@pytest.mark.parametrize(
    "module, name",
    [
        ("builtins", "eval"),
        ("posix", "system"),
        # Names that the permitted modules import, or that torch has.
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
def test_metadata_with_foreign_names_is_rejected(tmp_path: Path, module: str, name: str) -> None:
    write_checkpoint_with_metadata(tmp_path, lambda _: None)
    operands = [pickle.SHORT_BINUNICODE + bytes([len(part)]) + part.encode() for part in (module, name)]
    program = b"".join([pickle.PROTO, b"\x04", *operands, pickle.STACK_GLOBAL, pickle.STOP])
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(tssd.TssdValueError, match="is no tensor, container or plain value"):
        load_dcp(tmp_path)


def test_malicious_byte_item_is_not_executed(tmp_path: Path) -> None:
    folder, new = tmp_path / "old", tmp_path / "new.tssd"
    dcp.save({"ok": torch.ones(1), "evil": make_malicious(tmp_path / "ran")}, checkpoint_id=folder)
    with pytest.raises(tssd.TssdValueError, match="mkdir is no tensor.*`evil`") as caught:
        load_dcp(folder)
    assert caught.value.fqn == "evil"
    assert "mkdir is no tensor" in run_convert(folder, "-o", new, code=5)
    assert sorted(os.listdir(tmp_path)) == ["old"]


def test_malicious_tensor_data_is_not_executed(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    written = io.BytesIO()
    torch.save(make_malicious(tmp_path / "ran"), written)

    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(written.getvalue())

    write_checkpoint_with_metadata(folder, change)
    for file in folder.glob("*.distcp"):
        file.write_bytes(written.getvalue())
    with pytest.raises(tssd.TssdValueError, match="mkdir"):
        load_dcp(folder)
    assert not (tmp_path / "ran").exists()


def test_inconsistent_metadata_is_rejected(tmp_path: Path) -> None:
    def set_outside_path(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../old/__0_0.distcp"

    def shrink_chunk(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([3, 2])

    def clear_storage(metadata: Any) -> None:
        metadata.storage_data.clear()

    def set_invalid_storage(metadata: Any) -> None:
        metadata.storage_data = 7

    def clear_path(metadata: Any) -> None:
        metadata.planner_data["w"] = ()

    def clear_size(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].size = None

    changes: list[tuple[Callable[[Any], Any], str]] = [
        (set_outside_path, "a file elsewhere"),
        (shrink_chunk, "6 elements of 8"),
        (clear_storage, "KeyError"),
        (set_invalid_storage, "AttributeError"),
        (clear_path, "IndexError"),
        (clear_size, "AttributeError"),
        (lambda _: {"a": 1}, "a dict, no Metadata"),
    ]
    for number, (change, message) in enumerate(changes):
        folder = tmp_path / str(number)
        write_checkpoint_with_metadata(folder, change)
        with pytest.raises(tssd.TssdCorruptError, match=message):
            load_dcp(folder)

    def set_huge_size(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = torch.Size([1 << 40, 1 << 20])

    write_checkpoint_with_metadata(tmp_path / "huge", set_huge_size)
    with pytest.raises(tssd.TssdMemoryError):
        load_dcp(tmp_path / "huge")
    (tmp_path / "0" / ".metadata").write_bytes(b"")
    with pytest.raises(tssd.TssdCorruptError, match="EOFError"):
        load_dcp(tmp_path / "0")


def test_error_names_missing_file(tmp_path: Path) -> None:
    write_checkpoint_with_metadata(tmp_path, lambda _: None)
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


def test_torch_save_file_roundtrips(tmp_path: Path) -> None:
    old, new, back = tmp_path / "old.pt", tmp_path / "new.tssd", tmp_path / "back.pt"
    torch.save(make_state(), old)
    run_convert(old, "-o", new)
    torch.save(tssd.load_file(new), back)
    assert same(torch.load(back, weights_only=True), torch.load(old, weights_only=True))
    reconverted = tmp_path / "again.tssd"
    run_convert(back, "-o", reconverted)
    assert reconverted.read_bytes() == new.read_bytes()


def test_dcp_checkpoint_roundtrips(tmp_path: Path) -> None:
    old, new, back = tmp_path / "old", tmp_path / "new.tssd", tmp_path / "back"
    dcp.save(make_dcp_state(), checkpoint_id=old)
    run_convert(old, "-o", new)
    dcp.save(tssd.load_file(new), checkpoint_id=back)
    assert same(load_dcp(back), load_dcp(old))
    into: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in make_state()["model"].items()}}
    dcp.load(into, checkpoint_id=back)
    assert same(into["model"], dict(make_state()["model"]))


def test_safetensors_file_roundtrips(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.rand(3, 4), "b": torch.rand(5).bfloat16(), "c": torch.zeros(0, 2)}
    old, new, back = (str(tmp_path / name) for name in ("old.safetensors", "new.tssd", "back.safetensors"))
    safetensors.save_file(tensors, old, metadata={"format": "pt"})
    with open_safetensors(old) as file:
        metadata = file.metadata()
    tssd.save_file(safetensors.load_file(old), new, metadata=metadata)
    assert same(dict(sorted(tssd.load_file(new).items())), tensors)
    with tssd.safe_open(new, "pt") as opened:
        safetensors.save_file(tssd.load_file(new), back, metadata=opened.metadata())
    assert Path(back).read_bytes() == Path(old).read_bytes()


def open_safetensors(path: str) -> Any:
    from safetensors import safe_open

    return safe_open(path, "pt")


def test_conversion_exits_when_stdin_is_closed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    arguments = [sys.executable, "-c", "import tssd.convert; tssd.convert.main()", str(pipe), "new"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
        # The open returns once the conversion reads the pipe. That read would block.
        with pipe.open("wb"):
            assert process.poll() is None
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(timeout=60) == 1
