"""Many tensors of one element: what each tensor costs, however small."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import peer
import tssd
from daemon import daemon
from files import clear
from formats import DCP, SAFETENSORS, TORCH, TSSD, Format
from model import Model, State, expect_same, like, named
from peer import KEY, NEW, REUSED, Peer
from race import Rounds, Runner, ours, race, timed

#: With 10,000 and more, DCP and torchstore take seconds; with 20,000, torch.save too.
FEW = 1_000
OTHERS = {FEW: (SAFETENSORS, TORCH, DCP), 10_000: (SAFETENSORS, TORCH), 20_000: (SAFETENSORS,)}


def files(folder: Path, rounds: Rounds) -> None:
    """Saved and loaded."""
    for count in OTHERS:
        model = named(f"tiny:{count}")
        others = OTHERS[count]

        def save_and_load(each: Format, model: Model = model) -> State:
            each.save(model.state, folder / each.name)
            return each.load(folder / each.name, model.state)

        race(
            "tiny save and load",
            "a new file, nobody waits for the disk",
            ours(timed(partial(save_and_load, TSSD), before=partial(clear, folder))),
            *(
                Runner(each.name, timed(partial(save_and_load, each), before=partial(clear, folder)))
                for each in others
            ),
            model=model,
            rounds=rounds,
            milliseconds=300 if count == 10_000 else None,
        )
        clear(folder)
        for each in (TSSD, *others):
            expect_same(save_and_load(each), model.state)


def store(rounds: Rounds, other: Peer | None) -> None:
    """Put and got."""
    for count in OTHERS:
        model = named(f"tiny:{count}")
        theirs = other if count == FEW else None
        if theirs is not None:
            theirs.use(model, None)
        with daemon(1 << 30) as url, tssd.Store(url) as writer, tssd.Store(url) as reader:
            _race(model, rounds, theirs, writer, reader)


def _race(model: Model, rounds: Rounds, other: Peer | None, writer: tssd.Store, reader: tssd.Store) -> None:
    state, into = model.state, like(model.state)
    found: State = {}

    def get() -> None:
        nonlocal found
        writer.put_state_dict(state, KEY)
        found = reader.get_state_dict(KEY)

    def get_into() -> None:
        writer.put_state_dict(state, KEY)
        reader.get_state_dict(KEY, into)

    # Two versions are there at once: from the third on all memory is warm.
    for _ in range(3):
        get_into()
    for what, work in {"views": get, "into tensors that are there": get_into}.items():
        race(
            "tiny put and get" if work is get_into else "tiny put and views",
            f"a new version, {what}",
            ours(timed(work, before=lambda: found.clear())),
            *peer.runners(other, (REUSED, Peer.both_same, None), (NEW, Peer.both_new, None)),
            model=model,
            rounds=rounds,
            milliseconds=300 if model.count == 10_000 else None,
        )
    get()
    expect_same(found, state)
    expect_same(into, state)
    if other is not None:
        other.check()
