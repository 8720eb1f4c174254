"""The experiment with a constant load says what it counts as a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dualmap.research.bench import Bench
from dualmap.research.run import Run
from dualmap.research.studies.constant_load import FOUND_S, constant_load_section, in_words
from dualmap.research.studies.plan import QUICK
from dualmap.simulation.figures.results import RunResult, SizeChange

TINY = replace(QUICK, toolagent_requests=100, skip_requests=20, scaling_requests=60, constant_s=20, constant_seeds=2)


def test_changes_are_told_by_minute() -> None:
    assert in_words([SizeChange(95.0, 4, 5, "overload"), SizeChange(600.0, 5, 4, "slack")]) == (
        "4 to 5 after 2 min, 5 to 4 after 10 min"
    )
    assert in_words([]) == "none"


def test_only_changes_after_the_size_was_found_count() -> None:
    changes = (SizeChange(FOUND_S, 4, 5, "overload"), SizeChange(FOUND_S + 1, 5, 4, "slack"))

    class Changing(Bench):
        """The first run changes its size twice, the others never."""

        def results(self, name: str, runs: Sequence[Run]) -> list[RunResult]:
            assert [run.workload.instances for run in runs] == [4, 4, 4, 4, 8, 8], "three loads, two seeds each"
            first, *others = Bench.results(self, name, runs)
            return [replace(first, changes=changes), *(replace(one, changes=()) for one in others)]

    section = constant_load_section(TINY, Changing())

    assert section.findings[0].startswith("Constant load: 1 changes after the size was found, in 6 runs")
    assert "; 5 runs have none" in section.findings[0]
    first, second = section.tables[0].rows[:2]
    assert (first[1], *first[-2:]) == (1, "4 to 5 after 15 min", "5 to 4 after 15 min")
    assert (second[1], *second[-2:]) == (2, "none", "none")
