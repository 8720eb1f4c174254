"""The asynchronous contract over the state machine, with grants delivered.

Product code, not a test double: ``memory://`` is a store of one process, without any server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scheduling.granting import Grant
from scheduling.placement import Placement, PlaceReply
from scheduling.request import Request
from scheduling.settings import SchedulingSettings
from statestore.base import Release, Transition
from statestore.memory.placing import Placing
from statestore.memory.state import PoolState


def wall_clock_ms() -> int:
    """What Redis ``TIME`` would reply on this machine."""
    return time.time_ns() // 1_000_000


class MemoryPool:
    """``PoolStore`` over one ``PoolState``, whose methods are awaited here. None awaits between reading and changing
    it."""

    degraded = False

    def __init__(self, name: str, state: PoolState) -> None:
        self.name = name
        self.state = state
        self._listeners: list[tuple[str, Callable[[Grant], None]]] = []
        self._wanted = asyncio.Event()

    def recover_from(self, live: Callable[[int], Sequence[Request]], rates: Callable[[], Mapping[str, float]]) -> None:
        """This store is never away."""

    def on_grant(self, replica_id: str, deliver: Callable[[Grant], None]) -> None:
        self._listeners.append((replica_id, deliver))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.state, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            answer = method(*arguments, **named)
            for grant in self.state.take_grants():
                for replica_id, deliver in self._listeners:
                    if replica_id == grant.replica_id:
                        deliver(grant)
            return answer

        return call

    async def place(self, placement: Placement) -> PlaceReply:
        reply = Placing(self.state, placement).run()
        if self.state.wanted:
            self._wanted.set()
        return reply

    async def release(self, releases: Sequence[Release]) -> Sequence[Transition]:
        told: list[Transition] = []
        last: dict[str, int] = {}
        for each in releases:
            if each.instance_id:
                done = self.state.first_token(each.request_id, each.instance_id, note=each.note)
            else:
                who = each.replica_id or None
                done = self.state.finish(each.request_id, replica_id=who, attempt=each.attempt, note=each.note)
            if done.queue is not None:
                former = last.get(done.queue.load.instance_id)
                if former is not None:
                    told[former] = Transition(True)
                last[done.queue.load.instance_id] = len(told)
            told.append(done)
        return told

    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        if not self.state.wanted and timeout_s > 0:
            self._wanted.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wanted.wait()
            except TimeoutError:
                return ()
        return self.state.take_wanted()


class MemoryStore:
    """Pools by name, made when first asked for; gone with the process."""

    def __init__(self, scheduling: SchedulingSettings, *, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._scheduling = scheduling
        self._now_ms = now_ms
        self._pools: dict[str, MemoryPool] = {}

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to disconnect from."""

    async def ping(self) -> float:
        return 0.0

    def pool(self, name: str) -> MemoryPool:
        pool = self._pools.get(name)
        if pool is None:
            state = PoolState(self._scheduling, self._now_ms)
            pool = self._pools[name] = MemoryPool(name, state)
        return pool
