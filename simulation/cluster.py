"""N engine models on one virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from simulation.endless_kv_pool import EndlessKvPool
from simulation.engine import Engine
from simulation.engine_types import EngineConfig, EngineRequest, Event
from simulation.event_queue import EventQueue, Priority
from simulation.kv_pool import Journal, KvPool
from simulation.reported_caches import ReportedCaches
from simulation.scenario import SpeedChange
from simulation.step_time import StepCosts

OnEvent = Callable[[str, Event], None]


class Cluster:
    """Engines by instance id. Wakes each engine exactly at its next event."""

    def __init__(
        self,
        events: EventQueue,
        on_event: OnEvent,
        *,
        endless_cache: bool = False,
        reported: ReportedCaches | None = None,
    ) -> None:
        """``reported`` is told what each engine's prefix cache did, before what happened to requests meanwhile."""
        self._events = events
        self._on_event = on_event
        self._reported = reported
        self._journals: dict[str, Journal] = {}
        self._computed: set[int] | None = set() if endless_cache else None
        self._wake_s: dict[str, float | None] = {}
        self.engines: dict[str, Engine] = {}
        self.former_preemptions = 0
        """Of engines that were replaced."""

    def add(self, instance_id: str, config: EngineConfig) -> None:
        """Start an instance with an empty cache, or start a known one again; then it must be idle."""
        if instance_id in self.engines:
            self.former_preemptions += self.engines[instance_id].statistics().preemptions
        pool: KvPool | None = None if self._computed is None else EndlessKvPool(config.kv_blocks, self._computed)
        if self._reported is not None and pool is None:
            self._journals[instance_id] = []
            pool = KvPool(config.kv_blocks, self._journals[instance_id])
        self.engines[instance_id] = Engine(config, pool)
        self._wake_s[instance_id] = None

    def schedule_speeds(self, changes: Iterable[SpeedChange], costs: StepCosts) -> None:
        """Engines' steps take so many times as long as ``costs`` say from then on; steps under way end as planned."""

        def slow_down(change: SpeedChange, _: float) -> None:
            engine = self.engines[change.instance_id]
            engine.config = replace(engine.config, costs=costs.slowed(change.slowdown))

        for change in changes:
            self._events.push(change.at_s, Priority.MEMBERSHIP, partial(slow_down, change))

    def submit(self, instance_id: str, request: EngineRequest, now_s: float) -> None:
        """Raises RequestRefusedError when the engine can never serve it."""
        self.engines[instance_id].submit(request, now_s)
        self._arm(instance_id)

    def _arm(self, instance_id: str) -> None:
        wake_s = self.engines[instance_id].next_event_s()
        if wake_s == self._wake_s[instance_id]:
            return
        self._wake_s[instance_id] = wake_s
        if wake_s is not None:
            self._events.push(wake_s, Priority.ENGINE, lambda now_s: self._wake(instance_id, now_s))

    def _wake(self, instance_id: str, now_s: float) -> None:
        if self._wake_s[instance_id] != now_s:
            return  # the plan changed after this was scheduled
        self._wake_s[instance_id] = None
        events = self.engines[instance_id].advance(now_s)
        if self._reported is not None and (journal := self._journals.get(instance_id)):
            self._reported.apply(instance_id, journal, now_s)
            journal.clear()
        for event in events:
            self._on_event(instance_id, event)
        self._arm(instance_id)
