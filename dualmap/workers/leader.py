"""Leader election over the store's lease: at most one worker acts for a pool.

A term is held by renewing at a third of the lease. The holder trusts its own monotonic clock for one thing only:
counted from *before* the call that granted or renewed the lease, another worker may lead a full lease later, so by then
its jobs are stopped. Later writes of a paused process are refused by the fencing number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from dualmap.scheduling.backoff import worth_logging
from dualmap.statestore.errors import LeaseLostError, StoreError
from dualmap.statestore.leases import Lease
from dualmap.workers.context import PoolContext

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0
"""Timeout for jobs to end when leadership does."""

Lead = Callable[[Lease], Awaitable[None]]
"""The work of a leader; runs until cancelled, and may raise LeaseLostError."""


@dataclass(frozen=True, slots=True)
class Term:
    """A leadership as its holder sees it, in seconds of the holder's own monotonic clock."""

    lease: Lease
    renewed_s: float
    """Just before the last successful acquire or renew was sent."""


class TermAction(StrEnum):
    """The action that the holder of a term has to take now."""

    WAIT = "wait"
    RENEW = "renew"
    STEP_DOWN = "step_down"


def plan_term(term: Term, now_s: float, lease_s: float) -> TermAction:
    """Renew from a third of the lease on; step down once the lease may have run out."""
    age_s = now_s - term.renewed_s
    if age_s >= lease_s:
        return TermAction.STEP_DOWN
    return TermAction.RENEW if age_s >= lease_s / 3 else TermAction.WAIT


class Election:
    """Campaigns for one pool and runs ``lead`` for as long as the worker holds the lease."""

    def __init__(
        self,
        context: PoolContext,
        *,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self._pool = context.pool
        self._owner = context.worker_id
        self._lease_s = context.worker.lease_s
        self._lease_ms = round(self._lease_s * 1000)
        self._stop_timeout_s = stop_timeout_s
        self._clock = context.clock
        self._metrics = context.metrics
        self._jitter = context.jitter
        self._term: Term | None = None
        self.store_error: str | None = None
        """The store's error at the last call; None while it answers. There is one call every third of a lease."""

    @property
    def lease(self) -> Lease | None:
        """The lease held now, None while another worker (or none) leads."""
        return self._term.lease if self._term else None

    async def run(self, lead: Lead) -> None:
        """Campaign, lead, campaign again, until cancelled. Cancelling steps down: jobs stop, then the lease is
        released."""
        while True:
            term = await self._campaign()
            event = await self._lead_for(term, lead)
            log.warning("term over pool=%s worker=%s event=%s", self._pool.name, self._owner, event)
            # Work that fails would fail again at once: another worker gets the time of a lease to lead.
            await self._clock.sleep(self._lease_s if event == "failed" else self._retry_s())

    def _retry_s(self) -> float:
        """How soon a follower tries again: at most so much later than its lease a dead leader is replaced."""
        return self._lease_s / 10 * self._jitter.uniform(0.5, 1.0)

    async def _campaign(self) -> Term:
        failures = 0
        while True:
            # The time is read before the call: the store counts the lease from a later moment, so no term outlasts it.
            sent_s = self._clock.monotonic_s()
            try:
                async with asyncio.timeout(self._lease_s):
                    lease = await self._pool.leader_lease.acquire(self._owner, self._lease_ms)
            except (StoreError, TimeoutError) as error:  # a store that refuses this client may be corrected
                failures += 1
                self.store_error = f"unavailable: {error!r}"
                if worth_logging(failures):
                    log.warning("cannot campaign pool=%s failures=%d error=%r", self._pool.name, failures, error)
            else:
                failures, self.store_error = 0, None
                if lease is not None:
                    return Term(lease, sent_s)
            await self._clock.sleep(self._retry_s())

    async def _lead_for(self, term: Term, lead: Lead) -> str:
        """One term from its first moment to the release of its lease; returns how it ended."""
        self._term = term
        fence = term.lease.fence
        log.info("elected pool=%s worker=%s fence=%d", self._pool.name, self._owner, fence)
        self._metrics.leader.labels(self._pool.name).set(1)
        self._metrics.fence.labels(self._pool.name).set(fence)
        self._count("started")
        work = asyncio.ensure_future(lead(term.lease))
        event = "stepped_down"
        try:
            event = await self._hold(work)
        finally:
            self._metrics.leader.labels(self._pool.name).set(0)
            self._count(event)
            # Jobs stop before the lease is released: those of two leaders must not overlap.
            await self._stop(work)
            held, self._term = self._term.lease, None
            # The lease may be another worker's already after any other end.
            if event in ("stepped_down", "failed"):
                await self._release(held)
        return event

    def _count(self, event: str) -> None:
        self._metrics.terms.labels(self._pool.name, event).inc()

    async def _hold(self, work: asyncio.Future[None]) -> str:
        """Renew until the lease is lost or may have run out, or until the work ends by itself."""
        while self._term is not None and not work.done():
            step = plan_term(self._term, self._clock.monotonic_s(), self._lease_s)
            if step is TermAction.STEP_DOWN:
                return "expired"
            if step is TermAction.RENEW:
                try:
                    self._term = await self._renew(self._term)
                    self.store_error = None
                except LeaseLostError:
                    return "lost"
                except (StoreError, TimeoutError) as error:
                    self.store_error = f"unavailable: {error!r}"
                    log.warning("cannot renew pool=%s worker=%s error=%r", self._pool.name, self._owner, error)
            await self._pause(self._lease_s / 12, work)
        return _ending(work)

    async def _renew(self, term: Term) -> Term:
        sent_s = self._clock.monotonic_s()
        # The call is bounded by the lease: a renewal that hangs must not keep the jobs running past its end.
        async with asyncio.timeout(max(0.001, term.renewed_s + self._lease_s - sent_s)):
            return Term(await self._pool.leader_lease.renew(term.lease, self._lease_ms), sent_s)

    async def _pause(self, delay_s: float, work: asyncio.Future[None]) -> None:
        sleeper = asyncio.ensure_future(self._clock.sleep(delay_s))
        try:
            await asyncio.wait({sleeper, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeper.cancel()

    async def _stop(self, work: asyncio.Future[None]) -> None:
        work.cancel()
        _, running = await asyncio.wait({work}, timeout=self._stop_timeout_s)
        if running:
            # It is safe to continue: the fence refuses their later writes.
            log.error("jobs still running pool=%s after_s=%.1f", self._pool.name, self._stop_timeout_s)
        elif not work.cancelled():
            work.exception()  # retrieved here, so that the event loop does not report it

    async def _release(self, lease: Lease) -> None:
        """Let the next leader start at once instead of after the lease; a failure is harmless."""
        try:
            async with asyncio.timeout(self._lease_s):
                await self._pool.leader_lease.release(lease)
        except (StoreError, TimeoutError) as error:
            log.warning("lease not released pool=%s worker=%s error=%r", self._pool.name, self._owner, error)
        else:
            log.info("lease released pool=%s worker=%s fence=%d", self._pool.name, self._owner, lease.fence)


def _ending(work: asyncio.Future[None]) -> str:
    """How work that ended by itself changes the term: a refused write means the lease is lost."""
    error = None if work.cancelled() else work.exception()
    if isinstance(error, LeaseLostError):
        return "lost"
    if error is not None:
        log.error("leader's work failed error=%r", error, exc_info=error)
    return "failed"
