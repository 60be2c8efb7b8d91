"""Compares puts, gets and views of one state dict with torchstore and with plain copies.

Memory is warm, except in cases of a first put or get. The last result of each runner is compared with its source before
another runner runs.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from functools import partial

import echo
import torch
from echo import EchoProcess
from model import State, copy_structure, expect_same, iter_tensors, model_from_spec, zero_tensors
from pair import ClientPair
from peer import KEY, NEW_KEY, REUSED_KEY, RPC, TorchstoreProcess, torchstore_runners
from race import Role, Rounds, Runner, TimedCall, race, report, timed, tssd_runner
from torch.utils._pytree import tree_map

COPY = "torch copy_"
#: Names of runners of torchstore, each with its operation.
TorchstoreRuns = tuple[tuple[str, Callable[[TorchstoreProcess], float]], ...]
PUT_AND_GET_RUNS: TorchstoreRuns = (
    (REUSED_KEY, TorchstoreProcess.put_and_get_same),
    (NEW_KEY, TorchstoreProcess.put_and_get_new),
)


class StoreCases:
    """Cases with a writer and a reader of one model."""

    def __init__(
        self,
        pair: ClientPair,
        rounds: Rounds,
        others: tuple[TorchstoreProcess | None, TorchstoreProcess | None],
        size: int | None,
    ) -> None:
        self.pair, self.model, self.rounds = pair, pair.model, rounds
        self.peer, self.far = others
        self.copies = list(zip(iter_tensors(pair.into), iter_tensors(pair.model.state), strict=True))
        for other in others:
            if other is not None:
                other.select_model(self.model, size)
        pair.warm_up()

    def race(self, case: str, description: str, *runners: Runner, milliseconds: float | None = None) -> None:
        race(case, description, *runners, model=self.model, rounds=self.rounds, milliseconds=milliseconds)

    def put(self) -> None:
        """Measures puts of a version."""
        self.race(
            "put",
            "a new version, checksums included",
            tssd_runner(timed(self.pair.put), self.pair.check_put),
            *torchstore_runners(
                self.peer,
                TorchstoreProcess.check_put,
                (REUSED_KEY, TorchstoreProcess.put_same, 2),
                (NEW_KEY, TorchstoreProcess.put_new, 4),
            ),
            *torchstore_runners(self.far, TorchstoreProcess.check_put, (RPC, TorchstoreProcess.put_same, None)),
            self.copy_runner(0.8),
        )

    def get(self) -> None:
        """Measures gets into existing tensors."""
        pair = self.pair
        self.race(
            "get",
            "in place, a version not read before, verified",
            tssd_runner(timed(pair.get_into, before=pair.clear_and_put), pair.check_filled),
            *torchstore_runners(
                self.peer,
                TorchstoreProcess.check_get,
                (REUSED_KEY, TorchstoreProcess.get_same, 2),
                (NEW_KEY, TorchstoreProcess.get_new, 4),
            ),
            *torchstore_runners(self.far, TorchstoreProcess.check_get, (RPC, TorchstoreProcess.get_same, None)),
            self.copy_runner(0.8),
            Runner(
                "tssd, not verified",
                timed(partial(pair.get_into, False), before=pair.clear_and_put),
                "also",
                check=pair.check_filled,
            ),
        )

    def cast(self) -> None:
        """Measures puts that store float32 tensors as bfloat16."""
        if any(tensor.dtype != torch.bfloat16 for tensor in iter_tensors(self.model.state)):
            return
        masters = tree_map(lambda tensor: tensor.float(), self.model.state)
        self.race(
            "cast",
            "float32 tensors stored as bfloat16, a new version, checksums included",
            tssd_runner(
                timed(lambda: self.pair.writer.put_state_dict(masters, KEY, transfer_dtype=torch.bfloat16)),
                self.pair.check_put,
            ),
            Runner(
                "torch to(bfloat16)",
                timed(lambda: [tensor.to(torch.bfloat16) for tensor in iter_tensors(masters)]),
                "limit",
                0.91,
            ),
        )

    def first_put(self) -> None:
        """Measures puts with only new memory."""
        with ClientPair(self.model, self.pair.into) as new_pair:
            self.race_first(
                "put",
                "the first version of a store that is new",
                tssd_runner(timed(new_pair.put, before=new_pair.restart), new_pair.check_put),
                torchstore_runners(self.peer, TorchstoreProcess.check_put, (NEW_KEY, TorchstoreProcess.put_new, None)),
                Runner("torch copy_ to new shared memory", timed(self.copy_shared), "limit"),
            )

    def first_get(self) -> None:
        """Measures gets by a reader that has not mapped the memory of the store yet."""
        with ClientPair(self.model, self.pair.into) as new_pair:

            def restart_and_put() -> None:
                new_pair.restart()
                new_pair.clear_and_put()

            self.race_first(
                "get",
                "by a reader that is new, in place, verified",
                tssd_runner(timed(new_pair.get_into, before=restart_and_put), new_pair.check_filled),
                torchstore_runners(
                    self.peer, TorchstoreProcess.check_get, (NEW_KEY, TorchstoreProcess.get_first, None)
                ),
                self.copy_runner(),
            )

    def race_first(self, case: str, description: str, our_runner: Runner, peers: list[Runner], limit: Runner) -> None:
        """Runs a case with a new store, and a new key of torchstore, in each round."""
        self.race(f"first {case}", description, our_runner, *peers, limit)

    def get_views(self) -> None:
        """Measures gets of views of the store, without and with reading their bytes."""
        pair = self.pair

        def drop_and_put() -> None:
            pair.drop_views()
            pair.put()

        def drop_put_and_get() -> None:
            drop_and_put()
            pair.get_views(False)

        with EchoProcess() as echo_process:
            self.race(
                "views",
                "of a version not read before, handed over",
                tssd_runner(timed(partial(pair.get_views, False), before=drop_and_put), pair.check_views),
                Runner("tssd, verified", timed(pair.get_views, before=drop_and_put), "also", check=pair.check_views),
                *torchstore_runners(
                    self.peer, TorchstoreProcess.check_get, (REUSED_KEY, TorchstoreProcess.get_same, None)
                ),
                Runner(echo.RUNNER_NAME, timed(echo_process.round_trip), "limit"),
                milliseconds=1,
            )
        self.race(
            "views read",
            "every byte of them read once",
            tssd_runner(timed(lambda: sum_bytes(pair.views), before=drop_put_and_get), pair.check_views),
            Runner("memory of this process's own", timed(lambda: sum_bytes(self.model.state)), "limit", 0.9),
        )
        pair.drop_views()

    def put_and_get(
        self, name: str, milliseconds: float | None = None, runs: TorchstoreRuns = PUT_AND_GET_RUNS, note: str = ""
    ) -> None:
        """Measures a put and a get in place together."""
        pair = self.pair

        def copy_twice() -> None:
            self.copy()
            self.copy()

        self.race_both(
            f"{name} put and get",
            f"a new version, into tensors that are there{note}",
            tssd_runner(timed(pair.put_and_get_into, before=lambda: zero_tensors(pair.into)), pair.check_filled),
            runs,
            Runner(f"{COPY}, twice", timed(copy_twice, before=self.copy), "limit"),
            milliseconds,
        )

    def put_and_view(
        self, name: str, milliseconds: float | None = None, runs: TorchstoreRuns = PUT_AND_GET_RUNS, note: str = ""
    ) -> None:
        """Measures a put and a get of views together."""
        pair = self.pair
        self.race_both(
            f"{name} put and views",
            f"a new version, views{note}",
            tssd_runner(timed(pair.put_and_get_views, before=pair.drop_views), pair.check_views),
            runs,
            self.copy_runner(),
            milliseconds,
        )
        pair.drop_views()

    def race_both(
        self,
        case: str,
        description: str,
        our_runner: Runner,
        runs: TorchstoreRuns,
        limit: Runner,
        milliseconds: float | None,
    ) -> None:
        without_targets = [(name, run, None) for name, run in runs]
        peers = torchstore_runners(self.peer, TorchstoreProcess.check_get, *without_targets)
        self.race(case, description, our_runner, *peers, limit, milliseconds=milliseconds)

    def copy_runner(self, target: float | None = None) -> Runner:
        """Returns the runner of a copy that runs once before it is timed.

        Otherwise its threads would be asleep, and a core might still be busy with the previous runner.
        """
        return Runner(COPY, timed(self.copy, before=self.copy), "limit", target)

    def copy(self) -> None:
        for target, tensor in self.copies:
            target.copy_(tensor)

    def copy_shared(self) -> None:
        """Copies the state dict to new memory that could be shared."""
        left = torch.frombuffer(mmap.mmap(-1, self.model.nbytes), dtype=torch.uint8)
        for tensor in iter_tensors(self.model.state):
            left[: tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            left = left[tensor.nbytes :]


def single(rounds: Rounds, torchstore: TorchstoreProcess | None) -> None:
    """Measures puts and gets of 400 tensors, each under its own key. The slowest call of a round counts.

    On a shared machine, one of some thousand round trips through a plain socket takes milliseconds. There are enough
    rounds that most of them have no such outlier.
    """
    model = model_from_spec("uniform:400:1638400")
    state = model.state
    with ClientPair(model, copy_structure(state)) as pair, EchoProcess() as echo_process:
        writer, reader, into = pair.writer, pair.reader, pair.into
        calls: dict[str, Callable[[str], object]] = {
            "put": lambda key: writer.put(key, state[key]),
            "get": lambda key: reader.get(key),
            "get in place": lambda key: reader.get(key, into[key]),
            echo.RUNNER_NAME: lambda _: echo_process.round_trip(),
        }
        slowest: dict[str, list[float]] = {name: [] for name in calls}
        medians: dict[str, list[float]] = {name: [] for name in calls}
        peer_times: list[list[float]] = []
        if torchstore is not None:
            torchstore.select_model(model, None)
        last = rounds.warmup + 3 * rounds.iterations - 1
        for number in range(last + 1):
            counts = number >= rounds.warmup
            zero_tensors(into)
            for name, call in calls.items():
                timed_calls = {key: timed(partial(call, key)) for key in state}
                # A view retains its version. So views are dropped at once; only those of the last round are checked.
                seconds = [run_once(each, keep=number == last) for each in timed_calls.values()]
                if counts:
                    slowest[name].append(max(seconds))
                    medians[name].append(statistics.median(seconds))
                if number == last and name == "get":
                    expect_same({key: each.take() for key, each in timed_calls.items()}, state)
            if torchstore is not None:
                reply = torchstore.request("single", KEY)
                if counts:
                    peer_times.append(reply)
        expect_same(into, state)
        for statistic, times, first in (("the slowest", slowest, 0), ("the median", medians, 2)):
            limit = times.pop(echo.RUNNER_NAME)
            for name, seconds in times.items():
                rows: list[tuple[str, Role, list[float]]] = [("tssd", "ours", seconds)]
                column = first + (name != "put")
                if peer_times and name != "get":
                    rows.append((REUSED_KEY, "peer", [reply[column] for reply in peer_times]))
                rows.append((echo.RUNNER_NAME, "limit", limit))
                report(
                    f"single {name}",
                    f"{statistic} of 400 calls, 4 KB each",
                    *(Runner(runner, already_measured, role) for runner, role, _ in rows),
                    times={runner: measured for runner, _, measured in rows},
                    model=model,
                    milliseconds=1 if times is slowest else None,
                )


def run_once(call: TimedCall, *, keep: bool) -> float:
    seconds = call()
    if not keep:
        call.take()
    return seconds


def already_measured() -> float:
    """Stands for the operation of a runner that was measured before."""
    raise AssertionError("their turns are over")


def sum_bytes(state: State) -> int:
    """Reads every byte, in words of 8 bytes. Returns the sum."""
    total = 0
    for tensor in iter_tensors(state):
        flat = tensor.view(torch.uint8).flatten()
        words = flat[: flat.numel() // 8 * 8].view(torch.int64)
        total += int(words.sum()) + int(flat[words.nbytes :].sum())
    return total
