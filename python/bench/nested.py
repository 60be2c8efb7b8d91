"""What a training saves: nested, with keys that are numbers, None and tuples, and tensors of several dtypes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from files import READ, WRITE, clear, read_whole, warm, write
from formats import DCP, TORCH, TSSD, Format
from model import Model, State, expect_same, like
from pair import Pair
from peer import Peer
from race import Rounds, Runner, race, timed
from store import Stores


def files(folder: Path, model: Model, rounds: Rounds) -> None:
    """Saved and loaded. safetensors takes no nested state dict."""

    def save(each: Format) -> None:
        each.save(model.state, folder / each.name)

    def load(each: Format) -> State:
        return each.load(folder / each.name, model.state)

    def expect(found: State) -> None:
        expect_same(found, model.state)

    def expect_saved(each: Format, _: object) -> None:
        expect(load(each))

    buffer, anew = warm(model.nbytes), partial(clear, folder)
    race(
        "nested save",
        "a new file, nobody waits for the disk",
        *(
            Runner(
                each.name,
                timed(partial(save, each), before=anew),
                each.role,
                check=partial(expect_saved, each),
            )
            for each in (TSSD, TORCH, DCP)
        ),
        Runner(WRITE, timed(partial(write, buffer, folder / "plain"), before=anew), "limit"),
        model=model,
        rounds=rounds,
    )
    clear(folder)
    for each in (TSSD, TORCH, DCP):
        save(each)
    race(
        "nested load",
        "all of it, by each one's default",
        *(
            Runner(each.loader, timed(partial(load, each)), each.role, check=expect)
            for each in (TSSD, TORCH, DCP)
        ),
        Runner(READ, timed(partial(read_whole, folder / TSSD.name, buffer)), "limit"),
        model=model,
        rounds=rounds,
    )


def store(model: Model, rounds: Rounds, other: Peer | None, size: int | None) -> None:
    """Put and got."""
    with Pair(model, like(model.state)) as pair:
        stores = Stores(pair, rounds, (other, None), size)
        stores.put_and_get("nested")
