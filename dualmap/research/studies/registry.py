"""Every study by its name. A study is a function from a plan and a bench to a section of a report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType

from dualmap.research.bench import Bench
from dualmap.research.report import Section
from dualmap.research.studies.autoscaling import autoscaling_section
from dualmap.research.studies.balance import balance_section
from dualmap.research.studies.constant_load import constant_load_section
from dualmap.research.studies.disaggregation import disaggregation_section
from dualmap.research.studies.hotspots import hotspot_section
from dualmap.research.studies.orders import orders_section, prefill_first_section
from dualmap.research.studies.overhead import overhead_section
from dualmap.research.studies.plan import Plan
from dualmap.research.studies.prefixes import key_length_section, shared_prefix_section
from dualmap.research.studies.rates import ablation_section, capacity_section, goodput_section, pareto_section
from dualmap.research.studies.scaling import elasticity_section, scalability_section
from dualmap.research.suites.study import suite_section
from dualmap.research.suites.suite import SUITES, Suite

Study = Callable[[Plan, Bench], Section]
PAPER: Mapping[str, Study] = MappingProxyType(
    {
        "capacity": capacity_section,
        "goodput": goodput_section,
        "pareto": pareto_section,
        "ablation": ablation_section,
        "orders": orders_section,
        "prefill_first": prefill_first_section,
        "hotspots": hotspot_section,
        "elasticity": elasticity_section,
        "autoscaling": autoscaling_section,
        "constant_load": constant_load_section,
        "scalability": scalability_section,
        "disaggregation": disaggregation_section,
        "key_lengths": key_length_section,
        "prefixes": shared_prefix_section,
        "balance": balance_section,
        "overhead": overhead_section,
    }
)
"""The paper's experiments and what belongs to them: the evaluation, in the order of its report."""


def _of_suite(suite: Suite, plan: Plan, bench: Bench) -> Section:
    """A suite says itself how much it runs: the plan changes nothing."""
    return suite_section(suite, bench)


STUDIES: Mapping[str, Study] = MappingProxyType(
    {**PAPER, **{name: partial(_of_suite, suite) for name, suite in SUITES.items()}}
)
"""The paper's, then the suites. A new study is a function, and its name here."""


def run_studies(plan: Plan, bench: Bench, wanted: Collection[str] = tuple(PAPER)) -> list[Section]:
    """The sections of the studies that are wanted, in the order of ``STUDIES``. Raises SimulationError."""
    return [study(plan, bench) for name, study in STUDIES.items() if name in wanted]
