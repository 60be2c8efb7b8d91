"""What a training saves: nested, with keys that are numbers, None and tuples, and tensors of several dtypes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import peer
import tssd
from daemon import daemon
from files import clear
from formats import DCP, TORCH, TSSD, Format
from model import Model, State, expect_same, like
from peer import KEY, NEW, REUSED, Peer
from race import Rounds, Runner, ours, race, timed


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
    if other is not None:
        other.use(model, size)
    with daemon(4 * model.nbytes) as url, tssd.Store(url) as writer, tssd.Store(url) as reader:
        into: State = like(model.state)

        def put_and_get() -> None:
            writer.put_state_dict(model.state, KEY)
            reader.get_state_dict(KEY, into)

        # Two versions are there at once: from the third on all memory is warm.
        for _ in range(3):
            put_and_get()
        race(
            "nested put and get",
            "a new version, into tensors that are there",
            ours(timed(put_and_get)),
            *peer.runners(other, (REUSED, Peer.both_same, None), (NEW, Peer.both_new, None)),
            model=model,
            rounds=rounds,
        )
        expect_same(reader.get_state_dict(KEY), model.state)
        if other is not None:
            other.check()
