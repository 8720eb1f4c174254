"""Turns of agents' runs that wait for memory: a message is fast, a repetition misses nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from dualmap.router.pool.grant_waiters import TurnedAwayError
from dualmap.router.telemetry.metrics import PoolMetrics
from dualmap.router.timers import CallLater
from dualmap.runtime.clock import Clock
from dualmap.scheduling.request.machine import Refusal
from dualmap.scheduling.runs.turn import Turn
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.errors import StoreError
from dualmap.statestore.pool.runs import TurnStatus
from dualmap.statestore.port import ReplicaPool

log = logging.getLogger(__name__)

REPEAT_S = 1.0
"""Time between two repetitions of turns that wait. Also the precision with which the silence of others is seen."""
REPEATED = 320
"""Turns that are repeated together at most, those that were repeated longest ago."""


class TurnWaiters:
    """The turns of one pool on one replica that wait."""

    def __init__(
        self,
        pool: ReplicaPool,
        view: Callable[[], ClusterView],
        metrics: PoolMetrics,
        *,
        clock: Clock,
        call_later: CallLater,
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._view = view
        self._clock = clock
        self._call_later = call_later
        self._waiting: dict[str, tuple[Turn, asyncio.Future[None]]] = {}

    async def wait(self, turn: Turn, within_s: float, class_name: str = "") -> None:
        """Wait until a turn goes by the ledger of runs, in which it is entered unless it is there. The caller must
        release it in any case, as a part of its request. ``class_name`` is its priority class, if there are such.

        Raises:
            TurnedAwayError: it has not gone in time, or too many turns of its run wait.
        """
        # Before the call: the message that it goes may overtake the reply.
        future = asyncio.get_running_loop().create_future()
        self._waiting[turn.turn_id] = turn, future
        timer, metrics = None, self._metrics.turns_of(class_name)
        try:
            (status,) = await self._pool.admit([turn], self._capacity_tokens())
            if status is TurnStatus.REFUSED:
                raise TurnedAwayError(Refusal.TOO_MANY_TURNS)
            if status is TurnStatus.WAITS:
                timer = self._call_later(within_s, lambda: self._turn_away(turn.turn_id))
                metrics.parked.value += 1
                since_s = self._clock.monotonic_s()
                await future
                metrics.parked_s.observe(self._clock.monotonic_s() - since_s)
        finally:
            if timer is not None:
                timer.cancel()
                metrics.parked.value -= 1
            del self._waiting[turn.turn_id]

    def _capacity_tokens(self) -> int:
        return self._view().kv_capacity_tokens

    def goes(self, turn_id: str) -> None:
        """A turn need not wait any more. One that is not known here is over."""
        _, future = self._waiting.get(turn_id, (None, None))
        if future is not None and not future.done():
            future.set_result(None)

    def _turn_away(self, turn_id: str) -> None:
        _, future = self._waiting.get(turn_id, (None, None))
        if future is not None and not future.done():
            future.set_exception(TurnedAwayError(Refusal.HELD_TOO_LONG))

    async def repeat(self) -> None:
        """Repeat turns that wait, again and again. Runs until cancelled."""
        while True:
            await self._clock.sleep(REPEAT_S)
            try:
                await self.look_up()
            except StoreError as error:
                log.warning("pool %s: turns that wait could not be looked up: %s", self._pool.name, error)

    async def look_up(self) -> None:
        """Find turns that go by now, and enter those again that the store lost; up to ``REPEATED``."""
        turns = [turn for turn, future in self._waiting.values() if not future.done()][:REPEATED]
        if not turns:
            return
        if len(turns) < len(self._waiting):
            for turn in turns:  # the others have their turn next
                self._waiting[turn.turn_id] = self._waiting.pop(turn.turn_id)
        self._note(turns, await self._pool.admit(turns, self._capacity_tokens()))

    def _note(self, turns: Sequence[Turn], statuses: Sequence[TurnStatus]) -> None:
        for turn, status in zip(turns, statuses, strict=True):
            if status is TurnStatus.GOES:
                self.goes(turn.turn_id)
