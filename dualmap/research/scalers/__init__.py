"""Scale plans by name: the fleet's own, and those of other projects, at the same interface and on the same figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dualmap.research.scalers.apa import Apa
from dualmap.research.scalers.dynamo import DynamoPlanner
from dualmap.research.scalers.hpa import Hpa
from dualmap.scheduling.scaling.scale_job import Planner
from dualmap.scheduling.scaling.scale_plan import ScalePlanner, ScaleRule
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings

__all__ = ["SCALERS", "Scaler"]


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


@dataclass(frozen=True, slots=True)
class Scaler:
    """The plan of a name, with parameters of its own: what makes the planner of an ``Autoscale``."""

    name: str
    options: tuple[tuple[str, float], ...] = ()

    def __call__(self, settings: AutoscaleSettings) -> Planner:
        """A plan with a memory of its own."""
        return SCALERS[self.name](settings, dict(self.options))

    @classmethod
    def parse(cls, text: str) -> Scaler:
        """The scaler of ``NAME[:OPTION=VALUE+…]``, as ``dynamo:queue_up=2+kv_up=0.4``. Raises ValueError."""
        name, _, options = text.partition(":")
        if name not in SCALERS:
            raise ValueError(f"there is no scaler {name!r}; known are {', '.join(SCALERS)}")
        pairs = [each.partition("=") for each in options.split("+") if each]
        return cls(name, tuple((option, float(figure)) for option, _, figure in pairs))
