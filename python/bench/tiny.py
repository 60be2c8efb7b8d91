"""Many tensors of one element: what each tensor costs, however small."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from files import clear
from formats import DCP, SAFETENSORS, TORCH, TSSD, Format
from model import Model, State, expect_same, like, named
from pair import Pair
from peer import Peer
from race import Rounds, Runner, race, timed
from store import BOTH, Stores, Turns

FEW = 1_000
MANY = 10_000
MOST = 20_000
#: DCP takes four seconds for 10,000, and twice that for 20,000.
OTHERS = {FEW: (SAFETENSORS, TORCH, DCP), MANY: (SAFETENSORS, TORCH, DCP), MOST: (SAFETENSORS, TORCH)}
#: What torchstore does, which takes it two seconds for 10,000: its faster way is enough.
TURNS: dict[int, Turns] = {FEW: BOTH, MANY: BOTH[:1]}
#: What so many may take.
MILLISECONDS = {MANY: 300}
#: How many times as fast ours is wanted to be, with so many.
TARGETS = {(MANY, SAFETENSORS.name): 5, (MANY, DCP.name): 50}


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
            f"a new file, nobody waits for the disk{'' if DCP in others else '; DCP takes eight seconds: left out'}",
            *(
                Runner(
                    each.both,
                    timed(partial(save_and_load, each), before=partial(clear, folder)),
                    each.role,
                    target=TARGETS.get((count, each.name)),
                    check=partial(expect_same, source=model.state),
                )
                for each in (TSSD, *others)
            ),
            model=model,
            rounds=rounds,
            milliseconds=MILLISECONDS.get(count),
        )
        clear(folder)


def store(rounds: Rounds, other: Peer | None) -> None:
    """Put and got."""
    for count in OTHERS:
        model = named(f"tiny:{count}")
        turns = TURNS.get(count, ())
        note = "" if turns else "; torchstore takes four seconds: left out"
        with Pair(model, like(model.state)) as pair:
            stores = Stores(pair, rounds, (other if turns else None, None), None)
            stores.put_and_view("tiny", MILLISECONDS.get(count), turns, note)
            stores.put_and_get("tiny", MILLISECONDS.get(count), turns, note)
