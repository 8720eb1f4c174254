"""Results as a table and as words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dualmap.research.chaos.checker import Outcome
from dualmap.research.chaos.stage import Result, Scenario
from dualmap.research.table import ABSENT, Cell, Table

_OUTCOMES = (
    Outcome.RIGHT,
    Outcome.WRONG,
    Outcome.REFUSED,
    Outcome.CUT,
    Outcome.BROKEN,
    Outcome.LOST,
    Outcome.STUCK,
    Outcome.LEFT,
)
COLUMNS = ("scenario", "requests", *_OUTCOMES, "longest gap s", "recovery s", "books", "passed")
_WHYS_SHOWN = 3


def scenarios_table(scenarios: Iterable[Scenario]) -> Table:
    """The scenarios that can be run, and the outcomes other than right answers that clients may see."""
    rows: list[list[Cell]] = [
        [scenario.name, scenario.symptom or ABSENT, ", ".join(sorted(scenario.allowed)) or "nothing"]
        for scenario in scenarios
    ]
    return Table("Scenarios", ("scenario", "fault", "clients may notice"), rows)


def results_table(results: Sequence[Result]) -> Table:
    """One row for each scenario, and one for all."""
    rows: list[list[Cell]] = [_row(result) for result in results]
    if len(results) > 1:
        sums = [sum(result.tally.outcomes[outcome] for result in results) for outcome in _OUTCOMES]
        recoveries = [result.recovery_s for result in results if result.recovery_s is not None]
        rows.append(
            [
                "all",
                sum(result.tally.requests for result in results),
                *sums,
                max(result.tally.longest_gap_s for result in results),
                max(recoveries, default=ABSENT),
                "exact" if all(result.books == "exact" for result in results) else "not exact",
                f"{sum(not result.problems for result in results)} of {len(results)}",
            ]
        )
    return Table("Chaos", COLUMNS, rows)


def merged(results: Sequence[Result]) -> list[Result]:
    """One result for each scenario that a soak has run, with its worst recovery and all its problems."""
    found: dict[str, Result] = {}
    for result in results:
        one = found.setdefault(result.scenario.name, Result(result.scenario, recovery_s=0.0, books=result.books))
        one.tally.add(result.tally)
        one.problems += result.problems
        if one.recovery_s is not None:
            one.recovery_s = None if result.recovery_s is None else max(one.recovery_s, result.recovery_s)
    return [found[name] for name in sorted(found)]


def said(result: Result) -> list[str]:
    """Lines about a scenario that did not pass."""
    if not result.problems:
        return []
    forbidden = [(outcome, why) for outcome, why in result.tally.whys if outcome not in result.scenario.allowed]
    return [f"{result.scenario.name}: {problem}" for problem in result.problems] + [
        f"    {outcome}: {why}" for outcome, why in forbidden[:_WHYS_SHOWN]
    ]


def _row(result: Result) -> list[Cell]:
    return [
        result.scenario.name,
        result.tally.requests,
        *(result.tally.outcomes[outcome] for outcome in _OUTCOMES),
        result.tally.longest_gap_s,
        ABSENT if result.recovery_s is None else result.recovery_s,
        result.books,
        "no" if result.problems else "yes",
    ]
