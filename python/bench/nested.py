"""Cases with the checkpoint of a training: nested, with int keys, None, tuples and several dtypes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from files import READ, WRITE, empty_folder, read_into, resident_buffer, write_buffer
from formats import DCP, TORCH, TSSD, Format
from model import Model, State, copy_structure, expect_same
from pair import ClientPair
from peer import TorchstoreProcess
from race import Rounds, Runner, race, timed
from store import StoreCases


def files(folder: Path, model: Model, rounds: Rounds) -> None:
    """Measures saves and loads. safetensors does not support nested state dicts."""

    def save(file_format: Format) -> None:
        file_format.save(model.state, folder / file_format.name)

    def load(file_format: Format) -> State:
        return file_format.load(folder / file_format.name, model.state)

    def expect(found: State) -> None:
        expect_same(found, model.state)

    def expect_saved(file_format: Format, _: object) -> None:
        expect(load(file_format))

    buffer, clear_folder = resident_buffer(model.nbytes), partial(empty_folder, folder)
    race(
        "nested save",
        "a new file, nobody waits for the disk",
        *(
            Runner(
                file_format.name,
                timed(partial(save, file_format), before=clear_folder),
                file_format.role,
                check=partial(expect_saved, file_format),
            )
            for file_format in (TSSD, TORCH, DCP)
        ),
        Runner(WRITE, timed(partial(write_buffer, buffer, folder / "plain"), before=clear_folder), "limit"),
        model=model,
        rounds=rounds,
    )
    empty_folder(folder)
    for file_format in (TSSD, TORCH, DCP):
        save(file_format)
    race(
        "nested load",
        "all of it, by each one's default",
        *(
            Runner(file_format.loader_name, timed(partial(load, file_format)), file_format.role, check=expect)
            for file_format in (TSSD, TORCH, DCP)
        ),
        Runner(READ, timed(partial(read_into, folder / TSSD.name, buffer)), "limit"),
        model=model,
        rounds=rounds,
    )


def store(model: Model, rounds: Rounds, other: TorchstoreProcess | None, size: int | None) -> None:
    """Measures puts and gets."""
    with ClientPair(model, copy_structure(model.state)) as pair:
        stores = StoreCases(pair, rounds, (other, None), size)
        stores.put_and_get("nested")
