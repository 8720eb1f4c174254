"""Kubernetes' Horizontal Pod Autoscaler on one figure of the instances: the queue length, or the KV memory in use.

wanted = ceil(size · mean figure / target), nothing within a tolerance of 10 %. Down: the highest wanted number of the
stabilization window. Up: at most twice the size, or four more, in one period. The figures are a scrape old. Source: the
documentation of ``autoscaling/v2``, with its defaults; the target is a parameter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from math import ceil

from dualmap.scheduling.scaling.scale_plan import FleetFigures, Plan
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings

TOLERANCE = 0.1
PERIOD_S = 15.0
"""Time between two rounds of the controller, and between two scrapes."""


@dataclass(slots=True)
class Hpa:
    """One autoscaler."""

    settings: AutoscaleSettings
    figure: str
    """``queue`` or ``kv``."""
    _: KW_ONLY
    target: float
    """Target of the figure for each instance: waiting requests, or share of KV memory."""
    stabilization_s: float = 300.0
    _now: FleetFigures = field(default_factory=lambda: FleetFigures(0.0, 0))
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    _scraped: deque[tuple[float, float]] = field(default_factory=deque)
    _next_s: float = 0.0
    _size: int = 0

    def observe(self, now: FleetFigures) -> None:
        self._now = now
        whole = now.held_requests if self.figure == "queue" else now.kv_demand
        self._scraped.append((now.at_s, whole / max(1, now.ready)))
        while now.at_s - self._scraped[0][0] > PERIOD_S:
            self._scraped.popleft()

    def plan(self) -> Plan:
        now = self._now
        if now.at_s < self._next_s or not now.ready:
            return Plan(self._size or now.size, "between two rounds")
        self._next_s = now.at_s + PERIOD_S
        figure = self._scraped[0][1]
        ratio = figure / self.target
        wanted = now.size if abs(ratio - 1) <= TOLERANCE else ceil(now.ready * ratio)
        wanted = min(wanted, max(2 * now.size, now.size + 4))
        self._wanted.append((now.at_s, wanted))
        while now.at_s - self._wanted[0][0] > self.stabilization_s:
            self._wanted.popleft()
        if wanted < now.size:
            wanted = min(now.size, max(count for _, count in self._wanted))
        bounds = self.settings
        self._size = max(bounds.min_instances, min(bounds.max_instances, wanted))
        return Plan(self._size, f"{self.figure} {figure:.2f} for each of {now.ready}, target {self.target:g}")
