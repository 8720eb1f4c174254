"""Dynamo's load-based planner: every interval one instance more or one less, by prefill queue and KV load.

Up by one if a mean over the interval is above its upper threshold, down by one if all are below the lower ones; after a
change it waits for a grace period of intervals. Source: Dynamo, ``components/planner`` (load planner), defaults: 30 s
rounds over 10 s samples, KV load 0.9 and 0.5, prefill queue 0.5 and 0.2 requests for each instance, three rounds of
grace before a step down.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass, field

from dualmap.scheduling.scaling.scale_plan import FleetFigures, Plan
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings

INTERVAL_S = 30.0
GRACE_ROUNDS = 3


@dataclass(slots=True)
class DynamoPlanner:
    """One planner."""

    settings: AutoscaleSettings
    _: KW_ONLY
    queue_up: float = 0.5
    queue_down: float = 0.2
    kv_up: float = 0.9
    kv_down: float = 0.5
    _seen: deque[FleetFigures] = field(default_factory=deque)
    _next_s: float = INTERVAL_S
    _grace: int = 0
    _size: int = 0

    def observe(self, now: FleetFigures) -> None:
        self._seen.append(now)
        while now.at_s - self._seen[0].at_s > INTERVAL_S:
            self._seen.popleft()

    def plan(self) -> Plan:
        now = self._seen[-1]
        if now.at_s < self._next_s or not now.ready:
            return Plan(self._size or now.size, "between two rounds")
        self._next_s = now.at_s + INTERVAL_S
        queue = sum(each.held_requests for each in self._seen) / len(self._seen) / now.ready
        kv = sum(each.kv_demand for each in self._seen) / len(self._seen) / now.ready
        wanted = now.size
        if queue > self.queue_up or kv > self.kv_up:
            wanted, self._grace = now.size + 1, GRACE_ROUNDS
        elif self._grace:
            self._grace -= 1
        elif queue < self.queue_down and kv < self.kv_down:
            wanted = now.size - 1
        bounds = self.settings
        self._size = max(bounds.min_instances, min(bounds.max_instances, wanted))
        return Plan(self._size, f"queue {queue:.2f}, KV load {kv:.2f}")
