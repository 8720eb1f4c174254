"""N engine models on one virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from dualmap.simulation.endless_kv_pool import EndlessKvPool
from dualmap.simulation.engine import Engine
from dualmap.simulation.engine_types import EngineConfig, EngineRequest, Event, EventKind
from dualmap.simulation.event_queue import EventQueue, Priority
from dualmap.simulation.kv_pool import Journal, KvPool
from dualmap.simulation.kv_transfer import KvLinks, KvTransfer
from dualmap.simulation.reported_caches import ReportedCaches
from dualmap.simulation.scenario import SpeedChange
from dualmap.simulation.step_time import StepCosts

OnEvent = Callable[[str, Event], None]


@dataclass(frozen=True, slots=True)
class KvSource:
    """The place where a decode leg finds its KV, staged by a prefill leg."""

    instance_id: str
    request_id: str


class Cluster:
    """Engines by instance id, and the moves of KV between them. Wakes each engine exactly at its next event.

    A decode leg pulls its KV when it has its blocks; KV that timed out meanwhile is computed again where it is needed.
    """

    def __init__(
        self,
        events: EventQueue,
        on_event: OnEvent,
        transfer: KvTransfer,
        *,
        endless_cache: bool = False,
        reported: ReportedCaches | None = None,
    ) -> None:
        """Make a cluster. ``reported`` is called with the changes of each engine's prefix cache, before what happened
        to requests meanwhile."""
        self._events = events
        self._on_event = on_event
        self._reported = reported
        self._journals: dict[str, Journal] = {}
        self._computed: set[int] | None = set() if endless_cache else None
        self._wake_s: dict[str, float | None] = {}
        self._sources: dict[str, KvSource] = {}
        """Sources of decode legs whose KV is not there yet, by request id."""
        self._links = KvLinks(transfer)
        self.engines: dict[str, Engine] = {}
        self.former_preemptions = 0
        """Preemptions of engines that were replaced."""

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

    def submit(self, instance_id: str, request: EngineRequest, now_s: float, source: KvSource | None = None) -> None:
        """A decode leg (``awaits_kv``) needs its ``source``. Raises RequestRefusedError when the engine can never
        serve it."""
        self.engines[instance_id].submit(request, now_s)
        if source is not None:
            self._sources[request.request_id] = source
        self._arm(instance_id)

    def release_staged(self, source: KvSource, now_s: float) -> None:
        """It will not be pulled."""
        self.engines[source.instance_id].release_staged(source.request_id, now_s)
        self._arm(source.instance_id)

    @property
    def moved_tokens(self) -> int:
        return self._links.moved_tokens

    def _pull(self, target_id: str, event: Event, now_s: float) -> None:
        source = self._sources.pop(event.request_id)
        end_pull = partial(self._end_pull, target_id, event.request_id, source)
        if self.engines[source.instance_id].has_staged(source.request_id):
            end_s = self._links.move(source.instance_id, target_id, event.tokens, now_s)
            self._events.push(end_s, Priority.ARRIVAL, end_pull)
        else:
            end_pull(now_s)

    def _end_pull(self, target_id: str, request_id: str, source: KvSource, now_s: float) -> None:
        target = self.engines[target_id]
        if self.engines[source.instance_id].release_staged(source.request_id, now_s):
            target.receive(request_id, now_s)
        else:
            target.lose_kv(request_id, now_s)
        self._arm(source.instance_id)
        self._arm(target_id)

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
            if event.kind is EventKind.PULLING:
                self._pull(instance_id, event, now_s)
            else:
                self._on_event(instance_id, event)
        self._arm(instance_id)
