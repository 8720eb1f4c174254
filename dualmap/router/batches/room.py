"""The room that a replica has for lines of batches: read from the loads of instances, several times a second."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from dualmap.router.replica.runtime import Runtime
from dualmap.scheduling.batches.slack import FIRST_LINE_TOKENS, learned_line_tokens, room_for_replica
from dualmap.statestore.errors import StoreError

_log = logging.getLogger(__name__)

LOOKED_AT_EVERY_S: Final = 0.25


class LineRoom:
    """Lines enter as there is room, first come, first served."""

    def __init__(self, runtime: Runtime, has_work: Callable[[], bool]) -> None:
        """``has_work``: whether a line wants to run; nothing is read otherwise."""
        self._runtime = runtime
        self._has_work = has_work
        self._line_tokens: float = FIRST_LINE_TOKENS
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0
        self.most = 0
        """Lines that may be running now."""

    def learn(self, line_tokens: int) -> None:
        """Take in the context that a line had."""
        self._line_tokens = learned_line_tokens(self._line_tokens, line_tokens)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for room, and have it until the end of the block."""
        if self.running >= self.most or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn  # ``_let_in`` has counted this line
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave()
                raise
        else:
            self.running += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self.running -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.running < self.most:
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)

    async def run(self) -> None:
        """Look at the loads until cancelled."""
        while True:
            if self._has_work():
                try:
                    self.most = await self._look()
                except StoreError as error:
                    self.most = 0  # without the store it is not known who waits
                    _log.debug("no line of a batch begins: %s", error)
                self._let_in()
            await self._runtime.context.clock.sleep(LOOKED_AT_EVERY_S)

    async def _look(self) -> int:
        room = 0
        for name, pool in self._runtime.pools.pools.items():
            overview = await self._runtime.fleet.get(name)
            replicas = sum(each.is_alive(overview.now_ms) for each in overview.replicas)
            loads = await pool.store.loads()
            room += room_for_replica(
                loads.values(),
                slo_s=pool.scheduling.slo_ttft_s,
                line_tokens=round(self._line_tokens),
                replicas=replicas,
            )
        return self.running + room
