"""Races: ours and others take turns in one process, so that what else the machine does slows all alike.

A figure is the median of its rounds, a ratio the median of the ratios within rounds: how many times as fast
ours was. Above 1 ours is faster; a target is what the ratio must reach, or the milliseconds it may take.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import records
from model import Model

#: Ours, what a user would pick instead, what the machine itself takes, or a reference that is none of them.
Role = Literal["ours", "peer", "limit", "also"]
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Rounds:
    """How often all take their turn: what is counted, and before that, what is not."""

    iterations: int
    warmup: int

    def at_most(self, iterations: int) -> Rounds:
        """The same, but not more often than that."""
        return replace(self, iterations=min(self.iterations, iterations))


@dataclass(frozen=True)
class Runner:
    """Something that is timed: it runs once and says how many seconds that took."""

    name: str
    run: Callable[[], float]
    role: Role = "peer"
    #: How many times as fast ours must be.
    target: float | None = None
    #: Fails unless its last turn has brought what it should. It is given what the work has returned.
    check: Callable[[Any], object] | None = None


class Timed:
    """Work that is timed here. What it returns lives until the clock has stopped, and somebody takes it."""

    def __init__(
        self,
        work: Callable[[], object],
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self.work, self.before, self.after = work, before, after
        #: The page faults of each turn that needed no disk.
        self.faults: list[int] = []
        self.result: object = None

    def __call__(self) -> float:
        """Its seconds; what happens before and after takes none."""
        if self.before is not None:
            self.before()
        faults = minor_faults()
        start = time.perf_counter()
        self.result = self.work()
        seconds = time.perf_counter() - start
        self.faults.append(minor_faults() - faults)
        if self.after is not None:
            self.after()
        return seconds

    def take(self) -> object:
        """What was returned last: from now on only the caller has it."""
        result, self.result = self.result, None
        return result


def timed(
    work: Callable[[], object],
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> Timed:
    return Timed(work, before, after)


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def ours(run: Callable[[], float], check: Callable[[Any], object] | None = None) -> Runner:
    return Runner("tssd", run, "ours", check=check)


def race(
    case: str,
    what: str,
    *runners: Runner,
    model: Model,
    rounds: Rounds,
    milliseconds: float | None = None,
) -> None:
    """Lets all take turns, and says how each did. The first runner is ours."""
    times = measure(runners, rounds)
    report(case, what, *runners, times=times, model=model, milliseconds=milliseconds)


def measure(runners: Sequence[Runner], rounds: Rounds) -> Times:
    """The seconds of each, round by round. What each has read last is looked at before another turn can change it."""
    times: Times = {runner.name: [] for runner in runners}
    last = rounds.warmup + rounds.iterations - 1
    for number in range(last + 1):
        # Nobody always comes after the same one.
        for runner in random.Random(number).sample(runners, len(runners)):
            gc.collect()
            seconds = runner.run()
            result = runner.run.take() if isinstance(runner.run, Timed) else None
            if number == last and runner.check is not None:
                runner.check(result)
            del result
            if number >= rounds.warmup:
                times[runner.name].append(seconds)
    return times


def report(
    case: str,
    what: str,
    *runners: Runner,
    times: Times,
    model: Model,
    milliseconds: float | None = None,
) -> None:
    """Prints the row of each, and records them."""
    mine = times[runners[0].name]
    # Where a time is asked for, or there are few bytes, bytes per second say nothing.
    is_rate = milliseconds is None and model.nbytes > 1e7
    print(f"{case}: {what}, {model} ({len(mine)} rounds, interleaved; medians)")
    targets: list[dict[str, Any]] = []
    if milliseconds is not None:
        targets.append({"milliseconds": milliseconds})
    rows = []
    for runner in runners:
        own = times[runner.name]
        median = statistics.median(own)
        line = f"  {runner.name:<38} {median * 1e3:>9.3f} ms ({min(own) * 1e3:.1f}..{max(own) * 1e3:.1f})"
        if is_rate:
            line += f"{model.nbytes / 1e9 / median:>8.2f} GB/s"
        row: dict[str, Any] = {"name": runner.name, "role": runner.role, "seconds": own}
        if runner.role != "ours":
            ratio = statistics.median(theirs / each for theirs, each in zip(own, mine, strict=True))
            line += f"   ratio {ratio:>7.3f}"
            if runner.target is not None:
                targets.append({"of": runner.name, "speed": runner.target})
                line += f"   target {runner.target:g}: {verdict(ratio >= runner.target)}"
        elif milliseconds is not None:
            line += f"   target {milliseconds:g} ms: {verdict(median * 1e3 <= milliseconds)}"
        if isinstance(runner.run, Timed):
            row["counts"] = {"minor faults": round(statistics.median(runner.run.faults[-len(own) :]))}
        rows.append(row)
        print(line, flush=True)
    print()
    rows[0]["targets"] = targets
    size = {"bytes": model.nbytes if is_rate else None, "tensors": model.count}
    records.write("race", {"case": case, "what": what, "state_dict": model.name, **size, "runners": rows})


def verdict(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"
