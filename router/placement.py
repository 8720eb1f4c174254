"""Where a request goes: ``scheduling.placing.placement``'s search over the shared store, and the wait for a grant."""

from __future__ import annotations

from dualmap.router.context import ReplicaContext
from dualmap.router.errors import QueueFullError, RouterError, SloUnreachableError, UnavailableError, nobody_ready
from dualmap.router.grant_waiters import ReservationLostError
from dualmap.router.scheduled_request import ScheduledRequest
from dualmap.router.served_pool import ServedPool
from dualmap.scheduling.placing.decision import RouteQuery
from dualmap.scheduling.placing.placement import Placed, PlaceStatus, Search, SearchFailed
from dualmap.scheduling.placing.policies.pinned import Pinned
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.request import Request, RequestState
from dualmap.scheduling.steps import drive


class StorePlacer:
    """Places requests by their pool's policy over the shared store."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    async def place(self, request: ScheduledRequest) -> None:
        """Reserve an instance for the request, and wait for the grant if it is held there.

        Raises:
            QueueFullError: the queue of every instance that could take it is full, or it was late for too long.
            UnavailableError: no instance is ready.
            SloUnreachableError: it would be late, and late requests are refused.
            HoldTimeoutError: it was held too long.
            StoreUnavailableError: the store is out of reach.
        """
        pool, placing = request.pool, request.pool.grant_waiters.placing
        while True:
            request_id, search = request.request_id, self._new_search(request)
            request.searches.append((search, request.store_attempt))
            request.may_be_reserved = True
            placing[request_id] = None
            try:
                placed = await drive(search.run(), pool.fleet)
                request.was_placed(placed)
                grant, instance_id, uncached_tokens = None, placed.instance_id, placed.reply.uncached_tokens
                if placed.reply.status is PlaceStatus.HELD:
                    grant = await self._grant(request, placed)
                    instance_id, uncached_tokens = grant.instance_id, grant.uncached_tokens
                spec = pool.view.view.instances.get(instance_id) or await self._joined(pool, instance_id)
                return request.dispatched(spec, uncached_tokens, held_by=grant)
            except SearchFailed as failed:
                request.not_reserved()
                pool.metrics.stale.inc(search.stale_rounds)
                if not failed.duplicate:
                    raise self._refusal(request, failed, search.request.model) from None
                request.rename()
            except ReservationLostError:
                pool.metrics.replaced.inc()
                request.try_again()
                # Whatever the store has of it after all: an older copy of the store may have said so.
                await pool.fleet.release((pool.fleet.over(request.request_id, request.store_attempt),))
            finally:
                placing.pop(request_id, None)

    def _new_search(self, request: ScheduledRequest) -> Search:
        pool, slo_s, output_tokens = request.pool, request.slo_s, request.prompt.expected_output_tokens
        rule = pool.split_rule if request.inference_request.may_split else None
        if rule is not None and pool.view.view.decoding is not None:
            slo_s = rule.prefill_slo_s(slo_s, request.chain.prompt_tokens, pool.fleet.view, pool.fleet.learned)
        query = RouteQuery(request.chain, slo_s, 0, output_tokens, request.failed)
        pinned_to = request.inference_request.pinned_to
        record = Request(
            request.request_id,
            self._context.replica_id,
            "",
            RequestState.HELD,
            request.store_attempt,
            0,
            request.chain.prompt_tokens,
            output_tokens,
            round(slo_s * 1000),
            request.enqueued_ms,
            pinned=pinned_to is not None,
            stored_tokens=request.prompt.stored_tokens,
            model=request.asked_name,
        )
        refuses = self._context.settings.late_requests == "refuse" and request.store_attempt == 1
        stall_s = pool.scheduling.decode_stall_s
        policy = pool.policy if pinned_to is None else Pinned(pool.policy, pinned_to)
        return Search(
            policy, pool.fleet.order, query, record, pool.fleet, refuses, stall_s, rule=rule, at_once=pool.at_once
        )

    def _refusal(self, request: ScheduledRequest, failed: SearchFailed, model: str) -> RouterError:
        pool = request.pool
        if failed.missed is not None:
            decision = failed.missed.decision
            return SloUnreachableError(
                f"the first token is expected after {decision.expected_ttft_s:.1f} s, past the target of"
                f" {request.slo_s:g} s, and late requests are refused (router.late_requests: refuse); try again later,"
                " allow more time with x-slo-ttft-ms, or set router.late_requests to serve",
                retry_after_s=pool.fleet.expected_wait_s(decision.instance_id),
            )
        if failed.full:
            return QueueFullError(
                f"{', '.join(sorted(failed.full))} of pool {pool.settings.name!r} hold as many requests as"
                " max_queued_requests of each allows; try again later, add instances, or raise max_queued_requests"
                " (pools[].instances, or PATCH /admin/instances/ID)",
                retry_after_s=max(1.0, min(map(pool.fleet.expected_wait_s, failed.full))),
            )
        return nobody_ready(pool.settings.name, model)

    async def _grant(self, request: ScheduledRequest, placed: Placed) -> Grant:
        """Of a request that is held."""
        pool, held_s, instance_id = request.pool, request.held_s, placed.instance_id
        waiters = pool.grant_waiters
        waiter = waiters.expect(request.request_id, request.store_attempt)
        request.count_placed()
        if placed.reply.queue is not None:
            pool.fleet.planner.plan(placed.reply.queue)
        request.hold_began()
        try:
            return await waiters.wait(waiter, held_s, lambda: pool.fleet.expected_wait_s(instance_id))
        finally:
            request.hold_ended()
            waiters.leave(waiter)

    async def _joined(self, pool: ServedPool, instance_id: str) -> InstanceSpec:
        """Of an instance that took the request, and joined after the last refresh of this replica's view."""
        spec = (await pool.view.refresh()).instances.get(instance_id)
        if spec is None:
            raise UnavailableError(
                f"instance {instance_id!r} was removed while the request was sent there", retry_after_s=1.0
            )
        return spec
