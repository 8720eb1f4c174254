"""A load that stays the same must not change the fleet's size once it is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dualmap.research.bench import Bench
from dualmap.research.report import Section
from dualmap.research.run import Run
from dualmap.research.studies.autoscaling import elastic, started
from dualmap.research.studies.plan import Plan
from dualmap.research.table import Cell, Table
from dualmap.simulation.figures.results import RunResult, SizeChange

CONSTANT_LOADS = ((0.4, 4), (0.6, 4), (1.0, 8))
"""(part of what 8 instances sustain, instances at the start)."""
LEAST, MOST, START_S = 2, 12, 30.0
FOUND_S = 900.0
"""A fleet that knows nothing of its load has found its size by then."""


def constant_load_section(plan: Plan, bench: Bench) -> Section:
    """Three loads, each with several seeds."""
    loads = [(load, first, seed) for load, first in CONSTANT_LOADS for seed in range(1, plan.constant_seeds + 1)]
    planned = [_run(replace(plan, seed=plan.seed - 1 + seed), load, first) for load, first, seed in loads]
    runs = bench.results("a constant load", planned)
    later = [sum(change.at_s > FOUND_S for change in run.changes) for run in runs]
    rows: list[list[Cell]] = [
        [round(run.rate_per_s, 1), plan.seed - 1 + seed, first, 100 * run.effective_capacity, run.instance_hours,
         in_words([one for one in run.changes if one.at_s <= FOUND_S]),
         in_words([one for one in run.changes if one.at_s > FOUND_S])]
        for (_, first, seed), run in zip(loads, runs, strict=True)
    ]  # fmt: skip
    return Section(
        name="constant_load",
        title="A constant load",
        question=(
            "Flapping costs starts and caches. Tool&Agent requests at a rate that stays the same, and a fleet that has "
            f"{FOUND_S / 60:g} minutes to find its size: how often does it change afterwards?"
        ),
        findings=[_finding(runs, later, plan.constant_s)],
        tables=[
            Table(
                f"{plan.constant_s / 60:g} minutes of a constant load",
                ("requests/s", "seed", "from", "on time %", "instance hours", "while it finds its size", "after that"),
                rows,
            )
        ],
    )


def _run(plan: Plan, load: float, first: int) -> Run:
    requests = round(plan.rate(plan.like_generated(), load) * plan.constant_s)
    workload = plan.generated(f"flashcrowd:factor=1,span_s={plan.constant_s}", requests)
    return plan.run(started(workload, first), elastic(LEAST, MOST, START_S))


def in_words(changes: Sequence[SizeChange]) -> str:
    """The changes in words, such as ``4 to 5 after 20 min``."""
    return ", ".join(f"{one.size} to {one.wanted} after {one.at_s / 60:.0f} min" for one in changes) or "none"


def _finding(runs: Sequence[RunResult], later: Sequence[int], span_s: float) -> str:
    hours = len(runs) * max(0.0, span_s - FOUND_S) / 3600
    return (
        f"Constant load: {sum(later)} changes after the size was found, in {len(runs)} runs and {hours:.1f} hours; "
        f"{sum(not each for each in later)} runs have none. At least "
        f"{100 * min(run.effective_capacity for run in runs):.1f} % on time."
    )
