"""A live request as the ledger keeps it, and the queue of those held for one instance."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from scheduling.chain import Chain
from statestore.base import RequestRecord, RequestState
from statestore.reservation import Reservation


class LiveRequest:
    """The changing twin of ``RequestRecord``; its fields mean the same."""

    __slots__ = (
        "alternative_id",
        "alternative_uncached_tokens",
        "attempt",
        "chain",
        "dispatched_ms",
        "enqueued_ms",
        "expected_output_tokens",
        "instance_id",
        "kv_instance_id",
        "late",
        "prefilled_ms",
        "prompt_tokens",
        "replica_id",
        "request_id",
        "sequence",
        "slo_ms",
        "state",
        "surplus",
        "ttft_features",
        "uncached_tokens",
    )

    def __init__(self, reservation: Reservation, enqueued_ms: int, sequence: int) -> None:
        self.request_id = reservation.request_id
        self.replica_id = reservation.replica_id
        self.instance_id = reservation.instance_id
        self.state = RequestState.HELD
        self.attempt = reservation.attempt
        self.uncached_tokens = reservation.uncached_tokens
        self.prompt_tokens = reservation.chain.prompt_tokens
        self.expected_output_tokens = reservation.expected_output_tokens
        self.slo_ms = reservation.slo_ms
        self.enqueued_ms = enqueued_ms
        self.dispatched_ms = 0
        self.prefilled_ms = 0
        self.alternative_id = reservation.alternative_id
        self.alternative_uncached_tokens = reservation.alternative_uncached_tokens
        self.sequence = sequence
        self.late = False
        self.surplus = False
        self.kv_instance_id = reservation.instance_id
        """The instance where its reservation, or its first token after a move, stamped the chain and was remembered as
        its holder; '' when none is known."""
        self.ttft_features = reservation.ttft_features
        """What the first token will teach; None: nothing, as it says little of the instance."""
        self.chain: Chain | None = reservation.chain
        """Kept while it is held, so that its uncached tokens can be counted anew; None also if it was adopted."""

    @classmethod
    def adopted(cls, record: RequestRecord) -> LiveRequest:
        """The live request that ``record`` describes; no KV metadata is known to have its chain."""
        request = cls.__new__(cls)
        for name in RequestRecord.__dataclass_fields__:
            setattr(request, name, getattr(record, name))
        request.kv_instance_id = ""
        request.ttft_features = None
        request.chain = None
        return request

    @property
    def context_tokens(self) -> int:
        """KV memory it takes once dispatched, in tokens."""
        return self.prompt_tokens + self.expected_output_tokens

    @property
    def deadline_ms(self) -> int:
        """When its first token is due."""
        return self.enqueued_ms + self.slo_ms

    def record(self) -> RequestRecord:
        return RequestRecord(
            self.request_id,
            self.replica_id,
            self.instance_id,
            self.state,
            self.attempt,
            self.uncached_tokens,
            self.prompt_tokens,
            self.expected_output_tokens,
            self.slo_ms,
            self.enqueued_ms,
            self.dispatched_ms,
            self.prefilled_ms,
            self.alternative_id,
            self.alternative_uncached_tokens,
            self.sequence,
            self.late,
            self.surplus,
        )


Rank = Callable[[LiveRequest], int]
"""What a queue is sorted by; fixed while a request is in it."""


def by_sequence(request: LiveRequest) -> int:
    """Rank: the order of first reservation, which a migration keeps."""
    return request.sequence


def by_deadline(request: LiveRequest) -> int:
    """Rank: earliest deadline first."""
    return request.deadline_ms


class HeldQueue:
    """Held requests in order of their rank, then of their ids.

    A sorted list: appending costs O(1), taking from the head or the middle moves at most the queue's limit of
    pointers.
    """

    __slots__ = ("_entries", "_rank")

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._entries: list[tuple[int, str, LiveRequest]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LiveRequest]:
        return (entry[2] for entry in self._entries)

    def push(self, request: LiveRequest) -> None:
        rank = self._rank(request)
        entry = (rank, request.request_id, request)
        if not self._entries or self._entries[-1][0] < rank:
            self._entries.append(entry)
        else:
            insort(self._entries, entry)

    def position(self, request: LiveRequest) -> int:
        """Requests ahead of this one."""
        return bisect_left(self._entries, (self._rank(request), request.request_id))

    def remove(self, request: LiveRequest) -> None:
        del self._entries[self.position(request)]

    def head(self) -> LiveRequest:
        return self._entries[0][2]
