"""Scale plans by name: the fleet's own, and those of other projects, at the same interface and on the same figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dualmap.scheduling.scaling.scale_job import Planner
from dualmap.scheduling.scaling.scale_plan import ScalePlanner, ScaleRule
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.simulation.virtual_time.scalers.apa import Apa
from dualmap.simulation.virtual_time.scalers.dynamo import DynamoPlanner
from dualmap.simulation.virtual_time.scalers.hpa import Hpa

__all__ = ["SCALERS", "planner_of"]


def _own(settings: AutoscaleSettings, options: Mapping[str, Any]) -> Planner:
    rule = ScaleRule(settings.min_instances, settings.max_instances, settings.margin, settings.idle_s)
    return ScalePlanner(replace(rule, **options))


SCALERS: dict[str, Callable[[AutoscaleSettings, Mapping[str, Any]], Planner]] = {
    "dualmap": _own,
    "hpa-queue": lambda settings, options: Hpa(settings, "queue", **{"target": 4.0, **options}),
    "hpa-kv": lambda settings, options: Hpa(settings, "kv", **{"target": 0.15, **options}),
    "apa": lambda settings, options: Apa(settings, **{"target": 0.15, **options}),
    "dynamo": lambda settings, options: DynamoPlanner(
        settings, **{"queue_up": 1.0, "queue_down": 0.5, "kv_up": 0.3, "kv_down": 0.12, **options}
    ),
}
"""Targets and thresholds by default are those at which each has the fewest instance-hours on the simulated day with as
many on time as the fleet's own plan; with their projects' defaults they are late or take more."""


def planner_of(name: str, settings: AutoscaleSettings, options: Mapping[str, Any]) -> Planner:
    """A plan of its own memory."""
    return SCALERS[name](settings, options)
