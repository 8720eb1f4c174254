"""N engine models on one virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.simulation.engine.endless_kv_pool import EndlessKvPool
from dualmap.simulation.engine.engine import Engine, pool_of
from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, Event, EventKind
from dualmap.simulation.engine.kv_pool import Journal, KvPool
from dualmap.simulation.engine.kv_tiers import TierCache
from dualmap.simulation.engine.kv_transfer import KvLinks, KvTransfer
from dualmap.simulation.engine.step_time import StepCosts
from dualmap.simulation.virtual_time.event_queue import EventQueue, Priority
from dualmap.simulation.virtual_time.reported_caches import ReportedCaches
from dualmap.simulation.virtual_time.scenario import SpeedChange

OnEvent = Callable[[str, Event], None]


@dataclass(frozen=True, slots=True)
class KvSource:
    """The place where a decode leg finds its KV, staged by a prefill leg."""

    instance_id: str
    request_id: str


@dataclass(slots=True)
class LayerwiseMove:
    """A move of KV that goes on while a prefill leg computes it, to a decode leg that waits for it."""

    target_id: str
    leg_id: str
    tokens: int
    end_s: float | None = None
    """When the links are through with it; None: its prefill leg has not begun."""


class Cluster:
    """Engines by instance id, and the moves of KV between them. Wakes each engine exactly at its next event.

    A decode leg pulls its KV when it has its blocks; KV that timed out meanwhile is computed again where it is needed.
    One that was sent first asks for its prefill leg then, and the KV moves layer by layer while it is computed: it is
    there a latency after the end of the prefill, or as soon as the links are through with it. A request that pulls from
    another engine's cache is given what that has of its prompt; nothing, if that engine died meanwhile.
    """

    def __init__(
        self,
        events: EventQueue,
        on_event: OnEvent,
        transfer: KvTransfer,
        *,
        endless_cache: bool = False,
        reported: Sequence[ReportedCaches] = (),
    ) -> None:
        """Make a cluster. Each of ``reported`` is called with the changes of each engine's prefix cache, before what
        happened to requests meanwhile."""
        self._events = events
        self._on_event = on_event
        self._reported = reported
        self._journals: dict[str, Journal | None] = {}
        self._shared: TierCache | None = None
        self._computed: set[int] | None = set() if endless_cache else None
        self._wake_s: dict[str, float | None] = {}
        self._sources: dict[str, KvSource] = {}
        """Sources of decode legs whose KV is not there yet, by request id."""
        self._asks: dict[str, Callable[[], None]] = {}
        """The action of a decode leg, by its id, once it has its blocks, where it was sent before its prefill leg."""
        self._layerwise: dict[str, LayerwiseMove] = {}
        """Moves by the id of the prefill leg."""
        self._peers: dict[str, str] = {}
        """The instances that requests pull from, by request id, until they have their blocks."""
        self._transfer = transfer
        self._links = KvLinks(transfer)
        self.engines: dict[str, Engine] = {}
        self._costs: dict[str, StepCosts] = {}
        """Step costs that engines started with."""
        self.former_preemptions = 0
        """Preemptions of engines that were replaced."""

    def add(self, instance_id: str, config: EngineConfig) -> None:
        """Start an instance with an empty cache, or start a known one again; then it must be idle."""
        if instance_id in self.engines:
            self.former_preemptions += self.engines[instance_id].statistics().preemptions
        pool: KvPool | None = None if self._computed is None else EndlessKvPool(config.kv_blocks, self._computed)
        if pool is None:
            journal = self._journals[instance_id] = [] if self._reported else None
            pool = pool_of(config, journal, shared=self._shared_pool(config))
        self.engines[instance_id] = Engine(config, pool)
        self._costs[instance_id] = config.costs
        self._wake_s[instance_id] = None

    def _shared_pool(self, config: EngineConfig) -> TierCache | None:
        """The one store behind all engines that have a tier of that kind, as large as the first of them says."""
        described = next((each for each in config.kept_tiers if each.tier is Tier.POOL), None)
        if self._shared is None and described is not None:
            self._shared = TierCache(described.tokens // config.block_tokens)
        return self._shared

    def schedule_speeds(self, changes: Iterable[SpeedChange]) -> None:
        """Engines' steps take so many times as long from then on as they took at first; steps under way end as
        planned."""

        def slow_down(change: SpeedChange, _: float) -> None:
            engine = self.engines[change.instance_id]
            costs = self._costs[change.instance_id].slowed(change.slowdown)
            engine.config = replace(engine.config, costs=costs)

        for change in changes:
            self._events.push(change.at_s, Priority.MEMBERSHIP, partial(slow_down, change))

    def submit(
        self,
        instance_id: str,
        request: EngineRequest,
        now_s: float,
        source: KvSource | None = None,
        ask: Callable[[], None] | None = None,
        *,
        peer_id: str | None = None,
    ) -> None:
        """A decode leg (``awaits_kv``) needs its ``source``; ``ask`` has to submit its prefill leg there, where that is
        to follow. A request that ``pulls`` needs the instance, ``peer_id``, that it pulls from. Raises
        RequestRefusedError when the engine can never serve it."""
        self.engines[instance_id].submit(request, now_s)
        if peer_id is not None:
            self._peers[request.request_id] = peer_id
        if source is not None:
            self._sources[request.request_id] = source
        if ask is not None:
            self._asks[request.request_id] = ask
        self._arm(instance_id)

    def abort(self, instance_id: str, leg_id: str, now_s: float) -> bool:
        """Drop a request, or a leg, and the move of KV to it; False if the engine does not have it (any more)."""
        self._sources.pop(leg_id, None)
        self._asks.pop(leg_id, None)
        self._layerwise.pop(leg_id, None)
        self._peers.pop(leg_id, None)
        aborted = self.engines[instance_id].abort(leg_id, now_s)
        self._arm(instance_id)
        return aborted

    def release_staged(self, source: KvSource, now_s: float) -> None:
        """Free KV that will not be pulled."""
        self.engines[source.instance_id].release_staged(source.request_id, now_s)
        self._arm(source.instance_id)

    @property
    def moved_tokens(self) -> int:
        return self._links.moved_tokens

    def _pull_cached(self, target_id: str, event: Event, now_s: float) -> None:
        """Move what the cache of a request's peer has of its prompt."""
        peer_id, target = self._peers.pop(event.request_id), self.engines[target_id]
        peer, block_tokens = self.engines[peer_id], target.config.block_tokens
        blocks = peer.serve(target.wanted_blocks(event.request_id))
        tokens = blocks * block_tokens

        def end(at_s: float) -> None:
            if self.engines[target_id] is target:
                found = blocks if self.engines[peer_id] is peer else 0
                target.receive_pulled(event.request_id, found, self._transfer.alone_s(tokens), at_s)
                self._arm(target_id)

        end_s = self._links.move(peer_id, target_id, tokens, now_s) if blocks else now_s + self._transfer.latency_s
        self._events.push(end_s, Priority.ARRIVAL, end)

    def _pull(self, target_id: str, event: Event, now_s: float) -> None:
        source, ask = self._sources.pop(event.request_id), self._asks.pop(event.request_id, None)
        if ask is not None:
            self._layerwise[source.request_id] = LayerwiseMove(target_id, event.request_id, event.tokens)
            return ask()
        end_pull = partial(self._end_pull, target_id, event.request_id, source)
        if self.engines[source.instance_id].has_staged(source.request_id):
            end_s = self._links.move(source.instance_id, target_id, event.tokens, now_s)
            self._events.push(end_s, Priority.ARRIVAL, end_pull)
        else:
            end_pull(now_s)
        return None

    def _follow_prefill(self, source_id: str, event: Event, now_s: float) -> None:
        """Move the KV of a prefill leg that a decode leg asked for, while it is computed."""
        move = self._layerwise[event.request_id]
        if event.kind is EventKind.SCHEDULED and move.end_s is None:
            move.end_s = self._links.move(source_id, move.target_id, move.tokens, now_s)
        elif event.kind is EventKind.STAGED and move.end_s is not None:
            end_s = max(move.end_s, now_s + self._transfer.latency_s)
            source = KvSource(source_id, event.request_id)
            self._events.push(end_s, Priority.ARRIVAL, partial(self._end_move, move, source))

    def _end_move(self, move: LayerwiseMove, source: KvSource, now_s: float) -> None:
        if self._layerwise.get(source.request_id) is move:  # else its legs were aborted
            del self._layerwise[source.request_id]
            self._end_pull(move.target_id, move.leg_id, source, now_s)

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
        if journal := self._journals.get(instance_id):
            for reported in self._reported:
                reported.apply(instance_id, journal, now_s)
            journal.clear()
        for event in events:
            if event.kind is EventKind.PULLING:
                pull = self._pull_cached if event.request_id in self._peers else self._pull
                pull(instance_id, event, now_s)
                continue
            if event.request_id in self._layerwise:
                self._follow_prefill(instance_id, event, now_s)
            self._on_event(instance_id, event)
        self._arm(instance_id)
