"""The second leg of a split request: where it is answered, once its prompt was prefilled elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from dualmap.router.context import ReplicaContext
from dualmap.router.explain import PlacementRound
from dualmap.router.failures import spend_retry
from dualmap.router.inference_request import InferenceRequest
from dualmap.router.outcome import FailureKind, InstanceFailure
from dualmap.router.prompt import ReadPrompt
from dualmap.router.quarantine import Trial
from dualmap.router.served_pool import ServedPool
from dualmap.scheduling.estimates.learning import transfer_note
from dualmap.scheduling.placing.decision import RouteQuery
from dualmap.scheduling.placing.placement import Placed, Search, SearchFailed
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.legs import Leg, decode_leg_id, serves
from dualmap.scheduling.state.request import Request, RequestState
from dualmap.scheduling.steps import drive
from dualmap.statestore.answers import Release

SLOWEST_TOKEN_S: Final = 0.25
"""A token of an answer that is only seen whole takes no longer than this."""


class Owner(Protocol):
    """The request that it is a leg of."""

    request_id: str
    instance_id: str
    """Of the prefill leg."""
    pool: ServedPool
    prompt: ReadPrompt
    inference_request: InferenceRequest
    chain: Chain
    slo_s: float
    failed: frozenset[str]
    trial: Trial | None
    sent_s: float
    decode_attempts: int
    """Times that a decode leg of it was to be placed: a release of a former one leaves a newer reservation alone."""

    @property
    def prompt_hash(self) -> int: ...

    def judge(self, instance_id: str, failure: InstanceFailure) -> None:
        """Record what the failure shows of the instance."""

    @property
    def asked_name(self) -> str:
        """See ``scheduling.state.view.ClusterView.asked_name``."""

    @property
    def age_s(self) -> float: ...


class DecodeLeg:
    """Its reservation is its owner's: it is placed, perhaps again, and released once with every end of the request."""

    instance_id = ""
    """Empty while it is not placed."""
    instance_url = ""
    data_parallel_rank: int | None = None
    cached_tokens = 0
    """Of the prompt, believed to be there already: the rest is transferred."""
    placed_s: float | None = None
    staged_s: float | None = None
    """Age of its owner at the end of the prefill leg."""
    last_instance_id = ""
    """Where it was before it was released."""
    _stays = False
    """No other instance takes it than that of the prefill leg."""
    _reserved = False
    """Whether the store was asked for a reservation that has not been released."""

    def __init__(self, owner: Owner, context: ReplicaContext) -> None:
        self.request_id = decode_leg_id(owner.request_id)
        self.failed = owner.failed
        """Instances that failed, this leg or the request before."""
        self.lost = False
        """Its last instance did not find the KV, or gave the request back: another prefill is needed."""
        self.rounds: list[tuple[Placed, int]] = []
        self._owner = owner
        self._context = context
        self._placed: Placed | None = None

    @property
    def kv_within_s(self) -> float | None:
        """Longest wait for its first token. None where its client waits for the whole answer, which is of unknown
        length: the time to the first byte of such an answer bounds it."""
        limit_s, owner = self._owner.pool.settings.transfer_timeout_s, self._owner
        if owner.inference_request.stream:
            return limit_s
        limit_tokens = owner.prompt.output_limit
        return None if limit_tokens is None else limit_s + limit_tokens * SLOWEST_TOKEN_S

    def transfer_note(self, age_s: float) -> str:
        """What its first token teaches of transfers, its owner being so old; "" where it was placed again."""
        if self.staged_s is None or len(self.rounds) != 1:
            return ""
        return transfer_note(age_s - self.staged_s, self._owner.chain.prompt_tokens - self.cached_tokens)

    def loop_time(self) -> float:
        return self._context.clock.monotonic_s()

    async def place(self) -> InstanceFailure | None:
        """Reserve an instance; None once that is done, else why there is none. Raises StoreUnavailableError."""
        owner, pool = self._owner, self._owner.pool
        owner.decode_attempts += 1
        excluded = self.failed if self._stays else self.failed | self._source()
        query = RouteQuery(owner.chain, owner.slo_s, 0, owner.prompt.expected_output_tokens, excluded)
        search = Search(
            pool.decode_policy, pool.fleet.order, query, self._request(), pool.fleet, False,
            pool.scheduling.decode_stall_s, leg=Leg.DECODE,
        )  # fmt: skip
        self._reserved = True
        try:
            placed = await drive(search.run(), pool.fleet)
        except SearchFailed:
            if excluded:  # one that failed before, or has the KV, is better than none
                self.failed, self._stays = frozenset(), True
                return await self.place()
            return InstanceFailure(FailureKind.NO_DECODER, "no instance takes the decode leg")
        spec = pool.view.view.instances.get(placed.instance_id)
        if spec is None:
            spec = (await pool.view.refresh()).instances.get(placed.instance_id)
        if spec is None:
            return InstanceFailure(FailureKind.NO_DECODER, f"instance {placed.instance_id!r} was just removed")
        self._placed = placed
        self.rounds.append((placed, owner.decode_attempts))
        self.instance_id, self.instance_url = spec.instance_id, spec.url
        self.data_parallel_rank = spec.data_parallel_rank
        self.cached_tokens = max(0, owner.chain.prompt_tokens - placed.reply.uncached_tokens)
        self.placed_s = owner.age_s
        return None

    def _source(self) -> frozenset[str]:
        """The instance of the prefill leg, if it could answer too: the KV is to leave it, and no connector is known to
        send it to its own instance."""
        spec = self._owner.pool.view.view.instances.get(self._owner.instance_id)
        return frozenset() if spec is None or not serves(spec.role, Leg.DECODE) else frozenset((spec.instance_id,))

    def _request(self) -> Request:
        owner = self._owner
        return Request(
            self.request_id,
            self._context.replica_id,
            "",
            RequestState.HELD,
            owner.decode_attempts,
            0,
            owner.chain.prompt_tokens,
            owner.prompt.expected_output_tokens,
            round(owner.slo_s * 1000),
            model=owner.asked_name,
        )

    async def retry(self, failure: InstanceFailure) -> None:
        """Its instance failed before the first token: release it, and take another try from what is left of these.

        Raises:
            RouterError: none is left.
            StoreUnavailableError: the store is out of reach.
        """
        self.give_up(failure)
        await self.released()
        failed_id, tries = self.last_instance_id, len(self.rounds)
        await spend_retry(failure, self._owner, self._context, failed_id=failed_id, attempts=tries)

    def give_up(self, failure: InstanceFailure) -> None:
        """Count the failure of its instance; what is reserved there is to be released."""
        if self.instance_id:
            self.lost = failure.lost_kv
            self.failed |= {self.instance_id}
            self._owner.judge(self.instance_id, failure)
        self._leave()

    def _leave(self) -> None:
        self.last_instance_id = self.instance_id or self.last_instance_id
        self.instance_id, self._placed = "", None

    async def released(self) -> None:
        """Release the reservation, if there is one, before another is made: while the store knows of a leg, it takes
        the next one for another request's. Raises StoreUnavailableError."""
        self._leave()
        if self._reserved:
            await self._owner.pool.fleet.release((self._release(""),))
            self._reserved = False

    def release(self, note: str, settled: Callable[[], None] | None, *, answered: bool) -> bool:
        """Have the reservation released, if there is one, which the answer tells; ``answered``: its instance has given
        the whole answer. Never waits."""
        self._leave()
        if not self._reserved:
            return False
        self._reserved = False
        self._owner.pool.outbox.post(self._release(note, seen=answered), settled)
        return True

    def _release(self, note: str, *, seen: bool = False) -> Release:
        """Of the present attempt."""
        return self._owner.pool.fleet.over(self.request_id, self._owner.decode_attempts, note, seen=seen)

    def story(self) -> tuple[str | None, float | None, tuple[PlacementRound, ...], int]:
        """Its part of the request's explanation: where it was decoded, when that was reserved, every decision on it,
        and the tokens of the prompt that were transferred."""
        return (
            self.instance_id or self.last_instance_id or None,
            self.placed_s,
            tuple([PlacementRound.of(placed, attempt) for placed, attempt in self.rounds]),
            self._owner.chain.prompt_tokens - self.cached_tokens,
        )

    def record(self, now_ms: int) -> Request | None:
        """The leg as the store should know it; None while it is not placed."""
        if self._placed is None:
            return None
        owner = self._owner
        return replace(
            self._request(),
            instance_id=self.instance_id,
            state=RequestState.PREFILLED,
            uncached_tokens=owner.chain.prompt_tokens - self.cached_tokens,
            enqueued_ms=now_ms - round(owner.age_s * 1000),
            dispatched_ms=now_ms,
            leg=Leg.DECODE,
        )
