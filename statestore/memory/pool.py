"""The asynchronous contract over the state machine, with grants delivered.

Product code, not a test double: ``memory://`` is a store of one process, without any server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from scheduling.granting import Grant
from scheduling.placement import Placement, PlaceReply
from scheduling.request import Request
from scheduling.settings import SchedulingSettings
from statestore.feed import GrantFeeds
from statestore.memory.placing import Placing
from statestore.memory.state import PoolState
from statestore.stream import Stream

P = ParamSpec("P")
R = TypeVar("R")


def wall_clock_ms() -> int:
    """What Redis ``TIME`` would reply on this machine."""
    return time.time_ns() // 1_000_000


def _answered(
    method: Callable[Concatenate[PoolState, P], R],
) -> Callable[Concatenate[MemoryPool, P], Coroutine[Any, Any, R]]:
    """The state's method, awaited."""

    async def call(pool: MemoryPool, /, *arguments: P.args, **named: P.kwargs) -> R:
        answer = method(pool.state, *arguments, **named)
        pool.deliver_grants()
        return answer

    return call


class MemoryPool:
    """``PoolStore`` over one ``PoolState``. No method awaits between reading and changing it."""

    degraded = False

    def __init__(self, name: str, state: PoolState, *, feeds: GrantFeeds | None = None) -> None:
        """Grants go to ``feeds``: the pool's own, or those of another pool."""
        self.name = name
        self.state = state
        self._feeds = feeds if feeds is not None else GrantFeeds()
        self._wanted = asyncio.Event()

    def recover_from(self, live: Callable[[int], Sequence[Request]]) -> None:
        """This store is never away."""

    def deliver_grants(self) -> None:
        """Pass on the grants of the last transition; also for callers that drive ``state`` directly."""
        for grant in self.state.take_grants():
            self._feeds.deliver(grant.replica_id, grant)

    async def close(self) -> None:
        """End every grants iterator."""
        await self._feeds.close_all()

    def grants(self, replica_id: str) -> Stream[Grant]:
        return self._feeds.open(replica_id)

    async def place(self, placement: Placement) -> PlaceReply:
        reply = Placing(self.state, placement).run()
        if len(self.state.wanted):
            self._wanted.set()
        return reply

    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        if not len(self.state.wanted):
            self._wanted.clear()
            try:
                await asyncio.wait_for(self._wanted.wait(), timeout_s)
            except TimeoutError:
                return ()
        return self.state.wanted.take()

    membership = _answered(PoolState.membership)
    put_instance = _answered(PoolState.put_instance)
    update_instance = _answered(PoolState.update_instance)
    set_instance_state = _answered(PoolState.set_instance_state)
    remove_instance = _answered(PoolState.remove_instance)
    change_settings = _answered(PoolState.change_settings)
    settings_history = _answered(PoolState.settings_history)
    observe = _answered(PoolState.observe)
    commit = _answered(PoolState.commit)
    first_token = _answered(PoolState.first_token)
    finish = _answered(PoolState.finish)
    records = _answered(PoolState.records)
    heartbeat = _answered(PoolState.heartbeat)
    adopt = _answered(PoolState.adopt)
    requests_of = _answered(PoolState.requests_of)
    retire = _answered(PoolState.retire)
    acquire_lease = _answered(PoolState.acquire_lease)
    renew_lease = _answered(PoolState.renew_lease)
    release_lease = _answered(PoolState.release_lease)
    loads = _answered(PoolState.loads)
    queue_head = _answered(PoolState.queue_head)
    queue = _answered(PoolState.queue)
    migrate = _answered(PoolState.migrate)
    arrivals = _answered(PoolState.arrivals)
    publish_tree = _answered(PoolState.publish_tree)
    samples = _answered(PoolState.samples)
    publish_learned = _answered(PoolState.publish_learned)
    expired_replicas = _answered(PoolState.expired_replicas)
    reap = _answered(PoolState.reap)
    repair = _answered(PoolState.repair)
    renew_subscriber = _answered(PoolState.renew_subscriber)
    kv_event_records = _answered(PoolState.kv_event_records)
    claim_kv_events = _answered(PoolState.claim_kv_events)
    release_kv_events = _answered(PoolState.release_kv_events)
    mark_kv_events = _answered(PoolState.mark_kv_events)
    kv_names = _answered(PoolState.kv_names)
    apply_kv_events = _answered(PoolState.apply_kv_events)

    async def now_ms(self) -> int:
        return self.state.now_ms()

    scaling = _answered(PoolState.scaling)
    record_scaling = _answered(PoolState.record_scaling)
    scaling_log = _answered(PoolState.scaling_log)
    recent_blocks = _answered(PoolState.recent_blocks)
    snapshot = _answered(PoolState.snapshot)
    overview = _answered(PoolState.overview)


class MemoryStore:
    """Pools by name, made when first asked for; gone with the process."""

    def __init__(self, scheduling: SchedulingSettings, *, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._scheduling = scheduling
        self._now_ms = now_ms
        self._pools: dict[str, MemoryPool] = {}

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """End every grants iterator."""
        for pool in self._pools.values():
            await pool.close()

    async def ping(self) -> float:
        return 0.0

    def pool(self, name: str) -> MemoryPool:
        pool = self._pools.get(name)
        if pool is None:
            state = PoolState(self._scheduling, self._now_ms)
            pool = self._pools[name] = MemoryPool(name, state)
        return pool
