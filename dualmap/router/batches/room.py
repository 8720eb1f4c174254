"""The room that a replica has for lines of batches, by instance: read from the loads, several times a second.

A line is begun on an instance that has room for it, and is placed there. Lines wait for the instance that computes the
common beginning of their part of a batch; one that has waited for a while takes room anywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.replica.runtime import Runtime
from dualmap.scheduling.batches.slack import ExpectedLine, room_of, taken_by, worn_off
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.batches.batch_book import BatchBook
from dualmap.statestore.errors import StoreError

_log = logging.getLogger(__name__)

LOOKED_AT_EVERY_S: Final = 0.25
ANYWHERE_AFTER_S: Final = 2.0
"""Time that a line waits for its own instance alone."""

_Place = tuple[str, str]
"""A pool, and an instance of it; the instance is empty where any does."""


class _Turn:
    """A line that waits."""

    def __init__(self, since_s: float, batch_id: str) -> None:
        self.since_s = since_s
        self.batch_id = batch_id
        self.given: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The instance that it was given; empty: it runs as an ordinary request."""


class LineRoom:
    """Lines enter as there is room, first come, first served on each instance."""

    def __init__(self, runtime: Runtime, book: BatchBook, has_work: Callable[[], bool]) -> None:
        """``has_work``: whether a line wants to run; nothing is read otherwise."""
        self._runtime = runtime
        self._book = book
        self._has_work = has_work
        self._now_s = asyncio.get_running_loop().time
        self._expected = ExpectedLine()
        self._waiting: dict[_Place, deque[_Turn]] = {}
        self._running = Counter[_Place]()
        self._most: dict[_Place, int] = {}
        """Lines of this replica that may be running on each instance."""
        self._people_seen_s: dict[_Place, float] = {}
        self._taken_tokens: dict[_Place, float] = {}
        """Tokens that lines of this replica have taken of each instance, as far as these have not worn off."""
        self._takes: dict[_Place, float] = {}
        """Tokens that a further line would take of it."""
        self._looked_s = 0.0
        self.late: Mapping[str, int] = {}
        """Batches that would be late, and how many of their lines have to run through this replica: those that find no
        room run as ordinary requests."""
        self._of_batch = Counter[str]()
        """Lines that run, by batch."""
        self.replicas = 1
        """Replicas that live, this one among them."""

    def learn(self, context_tokens: int, prefill_tokens: int) -> None:
        """Take in what a line took."""
        self._expected = self._expected.learned(context_tokens, prefill_tokens)

    def instances(self, pool: str) -> Sequence[str]:
        """The instances of a pool among which the parts of a batch are divided; at least one, without a name."""
        served = self._runtime.pools.pools.get(pool)
        return ("",) if served is None else tuple(sorted(served.view.view.ready)) or ("",)

    def waiting(self, pool: str, instance_id: str) -> int:
        """The lines that wait for an instance."""
        return len(self._waiting.get((pool, instance_id), ()))

    def has_waiting(self, pool: str) -> bool:
        """Whether lines wait for any instance of a pool."""
        return any(queue for place, queue in self._waiting.items() if place[0] == pool)

    @asynccontextmanager
    async def place(self, pool: str, preferred: str, batch_id: str = "") -> AsyncIterator[str]:
        """Wait for room on an instance of the pool, and have it until the end of the block. An empty name: the batch
        would be late, and its line runs as an ordinary request."""
        turn = _Turn(self._now_s(), batch_id)
        self._waiting.setdefault((pool, preferred), deque()).append(turn)
        self._fill((pool, preferred))
        try:
            instance_id = await turn.given  # ``_give`` has counted this line
        except asyncio.CancelledError:
            if turn.given.done() and not turn.given.cancelled():
                self._leave((pool, turn.given.result()), batch_id)
            raise
        try:
            yield instance_id
        finally:
            self._leave((pool, instance_id), batch_id)

    def _leave(self, place: _Place, batch_id: str) -> None:
        self._running[place] -= 1
        if not self._running[place]:
            del self._running[place]
        self._of_batch[batch_id] -= 1
        if not self._of_batch[batch_id]:
            del self._of_batch[batch_id]
        self._fill(place)

    def _give(self, turn: _Turn, place: _Place) -> None:
        self._running[place] += 1
        self._of_batch[turn.batch_id] += 1
        if place in self._taken_tokens:
            self._taken_tokens[place] += self._takes[place]
        turn.given.set_result(place[1])

    def _has_room(self, place: _Place) -> bool:
        return self._running[place] < self._most.get(place, 0)

    def _fill(self, place: _Place) -> None:
        """Let those in that wait for an instance."""
        while self._has_room(place) and (turn := self._first(place)) is not None:
            self._waiting[place].popleft()
            self._give(turn, place)

    def _let_in(self, pool: str) -> None:
        """Let all in for whom there is room: those that wait for an instance, then those that waited for longest for
        another one, then those that their windows need."""
        places = [place for place in self._most if place[0] == pool]
        for place in places:
            self._fill(place)
        waiting = deque(sorted(self._waiting_anywhere(pool), key=lambda each: each[0].since_s))
        for place in places:
            while waiting and self._has_room(place):
                turn, queue = waiting.popleft()
                queue.remove(turn)
                self._give(turn, place)
        if self.late:
            self._let_late_in(pool)

    def _waiting_anywhere(self, pool: str) -> list[tuple[_Turn, deque[_Turn]]]:
        """The lines that wait for any instance, or for their own one for a while."""
        before_s = self._now_s() - ANYWHERE_AFTER_S
        return [
            (turn, queue)
            for place, queue in self._waiting.items()
            if place[0] == pool
            for turn in queue
            if not turn.given.done() and (turn.since_s <= before_s or not place[1])
        ]

    def _let_late_in(self, pool: str) -> None:
        """Lines that the windows of late batches need, and that found no room."""
        for queue in [queue for place, queue in self._waiting.items() if place[0] == pool]:
            for turn in list(queue):
                if self._of_batch[turn.batch_id] < self.late.get(turn.batch_id, 0) and not turn.given.done():
                    queue.remove(turn)
                    self._give(turn, (pool, ""))

    def _first(self, place: _Place) -> _Turn | None:
        queue = self._waiting.get(place)
        while queue and queue[0].given.done():
            queue.popleft()  # its line was cancelled
        if queue:
            return queue[0]
        self._waiting.pop(place, None)
        return None

    async def run(self) -> None:
        """Look at the loads until cancelled."""
        while True:
            if self._has_work():
                try:
                    await self._look()
                except StoreError as error:
                    self._most = {}  # without the store it is not known who waits
                    _log.debug("no line of a batch begins: %s", error)
                for pool in self._runtime.pools.pools:
                    self._let_in(pool)
            await self._runtime.context.clock.sleep(LOOKED_AT_EVERY_S)

    async def _look(self) -> None:
        own = {f"{pool}/{instance_id}": lines for (pool, instance_id), lines in self._running.items()}
        others = await self._book.exchange_lines(self._runtime.context.replica_id, own)
        most: dict[_Place, int] = {}
        now_s = self._now_s()
        for name, pool in self._runtime.pools.pools.items():
            most |= await self._room_in(name, pool, others, now_s - self._looked_s)
        self._most, self._looked_s = most, now_s
        self._taken_tokens = {place: self._taken_tokens[place] for place in most}

    async def _room_in(
        self, name: str, pool: ServedPool, others: Mapping[str, int], passed_s: float
    ) -> dict[_Place, int]:
        overview = await self._runtime.fleet.get(name)
        replicas = sorted(each.replica_id for each in overview.replicas if each.is_alive(overview.now_ms))
        me = self._runtime.context.replica_id
        rank, count = (replicas.index(me), len(replicas)) if me in replicas else (0, 1)
        self.replicas = count
        most: dict[_Place, int] = {}
        for number, (instance_id, load) in enumerate(sorted((await pool.store.loads()).items())):
            place, now_s = (name, instance_id), self._now_s()
            own = self._running[place]
            lines = own + others.get(f"{name}/{instance_id}", 0)
            if load.in_flight > lines or place not in self._people_seen_s:
                self._people_seen_s[place] = now_s
            taken_tokens = worn_off(self._taken_tokens.get(place, 0.0), load, passed_s, count)
            self._taken_tokens[place], self._takes[place] = taken_tokens, taken_by(self._expected, load)
            # The other replicas have taken about as much each.
            room = room_of(load, lines, now_s - self._people_seen_s[place], self._expected, count * taken_tokens)
            most[place] = own + room.share(rank + number, count) if room.is_open else 0
            if load.state is InstanceState.READY and lines > room.most:
                self._stop(pool, instance_id, -(-(lines - room.most) * own // lines))
        return most

    def _stop(self, pool: ServedPool, instance_id: str, count: int) -> None:
        """Have so many lines leave an instance, as far as they can continue: interactive requests are back there."""
        if pool.rules.eviction is not None:
            pool.evictable.evict_cheapest(pool.rules.eviction, instance_id, count)
