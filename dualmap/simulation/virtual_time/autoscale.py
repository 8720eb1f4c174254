"""A run whose fleet changes its size itself: by which settings, and by which plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dualmap.scheduling.scaling.scale_job import Planner
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings


@dataclass(frozen=True, slots=True)
class Autoscale:
    """How the fleet of a run scales itself."""

    settings: AutoscaleSettings
    planner_of: Callable[[AutoscaleSettings], Planner] | None = None
    """Makes the plan that decides the size; None: the fleet's own."""

    @property
    def most(self) -> int:
        """Instances that there are at most, decode instances included where they scale."""
        decode = self.settings.decode
        return self.settings.max_instances + (0 if decode is None else decode.max_instances)
