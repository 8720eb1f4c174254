"""Balls into bins over rings: what one, two and more choices do to the most loaded instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from dualmap.research.bench import Bench
from dualmap.research.report import Plot, Section
from dualmap.research.studies.plan import Plan
from dualmap.research.table import Cell, Table
from dualmap.scheduling.state.ring import RING_SEEDS, Ring
from dualmap.simulation.figures import plots

CHOICES = (1, 2, 3, 4, 5)
SIZES = (8, 16, 24, 32)
_MORE_SEEDS = (0x165667B19E3779F9, 0x27D4EB2F165667C5, 0x85EBCA77C2B2AE63)
VIRTUAL_NODES = 128


@dataclass(frozen=True, slots=True)
class BallsJob:
    """``requests`` distinct keys onto ``instances`` over ``choices`` rings, ``trials`` times."""

    choices: int
    instances: int
    requests: int
    trials: int
    seed: int


def rings(choices: int, instances: int) -> tuple[Ring, ...]:
    """Independent rings over the same instances; the first two are the product's own."""
    members = [f"i{number:03d}" for number in range(instances)]
    seeds = (*RING_SEEDS, *_MORE_SEEDS)[:choices]
    return tuple(Ring(seed, VIRTUAL_NODES).with_change((), members) for seed in seeds)


def max_load_deviation(job: BallsJob) -> float:
    """Mean over the trials of (largest load - mean load) / mean load, every ball to its least loaded choice."""
    candidates_of = rings(job.choices, job.instances)
    rng = Random(job.seed)
    deviations = []
    for _ in range(job.trials):
        loads = {f"i{number:03d}": 0 for number in range(job.instances)}
        for _ in range(job.requests):
            key = rng.getrandbits(64)
            chosen = min((ring.successor(key) for ring in candidates_of), key=loads.__getitem__)
            loads[chosen] += 1
        deviations.append(max(loads.values()) * job.instances / job.requests - 1)
    return fmean(deviations)


def balance_section(plan: Plan, bench: Bench) -> Section:
    jobs = [
        BallsJob(choices, instances, plan.balance_requests, plan.balance_trials, plan.seed)
        for choices in CHOICES
        for instances in SIZES
    ]
    deviations = dict(zip(jobs, bench.map("choices", max_load_deviation, jobs), strict=True))
    series: dict[str, plots.Series] = {
        f"n = {instances}": (
            CHOICES,
            [deviation for job, deviation in deviations.items() if job.instances == instances],
        )
        for instances in SIZES
    }
    rows: list[list[Cell]] = [
        [choices, *(100 * deviations[job] for job in jobs if job.choices == choices)] for choices in CHOICES
    ]
    return Section(
        name="balance",
        title="Maximum load deviation by number of choices",
        question=(
            "Two choices instead of one shrink the worst overload from the order of sqrt(m log n / n) to log log n; "
            "more than two add little. Distinct keys, each to the least loaded of its d candidates on d rings: how "
            "much more than the mean the most loaded instance has."
        ),
        findings=[_finding(rows)],
        tables=[Table("Maximum over mean, excess in %", ("choices d", *(f"n = {n}" for n in SIZES)), rows)],
        plots=[Plot("Excess over the mean", plots.lines(series, x="choices d", y="max load / mean - 1", log_y=True))],
    )


def _finding(rows: Sequence[Sequence[Cell]]) -> str:
    one, two, three = ([float(cell) for cell in row[1:]] for row in rows[:3])
    return (
        f"From one choice to two the excess falls from {min(one):.0f}-{max(one):.0f} % to "
        f"{min(two):.2f}-{max(two):.2f} %; a third leaves {min(three):.2f}-{max(three):.2f} %. With one ring most of "
        f"it is the ring's own unevenness at {VIRTUAL_NODES} virtual nodes, which a second choice evens out too."
    )
