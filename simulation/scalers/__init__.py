"""Scale plans by name: the fleet's own, and those of other projects, at the same interface and on the same figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scheduling.scale_job import Planner
from scheduling.scale_plan import ScalePlanner, ScaleRule
from scheduling.scale_settings import AutoscaleSettings

__all__ = ["SCALERS", "planner_of"]


def _own(settings: AutoscaleSettings, options: Mapping[str, float]) -> Planner:
    return ScalePlanner(ScaleRule(settings.min_instances, settings.max_instances, settings.start_s, **options))


SCALERS: dict[str, Callable[[AutoscaleSettings, Mapping[str, float]], Planner]] = {"dualmap": _own}


def planner_of(name: str, settings: AutoscaleSettings, options: Mapping[str, float]) -> Planner:
    """A plan of its own memory."""
    return SCALERS[name](settings, options)
