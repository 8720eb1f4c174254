"""One instance's KV events: read, and written to the store; caught up with after every loss.

A subscriber starts where the last one stopped, by what the store kept. Whatever goes wrong, it ends what it does and
starts the same way again: ``_catch_up`` is the one way into a view. Events that are not read wait in the socket, which
loses those beyond a bound; so memory is bounded, and a loss is a gap like any other.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import zmq.asyncio

from dualmap.runtime.clock import Clock
from dualmap.scheduling.backoff import backoff_s, worth_logging
from dualmap.statestore.errors import LeaseLostError, StoreUnavailableError
from dualmap.statestore.kv_views import CHANGES_PER_CALL
from dualmap.workers.kv_events.decoding import Batch, UnreadableEventsError
from dualmap.workers.kv_events.group_holdings import AmbiguousEventsError
from dualmap.workers.kv_events.reading import BatchOrder, Position
from dualmap.workers.kv_events.sockets import EventSockets, NoReplayError
from dualmap.workers.kv_events.source import EventSource
from dualmap.workers.kv_events.view_writer import MAX_REASON_CHARS, StoreSlowError, ViewWriter
from dualmap.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

WRITE_INTERVAL_S: Final = 0.004
"""Shortest time between two writes: what arrives meanwhile is written together. A batch that comes alone is written at
once."""
WAIT_S: Final = 1.0
TICK_S: Final = 10.0
"""An engine that reports nothing is written about this often, so that bookings end."""
CLAIM_PAUSE_S: Final = 0.25
FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 10.0
AMBIGUOUS_PAUSE_S: Final = 300.0


class EventsMissedError(Exception):
    """A replay does not contain what was requested."""


class Subscriber:
    """Runs until cancelled; then the instance is given back."""

    def __init__(
        self,
        pool_name: str,
        source: EventSource,
        worker_id: str,
        writer: ViewWriter,
        *,
        context: zmq.asyncio.Context,
        clock: Clock,
        metrics: WorkerMetrics,
    ) -> None:
        self._pool_name = pool_name
        self._source = source
        self._worker_id = worker_id
        self._writer = writer
        self._context = context
        self._clock = clock
        self._metrics = metrics
        self.source = source
        self._failures = 0

    async def run(self) -> None:
        """Follow the engine for ever."""
        try:
            while True:
                pause_s = CLAIM_PAUSE_S
                try:
                    if await self._writer.claim(self._worker_id):
                        await self._follow()
                except LeaseLostError:
                    pass
                except (AmbiguousEventsError, UnreadableEventsError) as error:
                    pause_s = AMBIGUOUS_PAUSE_S
                    await self._fall_back(str(error), drop=True)
                except (NoReplayError, EventsMissedError, StoreUnavailableError, StoreSlowError) as error:
                    await self._fall_back(str(error), drop=False)
                    pause_s = backoff_s(self._failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
                except Exception as error:  # no events of one engine may stop it, or make it try at once for ever
                    log.exception("KV events pool=%s instance=%s", self._pool_name, self._source.instance_id)
                    pause_s = AMBIGUOUS_PAUSE_S
                    await self._fall_back(f"{type(error).__name__}: {error}", drop=True)
                await self._clock.sleep(pause_s)
        finally:
            await self._give_back()

    async def _fall_back(self, reason: str, *, drop: bool) -> None:
        self._failures += 1
        if worth_logging(self._failures):
            log.warning(
                "KV events not followed, estimate only pool=%s instance=%s endpoint=%s failures=%d reason=%s",
                self._pool_name, self._source.instance_id, self._source.endpoint, self._failures,
                reason[:MAX_REASON_CHARS],
            )  # fmt: skip
        try:
            await self._writer.fall_back(reason, drop=drop)
        except (StoreUnavailableError, LeaseLostError):
            return  # the next start reads on from what was written

    async def _give_back(self) -> None:
        try:
            await self._writer.give_back()
        except StoreUnavailableError:
            return  # the lease ends by itself

    async def _follow(self) -> None:
        """Follow the events from the claim until something goes wrong."""
        source = self._source
        sockets = EventSockets(self._context, source.endpoint, source.replay_endpoint, source.topic)
        try:
            await self._catch_up(sockets)
            while True:
                await self._read_on(sockets)
        finally:
            sockets.close()

    # catching up -------------------------------------------------------------------------------------------------
    async def _catch_up(self, sockets: EventSockets, *, gap: bool = False) -> None:
        """Apply what was missed; start with an empty view where that is not to be had."""
        writer = self._writer
        if not sockets.replays:
            # The next batch decides: the one after the last, the first of an engine's life, or a gap.
            if writer.known:
                return await writer.continue_view()
            return await writer.begin_anew(complete=False, reason="what was published before is unknown")
        if writer.known and await self._continue(sockets):
            return self._count(gap, "filled")
        async with aclosing(sockets.replay(0)) as batches:
            first = await anext(batches, None)
            whole = first is None or first.sequence == 0
            self._count(gap, "restarted" if whole else "dropped")
            reason = "" if whole else "the engine no longer keeps its first events"
            if first is None:
                return await writer.begin_anew(complete=True)
            await writer.begin_anew(complete=whole, reason=reason, position=Position(first.sequence - 1, 0.0))
            writer.take(first)
            return await self._apply_replay(sockets, batches)

    async def _continue(self, sockets: EventSockets) -> bool:
        """Whether the replay begins with the very batch that was applied last; then the rest of it is applied."""
        last = self._writer.position
        if last.sequence < 0:
            return False
        async with aclosing(sockets.replay(last.sequence)) as batches:
            if not await _begins_with(last, batches):
                return False
            await self._writer.continue_view()
            await self._apply_replay(sockets, batches)
        return True

    async def _apply_replay(self, sockets: EventSockets, batches: AsyncGenerator[Batch, None]) -> None:
        """Apply the rest of a replay. Missing batches are requested again as long as some of them come: an engine sends
        a long one faster than its socket takes it, and the socket drops what it has no room for."""
        while True:
            begun = self._writer.position
            try:
                async with aclosing(batches):
                    return await self._apply_all(batches)
            except (EventsMissedError, NoReplayError):
                if self._writer.position == begun:
                    raise
            batches = _replay_after(sockets, self._writer.position)

    async def _apply_all(self, batches: AsyncGenerator[Batch, None]) -> None:
        async for batch in batches:
            if self._writer.position.order_of(batch.sequence, batch.published_s) is not BatchOrder.NEXT:
                raise EventsMissedError(f"a replay has {batch.sequence} after {self._writer.position.sequence}")
            self._writer.take(batch)
            if self._writer.changed_blocks >= CHANGES_PER_CALL:
                await self._writer.write()
        await self._writer.write()
        self._failures = 0

    def _count(self, gap: bool, outcome: str) -> None:
        if gap:
            self._metrics.kv_event_gaps.labels(self._pool_name, outcome).inc()

    # reading on --------------------------------------------------------------------------------------------------
    async def _read_on(self, sockets: EventSockets) -> None:
        waiting = await sockets.wait(WAIT_S)
        if sockets.connection_was_lost():
            # The engine may have started again meanwhile, and count from 0 again.
            if sockets.replays:
                return await self._catch_up(sockets, gap=True)
            return await self._writer.begin_anew(complete=False, reason="the connection was lost")
        if not waiting:
            if self._clock.monotonic_s() - self._writer.written_s >= TICK_S:
                await self._writer.write()
            return None
        early_s = self._writer.written_s + WRITE_INTERVAL_S - self._clock.monotonic_s()
        if early_s > 0:
            await self._clock.sleep(early_s)
        while batches := sockets.read():
            if not await self._apply(batches, sockets.replays):
                await self._writer.write()
                return await self._catch_up(sockets, gap=True)
            if self._writer.changed_blocks >= CHANGES_PER_CALL:
                break
        await self._writer.write()
        return None

    async def _apply(self, batches: Sequence[Batch], replays: bool) -> bool:
        """Take what follows; False at a batch that does not, where what is missing can be replayed."""
        writer = self._writer
        for batch in batches:
            step = writer.position.order_of(batch.sequence, batch.published_s)
            if step is BatchOrder.OLD:
                continue
            if step is not BatchOrder.NEXT:
                if replays:
                    return False
                self._count(True, "dropped")
                before = Position(batch.sequence - 1, 0.0)
                await writer.begin_anew(complete=False, reason="events were missed", position=before)
            if batch.sequence == 0:
                await writer.begin_anew(complete=True)  # an engine's first: nothing was before it
            writer.take(batch)
        return True


async def _begins_with(last: Position, batches: AsyncGenerator[Batch, None]) -> bool:
    """Whether a replay's first batch, which is read, is the one that was applied last."""
    first = await anext(batches, None)
    return first is not None and (first.sequence, first.published_s) == (last.sequence, last.published_s)


async def _replay_after(sockets: EventSockets, last: Position) -> AsyncGenerator[Batch, None]:
    """The batches after one that was applied."""
    async with aclosing(sockets.replay(last.sequence)) as batches:
        if not await _begins_with(last, batches):
            raise EventsMissedError(f"a replay from {last.sequence} begins elsewhere")
        async for batch in batches:
            yield batch
