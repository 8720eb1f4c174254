"""Where a request goes: observe, decide, reserve; and again when the fleet has moved meanwhile.

Where nothing is left to weigh, all three are one call of the store.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.context import ReplicaContext
from router.errors import QueueFullError, RouterError, SloUnreachableError, UnavailableError, nobody_ready
from router.explain import PlacementRound
from router.grant_waiters import GrantWaiter, ReservationLostError
from router.metrics import measured
from router.placement_limiter import PlacementLimiter
from router.scheduled_request import ScheduledRequest
from router.served_pool import ServedPool
from scheduling.decision import Decision, RouteQuery, SecondLook
from scheduling.errors import NoInstanceError
from scheduling.instance import InstanceSpec
from scheduling.ttft import queueing_s
from statestore.base import Grant, Observation
from statestore.reservation import IdlePlacement, Newcomer, Reservation, ReserveStatus

CHECKED_ROUNDS = 2
"""Decisions whose loads the reservation re-checks; the next one is taken as it is, so that a storm of
arrivals cannot keep a request out of the fleet by moving the load between its every two steps."""
MAX_ROUNDS = 12

_Decided = tuple[Decision, ReserveStatus | None]
"""A decision, and what became of it where it was reserved as the candidates were looked at."""


@dataclass(slots=True)
class _Search:
    """What one search for an instance has learned so far."""

    slot_wait_left_s: float
    """What is left of the longest wait for slots, see ``router.placement_limiter``."""
    rounds: int = 0
    stale_rounds: int = 0
    refreshed: bool = False
    full: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    ignore_breakers: bool = False
    limited: bool = True
    """Whether the next look waits for a slot: not once something else than others' placements stood in the way."""


class StorePlacer:
    """Places requests by their pool's policy over the shared store."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        calls = context.metrics.store_calls
        self._observing = calls["observe"]
        self._reserving = calls["reserve"]
        self._reserving_idle = calls["reserve_idle"]

    async def place(self, request: ScheduledRequest) -> None:
        """Reserve an instance for the request, and wait for the grant if it is held there.

        Raises:
            QueueFullError: the queue of every instance that could take it is full.
            UnavailableError: no instance is ready.
            SloUnreachableError: it would be late, and late requests are refused.
            HoldTimeoutError: it was held too long.
            StoreUnavailableError: the store is out of reach.
        """
        limiter, waiters = request.pool.placement_limiter, request.pool.grant_waiters
        search = _Search(limiter.max_wait_s)
        while True:
            waiter = waiters.expect(request.request_id, request.store_attempt)
            try:
                decision, status = await self._decide(request, search)
                if status is None:
                    self._refuse_if_late(request, decision)
                    status = await self._reserve(request, decision, search)
                if status is ReserveStatus.DISPATCHED:
                    self._placed(request, decision)
                    return await self._dispatch(request, decision.instance_id, decision.uncached_tokens)
                if status is ReserveStatus.HELD:
                    self._placed(request, decision)
                    grant = await self._wait(request, waiter)
                    return await self._dispatch(request, grant.instance_id, grant.uncached_tokens, was_held=True)
                await self._learn(request, decision, status, search)
            except ReservationLostError:
                # A newer attempt replaces whatever the store may remember of this one after all.
                request.store_attempt += 1
                request.pool.metrics.replaced.inc()
                search = _Search(limiter.max_wait_s)
            finally:
                waiters.leave(waiter)

    async def _learn(
        self, request: ScheduledRequest, decision: Decision, status: ReserveStatus, search: _Search
    ) -> None:
        """Nothing was reserved: see to it that the next round decides otherwise.

        Raises:
            QueueFullError, UnavailableError: there were enough rounds.
        """
        if request.store_attempt == 1:
            request.not_reserved()
        search.limited = status is ReserveStatus.STALE
        match status:
            case ReserveStatus.STALE:
                search.stale_rounds += 1
                request.pool.metrics.stale.inc()
            case ReserveStatus.NOT_READY:
                search.gone |= {decision.instance_id}
                await request.pool.view.refresh()
            case ReserveStatus.QUEUE_FULL:
                search.full |= {decision.instance_id}
            case ReserveStatus.DUPLICATE:
                request.not_reserved()  # it is another request's, and not ours to release
                request.rename()
        search.rounds += 1
        if search.rounds >= MAX_ROUNDS:
            raise _nowhere(request.pool, search)

    # deciding ---------------------------------------------------------------------------------------------------
    async def _decide(self, request: ScheduledRequest, search: _Search) -> _Decided:
        while True:
            try:
                return await self._decide_in_turn(request, search)
            except NoInstanceError:
                await self._widen(request.pool, search)

    async def _decide_in_turn(self, request: ScheduledRequest, search: _Search) -> _Decided:
        """What is not reserved yet the caller reserves before it waits for anything else: whoever is next sees it."""
        limiter, tokens = request.pool.placement_limiter, request.chain.prompt_tokens
        has_slot = search.limited and (
            limiter.try_acquire(tokens) or await self._wait_for_slot(limiter, tokens, search)
        )
        try:
            return await self._observe_and_decide(request, search)
        finally:
            if has_slot:
                limiter.release(tokens)

    async def _wait_for_slot(self, limiter: PlacementLimiter, prompt_tokens: int, search: _Search) -> bool:
        before_s = self._context.clock.monotonic_s()
        try:
            return await limiter.acquire(prompt_tokens, search.slot_wait_left_s)
        finally:
            search.slot_wait_left_s -= self._context.clock.monotonic_s() - before_s

    async def _observe_and_decide(self, request: ScheduledRequest, search: _Search) -> _Decided:
        """Raises NoInstanceError."""
        policy = request.pool.policy
        excluded, candidates = self._candidates(request, search)
        if request.pool.may_be_idle(candidates) and not excluded and request.store_attempt == 1:
            seen, placement = await self._reserve_idle(request, candidates)
            if placement is not None:
                return placement.decision, ReserveStatus.DISPATCHED
        else:
            seen = await self._observe(request, candidates, horizon=policy.looks_beyond)
        if request.pool.reserves_idle:
            request.pool.weighed(seen.loads)
        pair = policy.candidates(_query(request), request.pool.view.view) if excluded else candidates
        query, loads = _query(request, excluded, pair, seen.sequence), seen.loads
        if seen.horizon is None:
            answer: Decision | SecondLook = policy.choose(query, loads)
        else:
            answer = policy.choose_or_look(query, loads, seen.horizon)
        if isinstance(answer, SecondLook):
            if further := self._not_blocked(request.pool, search, answer.instance_ids):
                loads = {**loads, **(await self._observe(request, further)).loads}
                candidates += further
            answer = policy.choose(query, loads)
        request.rounds.append(PlacementRound.of(candidates, loads, answer, request.store_attempt))
        return answer, None

    async def _reserve_idle(
        self, request: ScheduledRequest, candidates: tuple[str, ...]
    ) -> tuple[Observation, IdlePlacement | None]:
        """Look at the candidates, and reserve the one that leaves nothing to weigh, if there is one."""
        newcomer = Newcomer(
            request.request_id,
            self._context.replica_id,
            request.chain,
            request.prompt.expected_output_tokens,
            round(request.slo_s * 1000),
        )
        request.may_be_reserved = True
        seen, placement = await measured(self._reserving_idle, request.pool.store.reserve_idle(candidates, newcomer))
        self._note(request.pool, seen)
        if placement is None:
            request.not_reserved()
        else:
            request.reservation = placement.reservation
            told = PlacementRound.of(candidates, seen.loads, placement.decision, 1, ReserveStatus.DISPATCHED)
            request.rounds.append(told)
        return seen, placement

    async def _observe(
        self, request: ScheduledRequest, instance_ids: tuple[str, ...], *, horizon: bool = False
    ) -> Observation:
        pool = request.pool
        seen = await measured(self._observing, pool.store.observe(instance_ids, request.chain, horizon=horizon))
        self._note(pool, seen)
        return seen

    def _note(self, pool: ServedPool, seen: Observation) -> None:
        pool.view.note(seen)
        pool.last_seen.note(seen.loads)

    def _not_blocked(self, pool: ServedPool, search: _Search, instance_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Those of them that are not behind an open breaker."""
        if search.ignore_breakers:
            return instance_ids
        blocked = pool.breakers.blocked(self._context.clock.monotonic_s())
        return tuple(instance_id for instance_id in instance_ids if instance_id not in blocked)

    def _candidates(self, request: ScheduledRequest, search: _Search) -> tuple[frozenset[str], tuple[str, ...]]:
        """Whom not to ask, and the candidates that leaves, none of them behind an open breaker if there are others.

        Raises:
            NoInstanceError: nobody is left to ask.
        """
        pool, view = request.pool, request.pool.view.view
        excluded = search.full | search.gone | request.failed
        candidates = pool.policy.candidates(_query(request, excluded), view)
        blocked = pool.breakers.blocked(self._context.clock.monotonic_s())
        while blocked and not search.ignore_breakers and not blocked.isdisjoint(candidates):
            excluded |= blocked.intersection(candidates)
            candidates = pool.policy.candidates(_query(request, excluded), view)
        return excluded, candidates

    async def _widen(self, pool: ServedPool, search: _Search) -> None:
        """Nobody can take the request: look at the members afresh, then trust even those whose breaker is open."""
        if search.full:
            raise _nowhere(pool, search)
        if not search.refreshed:
            search.refreshed = True
            search.gone = frozenset()
            await pool.view.refresh()
        elif not search.ignore_breakers:
            search.ignore_breakers = True
        else:
            raise _nowhere(pool, search)

    def _refuse_if_late(self, request: ScheduledRequest, decision: Decision) -> None:
        """Where the operator wants it, refuse what would be late, as long as nobody has been promised anything.

        Raises:
            SloUnreachableError: the first token is expected after the request's SLO.
        """
        if self._context.settings.late_requests == "serve" or request.store_attempt > 1:
            return
        if decision.expected_ttft_s > request.slo_s:
            load, pool = request.rounds[-1].loads[decision.instance_id], request.pool
            raise SloUnreachableError(
                f"the first token is expected after {decision.expected_ttft_s:.1f} s, past the target of"
                f" {request.slo_s:g} s; try again later, or allow more time with x-slo-ttft-ms",
                retry_after_s=queueing_s(load, pool.scheduling.decode_stall_s),
            )

    # reserving --------------------------------------------------------------------------------------------------
    async def _reserve(self, request: ScheduledRequest, decision: Decision, search: _Search) -> ReserveStatus:
        checked = search.stale_rounds < CHECKED_ROUNDS
        scheduling = request.pool.scheduling
        request.reservation = Reservation(
            request_id=request.request_id,
            replica_id=self._context.replica_id,
            instance_id=decision.instance_id,
            chain=request.chain,
            uncached_tokens=decision.uncached_tokens,
            expected_output_tokens=request.prompt.expected_output_tokens,
            slo_ms=round(request.slo_s * 1000),
            alternative_id=decision.alternative_id,
            alternative_uncached_tokens=decision.alternative_uncached_tokens,
            attempt=request.store_attempt,
            seen_pending_tokens=decision.seen_pending_tokens if checked else None,
            tolerance_tokens=scheduling.reserve_tolerance_tokens,
            overloaded=decision.overloaded,
            ttft_features=decision.ttft_features,
        )
        request.may_be_reserved = True
        outcome = await measured(self._reserving, request.pool.store.reserve(request.reservation))
        request.rounds[-1].status = outcome.status
        return outcome.status

    def _placed(self, request: ScheduledRequest, decision: Decision) -> None:
        pool, now_s = request.pool, self._context.clock.monotonic_s()
        pool.breakers.sending(decision.instance_id, now_s)
        pool.metrics.reasons[decision.reason].inc()
        request.placed(decision.expected_ttft_s)
        if request.attempts == 0:
            pool.metrics.decision_s.observe(now_s - request.started_s)

    async def _dispatch(
        self, request: ScheduledRequest, instance_id: str, uncached_tokens: int, *, was_held: bool = False
    ) -> None:
        """The request may go there now."""
        pool = request.pool
        spec = pool.view.view.instances.get(instance_id) or await self._joined(request, instance_id)
        pool.metrics.hold_s.observe(request.held_s)
        request.dispatched(spec, uncached_tokens, was_held=was_held)

    async def _wait(self, request: ScheduledRequest, waiter: GrantWaiter) -> Grant:
        pool, reservation = request.pool, request.reservation
        assert reservation is not None
        held_s = request.held_s
        request.hold_began()
        try:
            return await pool.grant_waiters.wait(waiter, held_s, lambda: pool.expected_wait_s(reservation.instance_id))
        finally:
            request.hold_ended()

    async def _joined(self, request: ScheduledRequest, instance_id: str) -> InstanceSpec:
        """An instance that joined after the last refresh, and the rebalancer knew it first."""
        spec = (await request.pool.view.refresh()).instances.get(instance_id)
        if spec is None:
            raise UnavailableError(
                f"instance {instance_id!r} was removed while the request was sent there", retry_after_s=1.0
            )
        return spec


def _query(
    request: ScheduledRequest, excluded: frozenset[str] = frozenset(), pair: tuple[str, ...] = (), sequence: int = 0
) -> RouteQuery:
    return RouteQuery(request.chain, request.slo_s, sequence, request.prompt.expected_output_tokens, excluded, pair)


def _nowhere(pool: ServedPool, search: _Search) -> RouterError:
    if search.full:
        wait_s = min(pool.expected_wait_s(instance_id) for instance_id in search.full)
        return QueueFullError(
            f"the queues of pool {pool.settings.name!r} are full; try again later or add instances",
            retry_after_s=max(1.0, wait_s),
        )
    return nobody_ready(pool.settings.name)
