"""Compares saving and loading one state dict in files of tssd and of other libraries.

Each save creates a new file. A synced save returns when the file is on the disk; any other does not wait for the disk.
A load ends when one byte of each page was touched, or every byte was read. tssd verifies all checksums.
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
from model import Model, State, expect_same, iter_tensors, make_model
from race import Role, Rounds, Runner, race, timed, tssd_runner
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

PEERS = (SAFETENSORS, TORCH, DCP)
#: The speed limits of the machine.
WRITE = "plain write"
READ = "plain read"
#: Fewer bytes than this are read by one thread: starting another one takes longer.
MIN_PART_BYTES = 1 << 20
READ_POOL = ThreadPoolExecutor(torch.get_num_threads())


class FileCases:
    """One state dict, in a file of each format."""

    def __init__(self, folder: Path, model: Model, rounds: Rounds) -> None:
        self.folder, self.model, self.rounds = folder, model, rounds
        self.state = model.state
        self.buffer = resident_buffer(model.nbytes)
        self.page_sum, self.word_sum = touch_pages(self.state), sum_words(self.state)
        self.is_saved = False

    def path(self, name: str) -> Path:
        return self.folder / name

    def race(self, case: str, description: str, *runners: Runner, model: Model | None = None) -> None:
        race(case, description, *runners, model=model or self.model, rounds=self.rounds)

    def save(self) -> None:
        """Measures saves to new files, not synced and synced."""
        for fsync in (False, True):

            def time_save(save: Callable[[], object], *, synced: bool = fsync) -> Callable[[], float]:
                def save_and_sync() -> None:
                    save()
                    if synced:
                        sync_directory(self.folder)

                return timed(save_and_sync, before=self.clear)

            self.race(
                "save, synced" if fsync else "save",
                "on the disk when it returns" if fsync else "a new file, nobody waits for the disk",
                tssd_runner(
                    timed(
                        partial(tssd.save_file, self.state, self.path("tssd"), fsync=fsync),
                        before=self.clear,
                    ),
                    partial(self.expect_saved, TSSD),
                ),
                *(
                    Runner(
                        file_format.name,
                        time_save(partial(file_format.save, self.state, self.path(file_format.name))),
                        target=file_format.target,
                        check=partial(self.expect_saved, file_format),
                    )
                    for file_format in PEERS
                ),
                Runner(WRITE, time_save(partial(write_buffer, self.buffer, self.path("plain"))), "limit"),
            )
        self.is_saved = False

    def load(self) -> None:
        """Measures loads of the whole file, with each page touched, and with every byte read."""
        self.save_all()
        variants: dict[str, Callable[[], State]] = {
            "tssd, verify off": lambda: tssd.load_file(self.path("tssd"), verify="off"),
            "tssd, pread": lambda: tssd.load_file(self.path("tssd"), backend="pread"),
        }
        self.race(
            "load",
            "all of it, checksums proven, each page touched",
            tssd_runner(timed(partial(self.load_and_touch, partial(self.load_format, TSSD))), self.expect),
            *(
                Runner(
                    file_format.loader_name,
                    timed(partial(self.load_and_touch, partial(self.load_format, file_format))),
                    target=file_format.target,
                    check=self.expect,
                )
                for file_format in PEERS
            ),
            Runner(
                "torch.load, mmap",
                timed(partial(self.load_and_touch, self.load_torch_mmap)),
                "peer",
                check=self.expect,
            ),
            *(
                Runner(name, timed(partial(self.load_and_touch, load)), "also", check=self.expect)
                for name, load in variants.items()
            ),
            self.plain_read(self.model.nbytes),
        )
        loads: dict[str, tuple[Callable[[], State], Role]] = {
            "tssd": (partial(self.load_format, TSSD), "ours"),
            "tssd, verify off": (variants["tssd, verify off"], "also"),
            "safetensors": (partial(self.load_format, SAFETENSORS), "peer"),
            "torch.load, mmap": (self.load_torch_mmap, "peer"),
        }
        self.race(
            "load, read",
            "all of it, checksums proven, every byte read once",
            *(
                Runner(name, timed(partial(self.load_and_read, load)), role, check=self.expect)
                for name, (load, role) in loads.items()
            ),
            self.plain_read(self.model.nbytes),
        )

    def load_tensor(self) -> None:
        """Measures loads of one tensor."""
        name = sorted(self.state, key=lambda name: self.state[name].nbytes)[-2]
        self.race_one_tensor("one", f"one tensor of {self.model.count:,}, {name}", name, None)

    def load_slice(self) -> None:
        """Measures loads of a slice of the largest tensor."""
        name = max(self.state, key=lambda name: int(self.state[name].nbytes))
        rows = self.state[name].shape[0]
        part = slice(rows * 2 // 5, rows * 2 // 5 + max(1, rows // 20))
        self.race_one_tensor("slice", f"5 % of the rows of one tensor, {name}", name, part)

    def race_one_tensor(self, case: str, description: str, name: str, part: slice | None) -> None:
        self.save_all()
        source = self.state[name] if part is None else self.state[name][part]

        def read_lazily(opened: Any) -> torch.Tensor:
            with opened as file:
                tensor: torch.Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
                return tensor

        def read_with_torch() -> torch.Tensor:
            tensor: torch.Tensor = self.load_torch_mmap()[name]
            return tensor if part is None else tensor[part]

        def read_with_dcp() -> torch.Tensor:
            # DCP cannot read a part of a plain tensor: it reads the whole tensor.
            state = {name: torch.empty_like(self.state[name])}
            load_dcp(state, checkpoint_id=str(self.path(DCP.name)), no_dist=True)
            return state[name] if part is None else state[name][part]

        loads: dict[str, tuple[Callable[[], torch.Tensor], Role]] = {
            "tssd": (lambda: read_lazily(tssd.safe_open(self.path("tssd"), "pt")), "ours"),
            "safetensors": (lambda: read_lazily(safe_open(self.path(SAFETENSORS.name), "pt")), "peer"),
            "torch.load, mmap": (read_with_torch, "peer"),
            "DCP": (read_with_dcp, "peer"),
        }
        self.race(
            case,
            f"{description}, of a file, each page touched",
            *(
                Runner(
                    runner,
                    timed(partial(load_and_touch_tensor, load)),
                    role,
                    check=lambda found: expect_same(found, source),
                )
                for runner, (load, role) in loads.items()
            ),
            self.plain_read(source.nbytes),
            model=make_model(self.model.name, "", {name: source}),
        )

    def verify(self) -> None:
        """Measures the verification of all checksums of a file."""
        self.save_all()
        self.race(
            "verify",
            "all checksums of a file",
            tssd_runner(timed(partial(tssd.verify, self.path(TSSD.name)))),
            self.plain_read(self.model.nbytes),
        )

    def compress(self) -> None:
        """Measures compressed files, in comparison with safetensors compressed by libzstd."""
        path = self.path("zstd")

        def load() -> State:
            state: State = tssd.load_file(path)
            return state

        def save() -> None:
            tssd.save_file(self.state, path, compression="zstd", fsync=False)

        peers = list(compressed.formats())
        self.clear()
        self.race(
            "save, zstd",
            "compressed, level 1, nobody waits for the disk",
            tssd_runner(timed(save, before=self.clear), lambda _: self.expect(load())),
            *(
                Runner(
                    file_format.name,
                    timed(partial(file_format.save, self.state, self.path(file_format.name)), before=self.clear),
                    check=partial(self.expect_saved, file_format),
                )
                for file_format in peers
            ),
            Runner("tssd, not compressed", timed(self.save_tssd, before=self.clear), "also"),
            Runner(WRITE, timed(partial(write_buffer, self.buffer, self.path("plain")), before=self.clear), "limit"),
        )
        self.clear()
        save()
        self.save_tssd()
        ratios = {"bytes stored / raw": self.stored_ratio(path)}
        for file_format in peers:
            file_format.save(self.state, self.path(file_format.name))
            ratios[f"bytes stored / raw, {file_format.name}"] = self.stored_ratio(self.path(file_format.name))
        print(*(f"  {label}: {ratio:.3f}" for label, ratio in ratios.items()), "", sep="\n")
        records.write("count", {"operation": "save, zstd", "counts": ratios})
        self.race(
            "load, zstd",
            "compressed, checksums proven, each page touched",
            tssd_runner(timed(partial(self.load_and_touch, load)), self.expect),
            *(
                Runner(
                    file_format.name,
                    timed(partial(self.load_and_touch, partial(self.load_format, file_format))),
                    check=self.expect,
                )
                for file_format in peers
            ),
            Runner(
                "tssd, not compressed",
                timed(partial(self.load_and_touch, partial(self.load_format, TSSD))),
                "also",
            ),
            self.plain_read(self.model.nbytes),
        )
        self.is_saved = False

    def stored_ratio(self, path: Path) -> float:
        return path.stat().st_size / self.model.nbytes

    def plain_read(self, nbytes: int) -> Runner:
        """Returns the runner that reads the bytes of an uncompressed file into resident memory."""
        return Runner(READ, timed(partial(read_into, self.path(TSSD.name), self.buffer[:nbytes])), "limit")

    def expect(self, found: State) -> None:
        expect_same(found, self.state)

    def expect_saved(self, file_format: Format, _: object) -> None:
        self.expect(self.load_format(file_format))

    def load_torch_mmap(self) -> State:
        state: State = torch.load(self.path(TORCH.name), mmap=True)
        return state

    def save_tssd(self) -> None:
        TSSD.save(self.state, self.path("tssd"))

    def save_all(self) -> None:
        """Writes the files that are loaded, once for all cases."""
        if not self.is_saved:
            self.clear()
            for file_format in (TSSD, *PEERS):
                file_format.save(self.state, self.path(file_format.name))
            os.sync()
        self.is_saved = True

    def load_format(self, file_format: Format) -> State:
        return file_format.load(self.path(file_format.name), self.state)

    def load_and_touch(self, load: Callable[[], State]) -> State:
        state = load()
        if touch_pages(state) != self.page_sum:
            raise AssertionError("other bytes than were saved")
        return state

    def load_and_read(self, load: Callable[[], State]) -> State:
        state = load()
        if sum_words(state) != self.word_sum:
            raise AssertionError("other bytes than were saved")
        return state

    def clear(self) -> None:
        empty_folder(self.folder)


def empty_folder(folder: Path) -> None:
    """Empties a directory, and flushes all pending writes to the disk.

    Otherwise a save would wait until the file system has freed the old file and written the data of other runners.
    """
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    os.sync()


def sync_directory(folder: Path) -> None:
    """Flushes all files in a directory, and the directory itself, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def touch_pages(value: Any) -> int:
    """Touches one byte of each page. Returns the sum of these bytes."""
    total = 0
    for tensor in iter_tensors(value):
        total += int(tensor.detach().view(torch.uint8).flatten()[::4096].sum(dtype=torch.int64))
    return total


def sum_words(value: Any) -> int:
    """Reads each tensor in words of 8 bytes, without a shorter rest. Returns the sum of the words."""
    total = 0
    for tensor in iter_tensors(value):
        words = tensor.detach().view(torch.uint8).flatten()
        total += int(words[: words.numel() // 8 * 8].view(torch.int64).sum())
    return total


def load_and_touch_tensor(load: Callable[[], torch.Tensor]) -> torch.Tensor:
    tensor = load()
    touch_pages(tensor)
    return tensor


def resident_buffer(nbytes: int) -> memoryview:
    """Returns a buffer in resident memory, in huge pages if torch uses them.

    A buffer of zeros would not be resident yet.
    """
    return torch.ones(nbytes, dtype=torch.uint8).numpy().data


def write_buffer(buffer: memoryview, path: Path) -> None:
    """Writes a buffer to a file in few calls, as fast as possible."""
    with open(path, "wb", buffering=0) as file:
        while buffer:
            buffer = buffer[file.write(buffer) :]


def read_into(path: Path, target: memoryview) -> None:
    """Fills a buffer from a file, with one part for each thread."""
    part = max(MIN_PART_BYTES, -(-len(target) // torch.get_num_threads()))
    with open(path, "rb", buffering=0) as file:
        futures = [
            READ_POOL.submit(read_at, file.fileno(), target[start : start + part], start)
            for start in range(part, len(target), part)
        ]
        read_at(file.fileno(), target[:part], 0)
        for future in futures:
            future.result()


def read_at(fd: int, target: memoryview, offset: int) -> None:
    while target and (count := os.preadv(fd, [target], offset)):
        target, offset = target[count:], offset + count
