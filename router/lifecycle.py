"""The life of a request, independent of what carries its bytes.

    place ──▶ [held ──▶ granted] ──▶ first_token ──▶ finish
                  ▲                      │
                  └──── reroute ◀────────┘   (only before the first byte)

``finish`` ends a flight from wherever it is; a failed or cancelled ``place`` or ``reroute`` has called it already.
"""

from __future__ import annotations

import secrets
from typing import Protocol

from router.ask import Ask, InstanceFailure, Outcome, Usage
from router.context import ReplicaContext
from router.errors import from_exception
from router.failures import outcome_of
from router.flight import ScheduledFlight
from router.instance_loss import InstanceLossNotifier
from router.passing import PassingFlight, PassingTraffic
from router.placement import StorePlacer
from router.pools import PoolDirectory, Route
from router.prompt import read_prompt
from router.served_pool import ServedPool


class Flight(Protocol):
    """One live request that its instance may be given now. Every transition is idempotent."""

    request_id: str
    """The ask's own, or that with a suffix when another live request of the fleet has the same."""
    model: str
    """The model name to send to the instance (an alias resolved)."""
    instance_id: str
    instance_url: str
    expected_cached_tokens: int
    attempts: int

    @property
    def expected_ttft_s(self) -> float | None:
        """TTFT that its placement expected; None when it was placed by nothing that expects one, or again."""

    @property
    def loss_notifier(self) -> InstanceLossNotifier:
        """Tells that ``instance_id`` was given up, to whoever waits for its first byte."""

    def first_token(self) -> None:
        """The instance produced its first token. Never waits; repetitions change nothing."""

    async def reroute(self, failure: InstanceFailure) -> None:
        """The instance failed before the first byte: move to another one, perhaps waiting for its grant.

        Afterwards ``instance_id``, ``instance_url`` and ``attempts`` name the new try. When this raises, or is
        cancelled, the flight is over and released.

        Raises:
            RouterError: no attempt, budget or instance is left.
        """

    def finish(self, outcome: Outcome, usage: Usage | None = None) -> None:
        """The request is over, however it went: release everything. Never waits; only the first call counts."""


class Lifecycle:
    """Takes requests in and places them, on one replica."""

    def __init__(self, pools: PoolDirectory[ServedPool], context: ReplicaContext) -> None:
        self.pools = pools
        self._context = context
        self._placer = StorePlacer(context)
        self._passing = {name: PassingTraffic() for name in pools.pools}

    async def place(self, ask: Ask) -> Flight:
        """Hash, route, reserve, and wait for the grant (bounded).

        The caller owes the flight a ``finish``. When this raises, or is cancelled, nothing is left behind.

        Raises:
            RouterError: the request is refused.
        """
        flight: ScheduledFlight | None = None
        try:
            route = self.pools.resolve(ask.model)
            if not ask.scheduled:
                ask.forget_body()
                return self._pass_on(ask, route)
            # Read before anything is entered: a bad body touches no state.
            flight = self._open(ask, route)
            self._admit(flight)
            try:
                await self._placer.place(flight)
            except BaseException as error:
                flight.finish(outcome_of(error))
                raise
            return flight
        except Exception as error:
            refusal = from_exception(error)
            if flight is not None:
                refusal.request_id = flight.request_id
            if refusal is error:
                raise
            raise refusal from error

    def _pass_on(self, ask: Ask, route: Route[ServedPool]) -> PassingFlight:
        pool = route.pool
        flight = PassingFlight(
            self._free_id(ask.request_id),
            model=route.model,
            pool=pool,
            traffic=self._passing[pool.settings.name],
            context=self._context,
        )
        self._admit(flight)
        try:
            flight.take_off()
        except BaseException as error:
            flight.finish(outcome_of(error))
            raise
        return flight

    def _open(self, ask: Ask, route: Route[ServedPool]) -> ScheduledFlight:
        pool = route.pool
        prompt = read_prompt(
            ask,
            model=pool.settings.model,
            lora=route.lora,
            rule=pool.blocks,
            bytes_per_token=pool.view.bytes_per_token,
            default_output_tokens=pool.scheduling.expected_output_tokens,
        )
        ask.forget_body()
        return ScheduledFlight(
            ask,
            request_id=self._free_id(ask.request_id),
            route=route,
            prompt=prompt,
            context=self._context,
            placer=self._placer,
        )

    def _free_id(self, request_id: str) -> str:
        """The id itself unless a request of this replica has it, or its release is on its way; other replicas are asked
        by the reservation."""
        if self._context.live.is_free(request_id):
            return request_id
        return f"{request_id}-{secrets.token_hex(4)}"

    def _admit(self, flight: ScheduledFlight | PassingFlight) -> None:
        self._context.live.admit(flight)
        self._context.retries.deposit()
        flight.pool.metrics.in_flight.inc()
