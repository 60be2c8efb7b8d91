"""Files beside those of others: what is saved and loaded, of one state dict, in turns.

Each save makes a new file; synced means that it is on the disk when the save returns, else nobody waits for
it. A load counts until one byte of each page was touched, or every byte read; ours proves all checksums.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import compressed
import records
import torch
import tssd
from formats import DCP, SAFETENSORS, TORCH, TSSD, Format
from model import Model, State, expect_same, model, tensors
from race import Role, Rounds, Runner, ours, race, timed
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

OTHERS = (SAFETENSORS, TORCH, DCP)
#: The machine's own speed.
WRITE = "plain write"
READ = "plain read"
#: Less than that is read by one thread: to ask another takes longer.
LEAST = 1 << 20
READERS = ThreadPoolExecutor(torch.get_num_threads())


class Files:
    """The same state dict in the files of all."""

    def __init__(self, folder: Path, model: Model, rounds: Rounds) -> None:
        self.folder, self.model, self.rounds = folder, model, rounds
        self.state = model.state
        self.buffer = warm(model.nbytes)
        self.touched, self.read = touch(self.state), read(self.state)
        self.is_saved = False

    def at(self, name: str) -> Path:
        return self.folder / name

    def race(self, case: str, what: str, *runners: Runner, model: Model | None = None) -> None:
        race(case, what, *runners, model=model or self.model, rounds=self.rounds)

    def save(self) -> None:
        """Into new files."""
        for fsync in (False, True):

            def run(save: Callable[[], object], *, synced: bool = fsync) -> Callable[[], float]:
                def saved() -> None:
                    save()
                    if synced:
                        sync(self.folder)

                return timed(saved, before=self.clear)

            self.race(
                "save, synced" if fsync else "save",
                "on the disk when it returns" if fsync else "a new file, nobody waits for the disk",
                ours(
                    timed(
                        partial(tssd.save_file, self.state, self.at("tssd"), fsync=fsync),
                        before=self.clear,
                    ),
                    partial(self.expect_saved, TSSD),
                ),
                *(
                    Runner(
                        each.name,
                        run(partial(each.save, self.state, self.at(each.name))),
                        target=each.target,
                        check=partial(self.expect_saved, each),
                    )
                    for each in OTHERS
                ),
                Runner(WRITE, run(partial(write, self.buffer, self.at("plain"))), "limit"),
            )
        self.is_saved = False

    def load(self) -> None:
        """All of it, each page touched."""
        self.save_all()
        also: dict[str, Callable[[], State]] = {
            "tssd, verify off": lambda: tssd.load_file(self.at("tssd"), verify="off"),
            "tssd, pread": lambda: tssd.load_file(self.at("tssd"), backend="pread"),
        }
        self.race(
            "load",
            "all of it, checksums proven, each page touched",
            ours(timed(partial(self.touched_by, partial(self.loaded, TSSD))), self.expect),
            *(
                Runner(
                    each.loader,
                    timed(partial(self.touched_by, partial(self.loaded, each))),
                    target=each.target,
                    check=self.expect,
                )
                for each in OTHERS
            ),
            Runner("torch.load, mmap", timed(partial(self.touched_by, self.mapped)), "peer", check=self.expect),
            *(
                Runner(name, timed(partial(self.touched_by, load)), "also", check=self.expect)
                for name, load in also.items()
            ),
            self.plain_read(self.model.nbytes),
        )
        everything: dict[str, tuple[Callable[[], State], Role]] = {
            "tssd": (partial(self.loaded, TSSD), "ours"),
            "tssd, verify off": (also["tssd, verify off"], "also"),
            "safetensors": (partial(self.loaded, SAFETENSORS), "peer"),
            "torch.load, mmap": (self.mapped, "peer"),
        }
        self.race(
            "load, read",
            "all of it, checksums proven, every byte read once",
            *(
                Runner(name, timed(partial(self.read_by, load)), role, check=self.expect)
                for name, (load, role) in everything.items()
            ),
            self.plain_read(self.model.nbytes),
        )

    def tensor(self) -> None:
        """One tensor of all."""
        name = sorted(self.state, key=lambda name: self.state[name].nbytes)[-2]
        self.of_one("one", f"one tensor of {self.model.count:,}, {name}", name, None)

    def part(self) -> None:
        """A part of the greatest tensor."""
        name = max(self.state, key=lambda name: int(self.state[name].nbytes))
        rows = self.state[name].shape[0]
        part = slice(rows * 2 // 5, rows * 2 // 5 + max(1, rows // 20))
        self.of_one("slice", f"5 % of the rows of one tensor, {name}", name, part)

    def of_one(self, case: str, what: str, name: str, part: slice | None) -> None:
        self.save_all()
        source = self.state[name] if part is None else self.state[name][part]

        def lazily(opened: Any) -> torch.Tensor:
            with opened as file:
                tensor: torch.Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
                return tensor

        def by_torch() -> torch.Tensor:
            tensor: torch.Tensor = self.mapped()[name]
            return tensor if part is None else tensor[part]

        def by_dcp() -> torch.Tensor:
            # A plain tensor has no parts there: all of it is read.
            state = {name: torch.empty_like(self.state[name])}
            load_dcp(state, checkpoint_id=str(self.at(DCP.name)), no_dist=True)
            return state[name] if part is None else state[name][part]

        loads: dict[str, tuple[Callable[[], torch.Tensor], Role]] = {
            "tssd": (lambda: lazily(tssd.safe_open(self.at("tssd"), "pt")), "ours"),
            "safetensors": (lambda: lazily(safe_open(self.at(SAFETENSORS.name), "pt")), "peer"),
            "torch.load, mmap": (by_torch, "peer"),
            "DCP": (by_dcp, "peer"),
        }
        self.race(
            case,
            f"{what}, of a file, each page touched",
            *(
                Runner(
                    runner,
                    timed(partial(_touch, load)),
                    role,
                    check=lambda found: expect_same(found, source),
                )
                for runner, (load, role) in loads.items()
            ),
            self.plain_read(source.nbytes),
            model=model(self.model.name, "", {name: source}),
        )

    def verify(self) -> None:
        """All checksums of a file."""
        self.save_all()
        self.race(
            "verify",
            "all checksums of a file",
            ours(timed(partial(tssd.verify, self.at(TSSD.name)))),
            self.plain_read(self.model.nbytes),
        )

    def zstd(self) -> None:
        """Compressed, beside what libzstd makes of safetensors."""
        path = self.at("zstd")

        def load() -> State:
            found: State = tssd.load_file(path)
            return found

        def save() -> None:
            tssd.save_file(self.state, path, compression="zstd", fsync=False)

        others = list(compressed.formats())
        self.clear()
        self.race(
            "save, zstd",
            "compressed, level 1, nobody waits for the disk",
            ours(timed(save, before=self.clear), lambda _: self.expect(load())),
            *(
                Runner(
                    each.name,
                    timed(partial(each.save, self.state, self.at(each.name)), before=self.clear),
                    check=partial(self.expect_saved, each),
                )
                for each in others
            ),
            Runner("tssd, not compressed", timed(self.save_tssd, before=self.clear), "also"),
            Runner(WRITE, timed(partial(write, self.buffer, self.at("plain")), before=self.clear), "limit"),
        )
        self.clear()
        save()
        self.save_tssd()
        found = {"bytes stored / raw": self.stored(path)}
        for each in others:
            each.save(self.state, self.at(each.name))
            found[f"bytes stored / raw, {each.name}"] = self.stored(self.at(each.name))
        print(*(f"  {what}: {ratio:.3f}" for what, ratio in found.items()), "", sep="\n")
        records.write("count", {"operation": "save, zstd", "counts": found})
        self.race(
            "load, zstd",
            "compressed, checksums proven, each page touched",
            ours(timed(partial(self.touched_by, load)), self.expect),
            *(
                Runner(
                    each.name,
                    timed(partial(self.touched_by, partial(self.loaded, each))),
                    check=self.expect,
                )
                for each in others
            ),
            Runner("tssd, not compressed", timed(partial(self.touched_by, partial(self.loaded, TSSD))), "also"),
            self.plain_read(self.model.nbytes),
        )
        self.is_saved = False

    def stored(self, path: Path) -> float:
        return path.stat().st_size / self.model.nbytes

    def plain_read(self, nbytes: int) -> Runner:
        """The bytes of a file without compression, into memory that is there."""
        return Runner(READ, timed(partial(read_whole, self.at(TSSD.name), self.buffer[:nbytes])), "limit")

    def expect(self, found: State) -> None:
        expect_same(found, self.state)

    def expect_saved(self, each: Format, _: object) -> None:
        self.expect(self.loaded(each))

    def mapped(self) -> State:
        state: State = torch.load(self.at(TORCH.name), mmap=True)
        return state

    def save_tssd(self) -> None:
        TSSD.save(self.state, self.at("tssd"))

    def save_all(self) -> None:
        """What is loaded, once for all cases."""
        if not self.is_saved:
            self.clear()
            for each in (TSSD, *OTHERS):
                each.save(self.state, self.at(each.name))
            os.sync()
        self.is_saved = True

    def loaded(self, each: Format) -> State:
        return each.load(self.at(each.name), self.state)

    def touched_by(self, load: Callable[[], State]) -> State:
        state = load()
        if touch(state) != self.touched:
            raise AssertionError("other bytes than were saved")
        return state

    def read_by(self, load: Callable[[], State]) -> State:
        state = load()
        if read(state) != self.read:
            raise AssertionError("other bytes than were saved")
        return state

    def clear(self) -> None:
        clear(self.folder)


def clear(folder: Path) -> None:
    """What replaces a file waits for the file system to part with the old one, and for what others wrote."""
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    os.sync()


def sync(folder: Path) -> None:
    """All files in it, and their names."""
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def touch(value: Any) -> int:
    """One byte of each page."""
    total = 0
    for tensor in tensors(value):
        total += int(tensor.detach().view(torch.uint8).flatten()[::4096].sum(dtype=torch.int64))
    return total


def read(value: Any) -> int:
    """Every byte, as many at once as fit in a number."""
    total = 0
    for tensor in tensors(value):
        words = tensor.detach().view(torch.uint8).flatten()
        total += int(words[: words.numel() // 8 * 8].view(torch.int64).sum())
    return total


def _touch(load: Callable[[], torch.Tensor]) -> torch.Tensor:
    tensor = load()
    touch(tensor)
    return tensor


def warm(nbytes: int) -> memoryview:
    """Not of zeros, whose memory would not be there yet; in huge pages, if torch has them."""
    return torch.ones(nbytes, dtype=torch.uint8).numpy().data


def write(buffer: memoryview, path: Path) -> None:
    """As fast as a file can be written: memory that is there, in few calls."""
    with open(path, "wb", buffering=0) as file:
        while buffer:
            buffer = buffer[file.write(buffer) :]


def read_whole(path: Path, room: memoryview) -> None:
    """As much as there is room for, into memory that is there: one part for each thread."""
    part = max(LEAST, -(-len(room) // torch.get_num_threads()))
    with open(path, "rb", buffering=0) as file:
        others = [
            READERS.submit(read_at, file.fileno(), room[start : start + part], start)
            for start in range(part, len(room), part)
        ]
        read_at(file.fileno(), room[:part], 0)
        for other in others:
            other.result()


def read_at(fd: int, left: memoryview, at: int) -> None:
    while left and (count := os.preadv(fd, [left], at)):
        left, at = left[count:], at + count
