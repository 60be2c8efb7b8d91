"""Files beside those of others: save and load of one state dict, in turns.

Usage: python bench/files.py [--mb 512] [--tensors 340] [--rounds 9] [--folder DIR]

Each save makes a new file; on the disk means that it is there when the save returns, else nobody waits for
it. A load counts until one thread has touched one byte of each page; ours proves all checksums.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
import tssd
from race import Runner, State, described, expect_same, model, options, race, size, timed
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp


class Files:
    """The same state dict in the files of all."""

    def __init__(self, folder: Path, state: State, rounds: int) -> None:
        self.folder, self.state, self.rounds = folder, state, rounds
        self.what = f"{described(state)}, {torch.get_num_threads()} threads"
        self.touched = touch(state)

    def at(self, name: str) -> str:
        return str(self.folder / name)

    def save_dcp(self) -> None:
        writer = FileSystemWriter(self.at("dcp"), sync_files=False)
        save_dcp(dict(self.state), storage_writer=writer, no_dist=True)

    def load_dcp(self) -> State:
        state = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        load_dcp(state, checkpoint_id=self.at("dcp"), no_dist=True)
        return state

    def save(self, *, fsync: bool) -> None:
        def other(name: str, save: Callable[[], object], ratio: float) -> Runner:
            def saved() -> None:
                save()
                if fsync:
                    sync(self.folder)

            return Runner(name, timed(saved, before=self.clear), ratio)

        state, at = self.state, self.at
        race(
            f"save_file, {'on the disk, ' if fsync else ''}{self.what}",
            Runner(
                "tssd",
                timed(
                    lambda: tssd.save_file(state, at("x.tssd"), fsync=fsync),
                    before=self.clear,
                ),
            ),
            other("safetensors", lambda: safetensors.torch.save_file(state, at("x.st")), ratio=1),
            other("torch.save", lambda: torch.save(state, at("x.pt")), ratio=1.5),
            other("DCP", self.save_dcp, ratio=3),
            rounds=self.rounds,
            nbytes=size(state),
        )

    def load(self) -> None:
        at = self.at
        self.clear()
        tssd.save_file(self.state, at("x.tssd"))
        safetensors.torch.save_file(self.state, at("x.st"))
        torch.save(self.state, at("x.pt"))
        self.save_dcp()
        os.sync()
        loads: dict[str, tuple[Callable[[], State], float | None]] = {
            "tssd": (lambda: tssd.load_file(at("x.tssd")), None),
            "tssd, verify off": (lambda: tssd.load_file(at("x.tssd"), verify="off"), None),
            "tssd, pread": (lambda: tssd.load_file(at("x.tssd"), backend="pread"), None),
            "safetensors": (lambda: safetensors.torch.load_file(at("x.st")), 1),
            "torch.load": (lambda: torch.load(at("x.pt")), 1.5),
            "torch.load, mmap": (lambda: torch.load(at("x.pt"), mmap=True), None),
            "DCP": (self.load_dcp, 3),
        }
        race(
            f"load_file, each page touched, {self.what}",
            *(
                Runner(name, timed(partial(self.touch, load)), ratio)
                for name, (load, ratio) in loads.items()
            ),
            rounds=self.rounds,
            nbytes=size(self.state),
        )
        for load, _ in loads.values():
            expect_same(load(), self.state)

    def touch(self, load: Callable[[], State]) -> State:
        state = load()
        if touch(state) != self.touched:
            raise AssertionError("other bytes than were saved")
        return state

    def tiny(self) -> None:
        state = {f"a.{number}": torch.tensor(float(number)) for number in range(10_000)}
        path = self.at("tiny")
        found: State = {}

        def save_and_load() -> None:
            nonlocal found
            tssd.save_file(state, path, fsync=False)
            found = tssd.load_file(path)

        race(
            "10,000 tiny tensors: save and load",
            Runner("tssd", timed(save_and_load, before=lambda: found.clear())),
            rounds=self.rounds,
        )
        expect_same(found, state)

    def clear(self) -> None:
        """What replaces a file waits for the file system to part with the old one, and for what others wrote."""
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        os.sync()


def sync(folder: Path) -> None:
    """All files in it, and their names."""
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def touch(state: State) -> int:
    """One byte of each page."""
    total = 0
    for tensor in state.values():
        total += int(tensor.detach().view(torch.uint8).flatten()[::4096].sum(dtype=torch.int64))
    return total


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        files = Files(folder, model(arguments.mb, arguments.tensors), arguments.rounds)
        files.save(fsync=False)
        files.save(fsync=True)
        files.load()
        files.tiny()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
