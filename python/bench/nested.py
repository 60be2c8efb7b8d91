"""What a training saves: nested, with keys that are numbers, None and tuples, and tensors of several dtypes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from files import clear
from formats import DCP, TORCH, TSSD, Format
from model import Model, State, expect_same, like
from pair import Pair
from peer import Peer
from race import Rounds, Runner, ours, race, timed
from store import Stores


def files(folder: Path, model: Model, rounds: Rounds) -> None:
    """Saved and loaded. safetensors takes no nested state dict."""

    def save(each: Format) -> None:
        each.save(model.state, folder / each.name)

    def load(each: Format) -> State:
        return each.load(folder / each.name, model.state)

    race(
        "nested save",
        "a new file, nobody waits for the disk",
        ours(timed(partial(save, TSSD), before=partial(clear, folder))),
        *(
            Runner(each.name, timed(partial(save, each), before=partial(clear, folder)))
            for each in (TORCH, DCP)
        ),
        model=model,
        rounds=rounds,
    )
    clear(folder)
    for each in (TSSD, TORCH, DCP):
        save(each)
    race(
        "nested load",
        "all of it, by each one's default",
        ours(timed(partial(load, TSSD))),
        *(Runner(each.name, timed(partial(load, each))) for each in (TORCH, DCP)),
        model=model,
        rounds=rounds,
    )
    for each in (TSSD, TORCH, DCP):
        expect_same(load(each), model.state)


def store(model: Model, rounds: Rounds, other: Peer | None, size: int | None) -> None:
    """Put and got."""
    with Pair(model, like(model.state)) as pair:
        stores = Stores(pair, rounds, (other, None), size)
        stores.put_and_get("nested")
        stores.check()
