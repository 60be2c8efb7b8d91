"""Comparison of runners that take turns in each round.

So other load on the machine slows all of them alike.

A figure is the median of the rounds. A ratio is the median of the ratios within the rounds: the speed of tssd as a
multiple of that of the runner. Above 1, tssd is faster. A target is the minimum of the ratio, or the maximum of the
time in milliseconds.
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

#: "ours": tssd; "peer": a library that a user would use instead; "limit": the limit of the machine; "also": any other
#: reference.
Role = Literal["ours", "peer", "limit", "also"]
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Rounds:
    """The number of rounds: `iterations` that count, after `warmup` rounds that do not."""

    iterations: int
    warmup: int

    def at_most(self, iterations: int) -> Rounds:
        """Returns a copy with at most this number of iterations."""
        return replace(self, iterations=min(self.iterations, iterations))


@dataclass(frozen=True)
class Runner:
    """A measured operation. `run` executes it once and returns its time in seconds."""

    name: str
    run: Callable[[], float]
    role: Role = "peer"
    #: The required speed of tssd, as a multiple of the speed of this runner.
    target: float | None = None
    #: Raises an error unless the last run had the right result. Its argument is the return value of the work.
    check: Callable[[Any], object] | None = None


class TimedCall:
    """A function that is timed in this process.

    Its result stays alive until `take`, so that its drop is not timed.
    """

    def __init__(
        self,
        work: Callable[[], object],
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self.work, self.before, self.after = work, before, after
        #: The number of minor page faults of each run.
        self.faults: list[int] = []
        self.result: object = None

    def __call__(self) -> float:
        """Runs the function and returns its time in seconds, without `before` and `after`."""
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
        """Returns the last result, and drops it here."""
        result, self.result = self.result, None
        return result


def timed(
    work: Callable[[], object],
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> TimedCall:
    return TimedCall(work, before, after)


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def tssd_runner(run: Callable[[], float], check: Callable[[Any], object] | None = None) -> Runner:
    return Runner("tssd", run, "ours", check=check)


def race(
    case: str,
    description: str,
    *runners: Runner,
    model: Model,
    rounds: Rounds,
    milliseconds: float | None = None,
) -> None:
    """Measures all runners and reports their times. The first runner must be that of tssd."""
    times = measure(runners, rounds)
    report(case, description, *runners, times=times, model=model, milliseconds=milliseconds)


def measure(runners: Sequence[Runner], rounds: Rounds) -> Times:
    """Returns the times of each runner, in seconds, by round.

    The result of the last run of each runner is checked before another run can change it.
    """
    times: Times = {runner.name: [] for runner in runners}
    last = rounds.warmup + rounds.iterations - 1
    for number in range(last + 1):
        # The order is random, so that no runner always follows the same one.
        for runner in random.Random(number).sample(runners, len(runners)):
            gc.collect()
            seconds = runner.run()
            result = runner.run.take() if isinstance(runner.run, TimedCall) else None
            if number == last and runner.check is not None:
                runner.check(result)
            del result
            if number >= rounds.warmup:
                times[runner.name].append(seconds)
    return times


def report(
    case: str,
    description: str,
    *runners: Runner,
    times: Times,
    model: Model,
    milliseconds: float | None = None,
) -> None:
    """Prints a row for each runner, and records the rows."""
    our_times = times[runners[0].name]
    # Bytes per second have no meaning if the target is a time, or if there are few bytes.
    is_rate = milliseconds is None and model.nbytes > 1e7
    print(f"{case}: {description}, {model} ({len(our_times)} rounds, interleaved; medians)")
    targets: list[dict[str, Any]] = []
    if milliseconds is not None:
        targets.append({"milliseconds": milliseconds})
    rows = []
    for runner in runners:
        seconds = times[runner.name]
        median = statistics.median(seconds)
        line = f"  {runner.name:<38} {median * 1e3:>9.3f} ms ({min(seconds) * 1e3:.1f}..{max(seconds) * 1e3:.1f})"
        if is_rate:
            line += f"{model.nbytes / 1e9 / median:>8.2f} GB/s"
        row: dict[str, Any] = {"name": runner.name, "role": runner.role, "seconds": seconds}
        if runner.role != "ours":
            ratio = statistics.median(other / our for other, our in zip(seconds, our_times, strict=True))
            line += f"   ratio {ratio:>7.3f}"
            if runner.target is not None:
                targets.append({"of": runner.name, "speed": runner.target})
                line += f"   target {runner.target:g}: {verdict(ratio >= runner.target)}"
        elif milliseconds is not None:
            line += f"   target {milliseconds:g} ms: {verdict(median * 1e3 <= milliseconds)}"
        if isinstance(runner.run, TimedCall):
            row["counts"] = {"minor faults": round(statistics.median(runner.run.faults[-len(seconds) :]))}
        rows.append(row)
        print(line, flush=True)
    print()
    rows[0]["targets"] = targets
    size = {"bytes": model.nbytes if is_rate else None, "tensors": model.count}
    records.write("race", {"case": case, "what": description, "state_dict": model.name, **size, "runners": rows})


def verdict(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"
