"""The life of a request, independent of what carries its bytes.

    place ──▶ [held ──▶ granted] ──▶ first_token ──▶ finish
                  ▲                      │
                  └──── reroute ◀────────┘   (only before the first byte)

``finish`` ends a request from wherever it is; a failed or cancelled ``place`` or ``reroute`` has called it already.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Protocol

from dualmap.router.context import ReplicaContext
from dualmap.router.errors import NotFoundError, from_exception
from dualmap.router.failures import outcome_of
from dualmap.router.inference_request import RESPONSES_PATH, InferenceRequest
from dualmap.router.instance_loss import InstanceLossNotifier
from dualmap.router.outcome import InstanceFailure, Outcome, Usage
from dualmap.router.passthrough import PassthroughBalancer, PassthroughRequest
from dualmap.router.placement import StorePlacer
from dualmap.router.pools import PoolDirectory, Route
from dualmap.router.prompt import read_prompt
from dualmap.router.scheduled_request import ScheduledRequest
from dualmap.router.served_pool import ServedPool
from dualmap.scheduling.state.legs import Leg


class PlacedRequest(Protocol):
    """One live request that may be sent to its instance now. Every transition is idempotent."""

    request_id: str
    """The client's own, or that with a suffix when another live request of the fleet has the same."""
    model: str
    """The model name to send to the instance (an alias resolved)."""
    instance_id: str
    instance_url: str
    data_parallel_rank: int | None
    """Of the server at that URL; None for the whole server."""
    attempts: int
    leg: Leg
    """PREFILL: what its instance answers is for the instance of its decode leg."""

    @property
    def answering_id(self) -> str:
        """The instance whose answer the client gets, or is to get."""

    @property
    def expected_cached_tokens(self) -> int:
        """Prompt tokens that its instance is expected to find in its KV cache."""

    @property
    def expected_ttft_s(self) -> float | None:
        """TTFT that its placement expected; None if it was passed on, or placed again."""

    @property
    def loss_notifier(self) -> InstanceLossNotifier:
        """Notifies the exchange that waits for the first byte when ``instance_id`` is given up."""

    def sent(self) -> None:
        """The request is on its way to ``instance_id``: do what was put off so as not to delay it. Never waits."""

    def first_token(self) -> None:
        """The instance produced its first token. Never waits; repetitions change nothing."""

    async def reroute(self, failure: InstanceFailure) -> None:
        """The instance failed before the first byte: move to another one, perhaps waiting for its grant.

        Afterwards ``instance_id``, ``instance_url`` and ``attempts`` name the new try. When this raises, or is
        cancelled, the request is over and released.

        Raises:
            RouterError: no attempt, budget or instance is left.
        """

    def instance_failed(self, failure: InstanceFailure) -> None:
        """The instance failed the request for good, perhaps in an answer that has begun; the caller must call
        ``finish``. Never waits."""

    def finish(self, outcome: Outcome, usage: Usage | None = None) -> None:
        """The request is over, however it went: release everything. Never waits; only the first call counts."""


SplitRequest = ScheduledRequest
"""A placed request that can have two legs."""


class Lifecycle:
    """Takes requests in and places them, on one replica."""

    def __init__(self, pools: PoolDirectory[ServedPool], context: ReplicaContext) -> None:
        self.pools = pools
        self._context = context
        self._placer = StorePlacer(context)
        self._balancers = {name: PassthroughBalancer() for name in pools.pools}

    async def place(self, request: InferenceRequest) -> PlacedRequest:
        """Hash, route, reserve, and wait for the grant (bounded).

        The caller must call ``finish`` of the placed request. When this raises, or is cancelled, nothing is left
        behind.

        Raises:
            RouterError: the request is refused.
        """
        scheduled: ScheduledRequest | None = None
        try:
            route = self._route_of(request)
            if request.prompt is None:
                return await self._pass_through(request, route)
            # Read before anything is entered: a bad body touches no state.
            pool = route.pool
            prompt = await read_prompt(
                request.prompt,
                model=pool.settings.model,
                lora=route.lora,
                rule=pool.blocks,
                learned=pool.view.learned,
                tokenizer=pool.tokenizer,
            )
            if request.continues is not None:
                prompt = replace(prompt, stored_tokens=await pool.stored_responses.tokens(request.continues))
            request.prompt = None
            request_id = self._free_id(request.request_id)
            scheduled = ScheduledRequest(request, request_id, route, prompt, self._context, self._placer)
            self._admit(scheduled)
            try:
                if pool.quarantine.suspects:  # else no request has to wait
                    scheduled.trial = await pool.quarantine.admit(scheduled.prompt_hash)
                await self._placer.place(scheduled)
            except BaseException as error:
                scheduled.finish(outcome_of(error))
                raise
            return scheduled
        except Exception as error:
            refusal = from_exception(error)
            if scheduled is not None:
                refusal.request_id = scheduled.request_id
            if refusal is error:
                raise
            raise refusal from error

    def _route_of(self, request: InferenceRequest) -> Route[ServedPool]:
        """Of the model that it names; of a request for what an instance has stored, the pool of that instance."""
        if request.pinned_to is None or request.path == RESPONSES_PATH:
            return self.pools.routes.get(request.model) or self.pools.resolve(request.model, request.unread)
        for pool in self.pools.pools.values():
            if request.pinned_to in pool.view.view.instances:
                return Route(pool, pool.settings.model)
        raise NotFoundError(f"instance {request.pinned_to!r}, which stored this response, is not in the fleet any more")

    async def _pass_through(self, request: InferenceRequest, route: Route[ServedPool]) -> PassthroughRequest:
        pool = route.pool
        passed = PassthroughRequest(
            self._free_id(request.request_id),
            model=route.model,
            prompt_hash=request.body_hash,
            pool=pool,
            balancer=self._balancers[pool.settings.name],
            context=self._context,
            trace=request.trace,
            pinned_to=request.pinned_to,
        )
        self._admit(passed)
        try:
            passed.trial = await pool.quarantine.admit(passed.prompt_hash)
            passed.pick_instance()
        except BaseException as error:
            passed.finish(outcome_of(error))
            raise
        return passed

    def _free_id(self, request_id: str) -> str:
        """The id itself unless a request of this replica has it, or its release is on its way; other replicas are asked
        by the reservation."""
        if self._context.live.is_free(request_id):
            return request_id
        return f"{request_id}-{secrets.token_hex(4)}"

    def _admit(self, request: ScheduledRequest | PassthroughRequest) -> None:
        self._context.live.admit(request)
        request.pool.metrics.in_flight.inc()
