"""Many tensors of one element: what each tensor costs, however small."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from files import clear
from formats import DCP, SAFETENSORS, TORCH, TSSD, Format
from model import Model, State, expect_same, like, named
from pair import Pair
from peer import Peer
from race import Rounds, Runner, ours, race, timed
from store import Stores

#: With 10,000 and more, torchstore takes seconds; with 20,000, DCP and torch.save too.
FEW = 1_000
MANY = 10_000
OTHERS = {FEW: (SAFETENSORS, TORCH, DCP), MANY: (SAFETENSORS, TORCH, DCP), 20_000: (SAFETENSORS,)}
#: DCP takes seconds for so many, too: a few rounds of it are enough.
ROUNDS = {MANY: 3}
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
            "a new file, nobody waits for the disk",
            ours(timed(partial(save_and_load, TSSD), before=partial(clear, folder))),
            *(
                Runner(
                    each.name,
                    timed(partial(save_and_load, each), before=partial(clear, folder)),
                    target=TARGETS.get((count, each.name)),
                )
                for each in others
            ),
            model=model,
            rounds=rounds.at_most(ROUNDS.get(count, rounds.iterations)),
            milliseconds=MILLISECONDS.get(count),
        )
        clear(folder)
        for each in (TSSD, *others):
            expect_same(save_and_load(each), model.state)


def store(rounds: Rounds, other: Peer | None) -> None:
    """Put and got."""
    for count in OTHERS:
        model = named(f"tiny:{count}")
        with Pair(model, like(model.state)) as pair:
            stores = Stores(pair, rounds, (other if count == FEW else None, None), None)
            stores.put_and_view("tiny", MILLISECONDS.get(count))
            stores.put_and_get("tiny", MILLISECONDS.get(count))
            stores.check()
