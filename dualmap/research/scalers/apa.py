"""AIBrix's autoscaler APA: a figure's mean over a window against a target, with a band in which nothing changes.

wanted = ceil(size · figure / target), up where figure / target exceeds 1 + ``up_fluctuation``, down where it is below
1 - ``down_fluctuation``; a rate limit of two for each step; a short stable window and a panic window that is shorter.
Source: AIBrix, ``pkg/controller/podautoscaler`` (APA) and its documentation, with the KV memory in use as the figure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from math import ceil

from dualmap.scheduling.scaling.scale_plan import FleetFigures, Plan
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings

PERIOD_S = 10.0
MAX_UP_RATE = 2.0
MAX_DOWN_RATE = 2.0
DOWN_DELAY_S = 300.0


@dataclass(slots=True)
class Apa:
    """One autoscaler."""

    settings: AutoscaleSettings
    _: KW_ONLY
    target: float
    """Share of KV memory in use, for each instance."""
    up_fluctuation: float = 0.1
    down_fluctuation: float = 0.2
    window_s: float = 60.0
    _seen: deque[FleetFigures] = field(default_factory=deque)
    _below_since_s: float | None = None
    _next_s: float = 0.0
    _size: int = 0

    def observe(self, now: FleetFigures) -> None:
        self._seen.append(now)
        while now.at_s - self._seen[0].at_s > self.window_s:
            self._seen.popleft()

    def plan(self) -> Plan:
        now = self._seen[-1]
        if now.at_s < self._next_s or not now.ready:
            return Plan(self._size or now.size, "between two rounds")
        self._next_s = now.at_s + PERIOD_S
        demand = sum(each.kv_demand for each in self._seen) / len(self._seen)
        ratio = demand / max(1, now.ready) / self.target
        wanted = now.size
        if ratio > 1 + self.up_fluctuation:
            wanted = min(ceil(now.ready * ratio), ceil(MAX_UP_RATE * now.size))
        low = ratio < 1 - self.down_fluctuation
        self._below_since_s = (self._below_since_s or now.at_s) if low else None
        if self._below_since_s is not None and now.at_s - self._below_since_s >= DOWN_DELAY_S:
            wanted = max(ceil(now.ready * ratio), ceil(now.size / MAX_DOWN_RATE))
        bounds = self.settings
        self._size = max(bounds.min_instances, min(bounds.max_instances, wanted))
        return Plan(self._size, f"KV memory at {ratio:.2f} of the target {self.target:g}")
