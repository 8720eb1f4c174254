"""The evaluation from its plan to its sections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import MappingProxyType

from dualmap.research.evaluate.autoscaling import autoscaling_section
from dualmap.research.evaluate.balance import balance_section
from dualmap.research.evaluate.constant_load import constant_load_section
from dualmap.research.evaluate.disaggregation import disaggregation_section
from dualmap.research.evaluate.hotspots import hotspot_section
from dualmap.research.evaluate.orders import orders_section, prefill_first_section
from dualmap.research.evaluate.overhead import overhead_section
from dualmap.research.evaluate.plan import Plan
from dualmap.research.evaluate.prefixes import key_length_section, shared_prefix_section
from dualmap.research.evaluate.rates import (
    RateRuns,
    ablation_section,
    capacity_section,
    goodput_section,
    pareto_section,
    run_rates,
)
from dualmap.research.evaluate.scaling import elasticity_section, scalability_section
from dualmap.research.evaluate.section import Section
from dualmap.research.evaluate.work import Worker

Experiment = Callable[[Plan, Worker, Callable[[], list[RateRuns]]], Section]
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        "capacity": lambda plan, worker, rates: capacity_section(rates()),
        "goodput": lambda plan, worker, rates: goodput_section(plan, rates()),
        "pareto": lambda plan, worker, rates: pareto_section(plan, rates()),
        "ablation": lambda plan, worker, rates: ablation_section(plan, rates()),
        "orders": lambda plan, worker, rates: orders_section(plan, rates(), worker),
        "prefill_first": lambda plan, worker, rates: prefill_first_section(plan, worker),
        "hotspots": lambda plan, worker, rates: hotspot_section(plan, worker),
        "elasticity": lambda plan, worker, rates: elasticity_section(plan, worker),
        "autoscaling": lambda plan, worker, rates: autoscaling_section(plan, worker),
        "constant_load": lambda plan, worker, rates: constant_load_section(plan, worker),
        "scalability": lambda plan, worker, rates: scalability_section(plan, worker),
        "disaggregation": lambda plan, worker, rates: disaggregation_section(plan, worker),
        "key_lengths": lambda plan, worker, rates: key_length_section(plan, worker),
        "prefixes": lambda plan, worker, rates: shared_prefix_section(plan),
        "balance": lambda plan, worker, rates: balance_section(plan, worker),
        "overhead": lambda plan, worker, rates: overhead_section(plan),
    }
)
"""By the name of their section, in the order of the report. The runs at all rates are made once, for all that ask."""


def evaluate(plan: Plan, worker: Worker, wanted: Collection[str] = tuple(EXPERIMENTS)) -> list[Section]:
    """The experiments of the plan that are wanted, by name. Raises SimulationError."""
    rates = cache(lambda: run_rates(plan, worker))
    return [experiment(plan, worker, rates) for name, experiment in EXPERIMENTS.items() if name in wanted]
