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
import torch.distributed.checkpoint as dcp
import tssd
from race import Runner, State, described, expect_same, like, model, options, race, size, timed


class Files:
    """The same state dict in the files of all."""

    def __init__(self, folder: Path, state: State, rounds: int) -> None:
        self.folder, self.state, self.rounds = folder, state, rounds
        self.what = f"{described(state)}, {torch.get_num_threads()} threads"
        self.touched = touch(state)

    def at(self, name: str) -> str:
        return str(self.folder / name)

    def save_dcp(self) -> None:
        writer = dcp.FileSystemWriter(self.at("dcp"), sync_files=False)
        dcp.save(dict(self.state), storage_writer=writer, no_dist=True)

    def load_dcp(self) -> State:
        state = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        dcp.load(state, checkpoint_id=self.at("dcp"), no_dist=True)
        return state

    def save(self, *, fsync: bool) -> None:
        state, at = self.state, self.at

        def other(
            name: str, save: Callable[[], object], file: str, ratio: float | None = None
        ) -> Runner:
            return Runner(name, timed(lambda: (save(), fsync and sync(Path(at(file)))), self.clear), ratio)

        race(
            f"save_file, {'on the disk, ' if fsync else ''}{self.what}",
            Runner("tssd", timed(lambda: tssd.save_file(state, at("x.tssd"), fsync=fsync), self.clear)),
            other(
                "safetensors",
                lambda: safetensors.torch.save_file(state, at("x.safetensors")),
                "x.safetensors",
                ratio=1,
            ),
            other("torch.save", lambda: torch.save(state, at("x.pt")), "x.pt", ratio=1.5),
            other("DCP", self.save_dcp, "dcp", ratio=3),
            rounds=self.rounds,
            nbytes=size(state),
        )

    def load(self) -> None:
        at = self.at
        self.clear()
        tssd.save_file(self.state, at("x.tssd"))
        safetensors.torch.save_file(self.state, at("x.safetensors"))
        torch.save(self.state, at("x.pt"))
        self.save_dcp()
        ours: dict[str, Callable[[], State]] = {
            "tssd": lambda: tssd.load_file(at("x.tssd")),
            "tssd, verify off": lambda: tssd.load_file(at("x.tssd"), verify="off"),
            "tssd, pread": lambda: tssd.load_file(at("x.tssd"), backend="pread"),
        }
        others: dict[str, tuple[Callable[[], State], float | None]] = {
            "safetensors": (lambda: safetensors.torch.load_file(at("x.safetensors")), 1),
            "torch.load": (lambda: torch.load(at("x.pt")), 1.5),
            "torch.load, mmap": (lambda: torch.load(at("x.pt"), mmap=True), None),
            "DCP": (self.load_dcp, 3),
        }
        first, *rest = (Runner(name, timed(partial(self.touch, load))) for name, load in ours.items())
        race(
            f"load_file, each page touched, {self.what}",
            first,
            *rest,
            *(
                Runner(name, timed(partial(self.touch, load)), ratio)
                for name, (load, ratio) in others.items()
            ),
            rounds=self.rounds,
            nbytes=size(self.state),
        )
        for load in [*ours.values(), *(load for load, _ in others.values())]:
            expect_same(load(), self.state)

    def touch(self, load: Callable[[], State]) -> State:
        state = load()
        assert touch(state) == self.touched
        return state

    def tiny(self) -> None:
        state = {f"a.{number}": torch.tensor(float(number)) for number in range(10_000)}
        path = self.at("tiny")
        race(
            "10,000 tiny tensors: save and load",
            Runner(
                "tssd",
                timed(lambda: (tssd.save_file(state, path, fsync=False), tssd.load_file(path))),
            ),
            rounds=self.rounds,
        )
        expect_same(tssd.load_file(path), state)

    def clear(self) -> None:
        """What replaces a file waits for the file system to part with the old one."""
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def sync(path: Path) -> None:
    for file in path.iterdir() if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
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
