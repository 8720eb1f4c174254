"""A suite as a study among the others: its tables as a section of a report."""

from __future__ import annotations

from dualmap.research.bench import Bench
from dualmap.research.report import Section
from dualmap.research.suites.details import detail_tables, first_tables
from dualmap.research.suites.results import run_suite
from dualmap.research.suites.suite import Suite
from dualmap.research.table import counted
from dualmap.scheduling.settings import SchedulingSettings


def suite_section(suite: Suite, bench: Bench) -> Section:
    """The suite's runs over the default settings, as a section."""
    outcome = run_suite(suite, SchedulingSettings(), bench)
    return Section(
        name=suite.name,
        title=f"Suite {suite.name}",
        question=(
            f"{len(outcome.variants)} variants under {len(outcome.seeds)} workloads, {counted(suite.seeds)} of each, "
            f"{outcome.variants[0].name} against the best of the others. Means over the seeds, 95 % confidence."
        ),
        tables=[*first_tables(outcome), *detail_tables(outcome)],
    )
