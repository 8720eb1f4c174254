"""The evaluation from its plan to its sections."""

from __future__ import annotations

from simulation.evaluate.autoscaling import autoscaling_section
from simulation.evaluate.balance import balance_section
from simulation.evaluate.disaggregation import disaggregation_section
from simulation.evaluate.hotspots import hotspot_section
from simulation.evaluate.orders import orders_section, prefill_first_section
from simulation.evaluate.overhead import overhead_section
from simulation.evaluate.plan import Plan
from simulation.evaluate.prefixes import key_length_section, shared_prefix_section
from simulation.evaluate.rates import (
    ablation_section,
    capacity_section,
    goodput_section,
    pareto_section,
    run_rates,
)
from simulation.evaluate.scaling import elasticity_section, scalability_section
from simulation.evaluate.section import Section
from simulation.evaluate.work import Worker


def evaluate(plan: Plan, worker: Worker) -> list[Section]:
    """Every experiment of the plan. Raises SimulationError before anything long runs if a trace is broken."""
    measured = run_rates(plan, worker)
    return [
        capacity_section(measured),
        goodput_section(plan, measured),
        pareto_section(plan, measured),
        ablation_section(plan, measured),
        orders_section(plan, measured, worker),
        prefill_first_section(plan, worker),
        hotspot_section(plan, worker),
        elasticity_section(plan, worker),
        autoscaling_section(plan, worker),
        scalability_section(plan, worker),
        disaggregation_section(plan, worker),
        key_length_section(plan, worker),
        shared_prefix_section(plan),
        balance_section(plan, worker),
        overhead_section(plan),
    ]
