"""The view of one engine and its copy in the store: claimed, begun again, and changed batch by batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dualmap.runtime.clock import Clock
from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.statestore.kv_views import KvViewStatus
from dualmap.statestore.pool import PoolStore
from dualmap.workers.kv_events.decoding import Batch, as_cached
from dualmap.workers.kv_events.engine_names import ROOT_HASHES
from dualmap.workers.kv_events.engine_view import EngineView
from dualmap.workers.kv_events.group_holdings import AmbiguousEventsError
from dualmap.workers.kv_events.reading import BEGINNING, Position
from dualmap.workers.kv_events.source import EventSource
from dualmap.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

SLOW_CALL_S: Final = 1.0
"""A store that takes longer to apply a change does not keep up."""
NAMES_SENT: Final = 10_000
"""Changes of names after which all names are sent to the store again, if they are also three times as many as there are
names."""
UNMATCHED_BLOCKS: Final = 4096
"""Stored blocks, none of which had been booked, that show that prompts are not cut into the engine's blocks."""


MAX_REASON_CHARS: Final = 200
"""A reason may quote what an engine sent."""


class StoreSlowError(Exception):
    """The store does not keep up with the events."""


class ViewWriter:
    """Every method that writes raises StoreUnavailableError, and LeaseLostError once the claim is another's."""

    def __init__(
        self,
        pool: PoolStore,
        source: EventSource,
        *,
        tiers: Mapping[Tier, int],
        clock: Clock,
        metrics: WorkerMetrics,
        wall_s: Callable[[], float],
        cached_as: Callable[[str], str] = str,
        roots: Sequence[bytes] = ROOT_HASHES,
    ) -> None:
        """``tiers`` are the tokens of each tier that the instance has; ``cached_as`` gives the name that the KV of an
        adapter has in the fleet by now; ``roots`` are the engine's hashes that may be before a prompt's first block."""
        self._roots = roots
        self._cached_as = cached_as
        self._pool = pool
        self._tiers = tiers
        self._source = source
        self._clock = clock
        self._metrics = metrics
        self._wall_s = wall_s
        self._fence: int | None = None
        self._view = EngineView(sizes=tiers, roots=roots)
        self._complete = False
        """Every event of the engine's life is in the view."""
        self._unmatched_blocks = 0
        self._names_sent = 0
        """Changes of names that the store keeps besides those of today: it keeps every one."""
        self.status = KvViewStatus.ESTIMATE
        self._reason = ""
        self._groups = ""
        """The cache groups that were logged."""
        self.position = BEGINNING
        self.known = False
        """Whether the position is that of the store's view."""
        self.written_s = 0.0
        self._oldest_s: float | None = None
        """When the first batch that is not written yet was published."""

    @property
    def changed_blocks(self) -> int:
        return self._view.changed_blocks

    async def claim(self, worker_id: str) -> bool:
        """Take the instance over, with what an earlier subscriber knew; False while another one has it."""
        instance_id = self._source.instance_id
        record = await self._pool.kv_events.claim(instance_id, worker_id)
        if record is None:
            return False
        # Every later write carries this fence, so that the claim of another worker refuses it.
        self._fence = record.fence
        self.known = record.sequence is not None
        names = await self._pool.kv_events.names(instance_id) if self.known else None
        self._view = EngineView(names, self._tiers, self._roots)
        self._names_sent = NAMES_SENT + 3 * self._view.named_blocks  # how many the one before told is not known
        self.position = BEGINNING if record.sequence is None else Position(record.sequence, record.published_s)
        # A partial view that cannot be followed is dropped, see ``fall_back``: what is known else, is complete.
        self._complete = self.known and record.status is not KvViewStatus.PARTIAL
        self.status = KvViewStatus.ESTIMATE
        self._unmatched_blocks = 0
        self._oldest_s = None
        return True

    async def give_back(self) -> None:
        """The store's view stays as it is, for the next subscriber."""
        if self._fence is not None:
            await self._pool.kv_events.release(self._source.instance_id, self._fence)
            self._fence = None

    async def continue_view(self) -> None:
        """The view that was claimed is followed again."""
        await self._mark(KvViewStatus.EXACT if self._complete else KvViewStatus.PARTIAL, "")

    async def begin_anew(self, *, complete: bool, reason: str = "", position: Position = BEGINNING) -> None:
        """An empty view: of an engine that starts, or whose events before ``position`` are unknown."""
        former = None if complete else self._view
        self._view, self.position = EngineView(sizes=self._tiers, roots=self._roots, former=former), position
        self._complete, self._oldest_s = complete, None
        self._names_sent = 0
        self._unmatched_blocks = 0
        # All events of an engine's life are applied from here on: host memory is empty at their beginning. Disks and
        # shared stores outlive an engine.
        emptied = (Tier.HOST,) if complete else ()
        status = KvViewStatus.EXACT if complete else KvViewStatus.PARTIAL
        await self._mark(status, reason, drop=True, emptied=emptied)
        self.known = True

    async def fall_back(self, reason: str, *, drop: bool) -> None:
        """No worker follows the view for now; it is dropped if it was partial."""
        if self._fence is not None:
            partial = self.status is KvViewStatus.PARTIAL
            await self._mark(KvViewStatus.ESTIMATE, reason, drop=drop or partial)

    def take(self, batch: Batch) -> None:
        """Raises AmbiguousEventsError."""
        rank = self._source.rank
        if rank is not None and batch.rank is not None and batch.rank != rank:
            raise AmbiguousEventsError(f"its endpoint publishes events of rank {batch.rank}, not of {rank}")
        orphans = self._view.orphans
        self._view.apply(as_cached(batch, self._cached_as))
        self.position = Position(batch.sequence, batch.published_s)
        if self._oldest_s is None:
            self._oldest_s = batch.published_s
        self._metrics.kv_event_batches.labels(self._pool.name).inc()
        if self._view.orphans > orphans:
            self._metrics.kv_event_blocks.labels(self._pool.name, "unknown").inc(self._view.orphans - orphans)

    async def write(self) -> None:
        """Everything that was taken since, as one change. Of an engine that published nothing so far, the status.

        Raises:
            StoreSlowError: see there.
        """
        if self.position.sequence < 0:
            self.written_s = self._clock.monotonic_s()
            return await self._mark(self.status, self._reason)
        position, instance_id = self.position, self._source.instance_id
        if self._view.groups != self._groups:
            self._groups = self._view.groups
            log.info("KV events pool=%s instance=%s groups=%s", self._pool.name, instance_id, self._groups)
        all_names = self._names_sent > max(NAMES_SENT, 3 * self._view.named_blocks)
        change, cleared = self._view.take_change(position.sequence, position.published_s, all_names=all_names)
        if cleared:
            self._complete = True  # the engine's cache was empty then, and is known since
            await self._mark(KvViewStatus.EXACT, "", drop=True)
        assert self._fence is not None
        started_s = self._clock.monotonic_s()
        booked = await self._pool.kv_events.apply(instance_id, self._fence, change)
        self.known = True  # also of a view that was cleared, and dropped in the store
        self.written_s = self._clock.monotonic_s()
        self._names_sent = 0 if all_names else self._names_sent + len(change.names)
        blocks = self._metrics.kv_event_blocks
        if change.stored:
            blocks.labels(self._pool.name, "stored").inc(len(change.stored))
        if change.removed:
            blocks.labels(self._pool.name, "removed").inc(len(change.removed))
        for came, tier_blocks in (("stored", "tier_stored"), ("removed", "tier_removed")):
            if count := sum(len(getattr(each, came)) for each in change.tiers.values()):
                blocks.labels(self._pool.name, tier_blocks).inc(count)
        if change.names:
            lag_s = max(0.0, self._wall_s() - (self._oldest_s or position.published_s))
            self._metrics.kv_event_lag_seconds.labels(self._pool.name).observe(lag_s)
        self._oldest_s = None
        await self._match(len(change.stored), booked)
        if self.written_s - started_s > SLOW_CALL_S:
            raise StoreSlowError(f"the store took {self.written_s - started_s:.1f} s for {len(change.names)} blocks")
        return None

    async def _match(self, stored: int, booked: int) -> None:
        """Mark the view partial where the engine confirms no booking: bookings must not end for want of confirmation
        then."""
        self._unmatched_blocks = 0 if booked else self._unmatched_blocks + stored
        if self._unmatched_blocks > UNMATCHED_BLOCKS and self.status is KvViewStatus.EXACT:
            await self._mark(KvViewStatus.PARTIAL, "no reported block was in a prompt: is there another tokenizer?")
        elif booked and self._complete and self.status is KvViewStatus.PARTIAL:
            await self._mark(KvViewStatus.EXACT, "")

    async def _mark(
        self, status: KvViewStatus, reason: str, *, drop: bool = False, emptied: Sequence[Tier] = ()
    ) -> None:
        assert self._fence is not None
        instance_id = self._source.instance_id
        marks = self._pool.kv_events.mark
        await marks(instance_id, self._fence, status, reason[:MAX_REASON_CHARS], drop=drop, emptied=emptied)
        if drop:
            self.known = False
        if status is not self.status:
            log.info("KV events pool=%s instance=%s status=%s reason=%s", self._pool.name, instance_id, status, reason)
        self.status, self._reason = status, reason
