"""What a request asks of the store when it is placed, and what the store answers."""

from __future__ import annotations

from enum import StrEnum

from scheduling.chain import Chain
from scheduling.decision import Decision
from scheduling.ttft_model import TtftFeatures
from scheduling.values import value


class ReserveStatus(StrEnum):
    DISPATCHED = "dispatched"
    """The instance had room: send the request now."""
    HELD = "held"
    """Queued; a Grant will come."""
    STALE = "stale"
    """The load moved away from what the decision saw: observe and decide again. Nothing was reserved."""
    NOT_READY = "not_ready"
    """The instance takes no requests any more: not ready, role ``decode``, or unknown. Nothing was reserved."""
    QUEUE_FULL = "queue_full"
    """The instance's queue is at its limit. Nothing was reserved."""
    DUPLICATE = "duplicate"
    """Another replica has a live request of this id: choose another id. Nothing was reserved."""


@value
class Reservation:
    """What one request asks of one instance."""

    request_id: str
    replica_id: str
    instance_id: str
    chain: Chain
    uncached_tokens: int
    """By the hits that the decision saw; pending until the first token. The store counts them anew while it is held."""
    expected_output_tokens: int
    slo_ms: int
    alternative_id: str | None = None
    alternative_uncached_tokens: int = 0
    attempt: int = 1
    """1 for the first try; a retry after a failed instance counts up and replaces the former attempt."""
    seen_pending_tokens: int | None = None
    tolerance_tokens: int = 0
    """STALE when the instance's pending tokens exceed ``seen_pending_tokens`` by more than this."""
    overloaded: bool = False
    """Ask the rebalancer to look at the instance now."""
    ttft_features: TtftFeatures | None = None
    """What the instance's TTFT model is taught with when the first token comes; of a first attempt only."""


@value
class Newcomer:
    """A request of which the store has no reservation, before anybody decided where it goes."""

    request_id: str
    replica_id: str
    chain: Chain
    expected_output_tokens: int
    slo_ms: int

    def reservation(self, decision: Decision) -> Reservation:
        """What it asks for once it is decided."""
        return Reservation(
            self.request_id,
            self.replica_id,
            decision.instance_id,
            self.chain,
            decision.uncached_tokens,
            self.expected_output_tokens,
            self.slo_ms,
            decision.alternative_id,
            decision.alternative_uncached_tokens,
            ttft_features=decision.ttft_features,
        )


@value
class IdlePlacement:
    """A newcomer that was reserved as its candidates were observed, and dispatched."""

    decision: Decision
    reservation: Reservation


@value
class ReserveOutcome:
    status: ReserveStatus
    queue_position: int = 0
    """Requests ahead in the instance's queue, when HELD."""
