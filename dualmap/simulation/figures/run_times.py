"""Times of whole runs of agents, from the first turn to the end of the last answer.

Longer runs are more likely to be cut off by the end of a simulation. So the figures are those of the runs that began in
the first half of the time that counts, whether they ended or not: one that did not counts with its time until the load
ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Protocol

from dualmap.simulation.workload.trace_figures import quantile

SHORT_SHARE = 1 / 3


class TurnOutcome(Protocol):
    """The figures of a turn that the times of runs are made from."""

    @property
    def run(self) -> str: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def finish_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class RunTimes:
    """The times of the runs that began in the first half of the time that counts."""

    begun: int
    ended: int
    """Those of them that ended."""
    mean_s: float
    p50_s: float
    short_p90_s: float
    """P90 of the third of them that has the fewest turns."""
    ended_per_s: float
    """Runs that ended a second, of all, while turns arrived."""


@dataclass(slots=True)
class _Run:
    first_s: float
    last_s: float
    open_turns: int


def run_times(outcomes: Iterable[TurnOutcome], turns: Mapping[str, int], from_s: float) -> RunTimes | None:
    """The figures of runs, of which ``turns`` has the number of their turns; None where there are none. Turns count
    from ``from_s`` on."""
    runs: dict[str, _Run] = {}
    until_s = from_s
    for one in outcomes:
        until_s = max(until_s, one.arrival_s)
        if one.run:
            run = runs.setdefault(one.run, _Run(one.arrival_s, one.arrival_s, turns[one.run]))
            run.first_s = min(run.first_s, one.arrival_s)
            if one.finish_s is not None:
                run.open_turns -= 1
                run.last_s = max(run.last_s, one.finish_s)
    half_s = (from_s + until_s) / 2
    begun = [(turns[name], run) for name, run in runs.items() if from_s <= run.first_s <= half_s]
    if not begun:
        return None
    times = [(length, (run.last_s if run.open_turns == 0 else until_s) - run.first_s)
             for length, run in sorted(begun, key=lambda each: each[0])]  # fmt: skip
    ordered = sorted(time_s for _, time_s in times)
    short = sorted(time_s for _, time_s in times[: max(1, round(len(times) * SHORT_SHARE))])
    ended = sum(run.open_turns == 0 and from_s <= run.last_s <= until_s for run in runs.values())
    return RunTimes(
        begun=len(begun),
        ended=sum(run.open_turns == 0 for _, run in begun),
        mean_s=fmean(ordered),
        p50_s=quantile(ordered, 0.5),
        short_p90_s=quantile(short, 0.9),
        ended_per_s=ended / (until_s - from_s) if until_s > from_s else inf,
    )
