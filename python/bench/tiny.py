"""Cases with many tensors of one element, which measure the cost per tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from files import empty_folder
from formats import DCP, SAFETENSORS, TORCH, TSSD, Format
from model import Model, State, copy_structure, expect_same, model_from_spec
from pair import ClientPair
from peer import TorchstoreProcess
from race import Rounds, Runner, race, timed
from store import PUT_AND_GET_RUNS, StoreCases, TorchstoreRuns

FEW = 1_000
MANY = 10_000
MOST = 20_000
#: The peers for each number of tensors. DCP takes four seconds for 10,000 tensors, and eight for 20,000.
PEERS = {FEW: (SAFETENSORS, TORCH, DCP), MANY: (SAFETENSORS, TORCH, DCP), MOST: (SAFETENSORS, TORCH)}
#: The operations of torchstore. They take two seconds for 10,000 tensors, so only the faster one is measured.
TORCHSTORE_RUNS: dict[int, TorchstoreRuns] = {FEW: PUT_AND_GET_RUNS, MANY: PUT_AND_GET_RUNS[:1]}
#: The maximum time in milliseconds, by number of tensors.
MILLISECONDS = {MANY: 300}
#: The required speed of tssd as a multiple of that of a peer, by number of tensors and name of the peer.
TARGETS = {(MANY, SAFETENSORS.name): 5, (MANY, DCP.name): 50}


def files(folder: Path, rounds: Rounds) -> None:
    """Measures saves and loads."""
    for count in PEERS:
        model = model_from_spec(f"tiny:{count}")
        peers = PEERS[count]

        def save_and_load(file_format: Format, model: Model = model) -> State:
            file_format.save(model.state, folder / file_format.name)
            return file_format.load(folder / file_format.name, model.state)

        race(
            "tiny save and load",
            f"a new file, nobody waits for the disk{'' if DCP in peers else '; DCP takes eight seconds: left out'}",
            *(
                Runner(
                    file_format.save_and_load_name,
                    timed(partial(save_and_load, file_format), before=partial(empty_folder, folder)),
                    file_format.role,
                    target=TARGETS.get((count, file_format.name)),
                    check=partial(expect_same, source=model.state),
                )
                for file_format in (TSSD, *peers)
            ),
            model=model,
            rounds=rounds,
            milliseconds=MILLISECONDS.get(count),
        )
        empty_folder(folder)


def store(rounds: Rounds, other: TorchstoreProcess | None) -> None:
    """Measures puts and gets."""
    for count in PEERS:
        model = model_from_spec(f"tiny:{count}")
        runs = TORCHSTORE_RUNS.get(count, ())
        note = "" if runs else "; torchstore takes four seconds: left out"
        with ClientPair(model, copy_structure(model.state)) as pair:
            stores = StoreCases(pair, rounds, (other if runs else None, None), None)
            stores.put_and_view("tiny", MILLISECONDS.get(count), runs, note)
            stores.put_and_get("tiny", MILLISECONDS.get(count), runs, note)
