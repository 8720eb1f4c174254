"""The record of a live request: what the store keeps of it, in memory and in Redis, and what every plan reads.

The life of a request is ``scheduling.request.machine``; the store knows the part of it that others have to see. Scripts
change it: a grant makes a held request dispatched, its first token makes it prefilled, and its end removes it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, fields, replace
from enum import StrEnum

from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.state.instance import Counts
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.values import documented, value


class RequestState(StrEnum):
    HELD = "held"
    """The request waits in an instance's queue, and can move: only the fleet knows it."""
    DISPATCHED = "dispatched"
    """The instance may be sent the request, whose prefill has not finished."""
    PREFILLED = "prefilled"
    """The first token came, or is presumed to have come."""


@value
class StoredRequest:
    """One live request as the store knows it. Times are milliseconds of the store's clock; 0 means not yet."""

    request_id: str = documented("its id; part of the key")
    replica_id: str = documented("the replica that holds its client", reported=True)
    instance_id: str = documented("where it is held, or was sent; empty before it is placed")
    state: RequestState = documented("`held`, `dispatched` or `prefilled`")
    attempt: int = documented(
        "1, and one more for every retry, and for every reservation that the store had lost", reported=True
    )
    _: KW_ONLY
    uncached_tokens: int = documented("prompt tokens to prefill: as placed, and as counted again when it is dispatched")
    prompt_tokens: int = documented("length of the prompt", reported=True)
    expected_output_tokens: int = documented("assumed length of the answer", reported=True)
    slo_ms: int = documented("TTFT SLO", reported=True)
    enqueued_ms: int = documented("first reservation; retries and moves keep it, so deadlines do not slide", default=0)
    dispatched_ms: int = documented("dispatch", default=0)
    prefilled_ms: int = documented("first token, where one was seen: none is presumed", default=0)
    alternative_id: str | None = documented(
        "the next best instance, its target in a rebalance; may be empty", default=None
    )
    alternative_uncached_tokens: int = documented("prompt tokens to prefill there, as placed", default=0)
    deferred: bool = documented(
        "it cannot meet its deadline, and waits behind those that can: `0` or `1`", default=False
    )
    pinned: bool = documented(
        "it continues what only its instance has stored, so it is not moved for a shorter wait: `0` or `1`",
        default=False,
        reported=True,
    )
    stored_tokens: int = documented(
        "tokens of the conversation that it continues, which its instance has stored and is taken to have cached",
        default=0,
        reported=True,
    )
    model: str = documented(
        "the model name that it asks for, where only some instances serve it; empty: any of them takes it",
        default="",
        reported=True,
    )
    tenant: str = documented("who it is for; may be empty", default="", reported=True, added=True)
    drawn: str = documented(
        "what it took of its tenant's budgets: each budget and its cost, separated by blanks",
        default="",
        reported=True,
        added=True,
    )
    account: str = documented(
        "account that it is metered for: tenant, key, class (or `-`) and model, separated by blanks; empty: none",
        default="",
        reported=True,
        added=True,
    )
    leg: Leg = documented("`whole`, or the `prefill` or `decode` leg of a split request", default=Leg.WHOLE)
    shares_as: str = documented(
        "the name in the books of shares under which its work is entered; empty: no books are kept",
        default="",
        reported=True,
        added=True,
    )
    band: int = documented("what is passed over before it in its queue: all of a higher band", default=0, added=True)

    load_ms: int = documented("time of its loads from tiers, as placed: they are booked", default=0, sparse=True)
    adapter: str = documented(
        "the adapter that computes it, whose slot it takes on its instance; empty: none",
        default="",
        reported=True,
        sparse=True,
    )
    revision: str = documented(
        "the revision that serves it; empty: any, as the pool's revisions have no weights",
        default="",
        reported=True,
        sparse=True,
    )

    @property
    def context_tokens(self) -> int:
        """KV memory it takes once dispatched, in tokens."""
        return context_tokens_of(self)

    def moved(self, instance_id: str, uncached_tokens: int) -> StoredRequest:
        """Return the record in another instance's queue; the former one is its next best.

        Raises:
            TransitionError: an instance has the request already.
        """
        if self.state is not RequestState.HELD:
            raise TransitionError(f"a request that is {self.state} cannot be moved")
        return replace(
            self,
            instance_id=instance_id,
            uncached_tokens=uncached_tokens,
            alternative_id=self.instance_id,
            alternative_uncached_tokens=self.uncached_tokens,
            deferred=False,
            load_ms=0,
        )

    @property
    def counts(self) -> Counts:
        """The counts that the request adds to its instance in its present state."""
        return counts_of(self)


def context_tokens_of(request: StoredRequest) -> int:
    """See ``StoredRequest.context_tokens``. The scripts run the same rule."""
    if request.leg is Leg.PREFILL:
        return request.prompt_tokens
    return request.prompt_tokens + request.stored_tokens + request.expected_output_tokens


def counts_of(request: StoredRequest) -> Counts:
    """The counts that a request adds to its instance in its present state. The scripts run the same rule."""
    tokens, deferred = request.uncached_tokens, request.deferred
    if request.state is RequestState.HELD:
        return Counts(
            pending_tokens=tokens,
            deferred_tokens=deferred * tokens,
            queued_requests=1,
            loading_ms=request.load_ms,
            yielding_tokens=(1 - deferred) * tokens if request.band > 0 else 0,
        )
    if request.state is RequestState.DISPATCHED:
        return Counts(
            pending_tokens=tokens,
            dispatched_tokens=tokens,
            context_tokens=context_tokens_of(request),
            running_requests=1,
            loading_ms=request.load_ms,
        )
    return Counts(context_tokens=context_tokens_of(request), running_requests=1)


def growth_at_prefill(request: StoredRequest) -> Counts:
    """The growth of its instance's counts as a dispatched request becomes prefilled: the difference of ``counts_of``,
    which follows from where the request was placed alone. The scripts run the same rule."""
    return Counts(
        pending_tokens=-request.uncached_tokens,
        dispatched_tokens=-request.uncached_tokens,
        loading_ms=-request.load_ms,
    )


REPORTED_FIELDS = tuple(each.name for each in fields(StoredRequest) if each.metadata["reported"])
"""Fields that the replica reports when it places a request."""
PLACED_FIELDS = tuple(
    each.name for each in fields(StoredRequest) if not each.metadata["reported"] and each.name != "request_id"
)
"""Fields that the store determines: where the request is, and how it counts there."""
