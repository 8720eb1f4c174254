"""The live requests of this process as the shared store last reported them: what a local ledger starts from."""

from __future__ import annotations

from collections.abc import Iterable

from statestore.base import Grant, RequestRecord, RequestState
from statestore.ledger.live import LiveRequest
from statestore.reservation import Reservation, ReserveOutcome, ReserveStatus

_RESERVED = {ReserveStatus.DISPATCHED: RequestState.DISPATCHED, ReserveStatus.HELD: RequestState.HELD}


class OwnRequests:
    """A shadow of this process's part of the store. Times are this machine's, its order is approximate."""

    def __init__(self) -> None:
        self._requests: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def reserved(self, reservation: Reservation, outcome: ReserveOutcome, now_ms: int, sequence: int) -> None:
        """A reservation was answered; ``sequence`` is the order to give a request that is new."""
        state = _RESERVED.get(outcome.status)
        if state is None:
            return
        former = self._requests.get(reservation.request_id)
        if former is None or former.attempt < reservation.attempt:
            enqueued_ms, order = (now_ms, sequence) if former is None else (former.enqueued_ms, former.sequence)
            former = self._requests[reservation.request_id] = LiveRequest(reservation, enqueued_ms, order)
        if former.state is RequestState.HELD and state is RequestState.DISPATCHED:
            former.state, former.dispatched_ms = state, now_ms

    def granted(self, grant: Grant, now_ms: int) -> None:
        """A held request was dispatched, perhaps after it moved."""
        request = self._requests.get(grant.request_id)
        if request is None or request.attempt != grant.attempt or request.state is not RequestState.HELD:
            return
        if request.instance_id != grant.instance_id:
            request.alternative_id, request.alternative_uncached_tokens = request.instance_id, request.uncached_tokens
            request.instance_id = grant.instance_id
        request.uncached_tokens = grant.uncached_tokens
        request.state, request.dispatched_ms = RequestState.DISPATCHED, now_ms

    def prefilled(self, request_id: str, now_ms: int) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.state is RequestState.DISPATCHED:
            request.state, request.prefilled_ms = RequestState.PREFILLED, now_ms

    def finished(self, request_id: str, attempt: int | None) -> None:
        request = self._requests.get(request_id)
        if request is not None and (attempt is None or request.attempt <= attempt):
            del self._requests[request_id]

    def seen(self, record: RequestRecord, now_ms: int) -> None:
        """The store reported one of them as it is; a former attempt's or another replica's says nothing."""
        request = self._requests.get(record.request_id)
        if request is not None and (record.replica_id, record.attempt) == (request.replica_id, request.attempt):
            seen = self._requests[record.request_id] = LiveRequest.adopted(record)
            seen.enqueued_ms = request.enqueued_ms
            seen.dispatched_ms = record.dispatched_ms and (request.dispatched_ms or now_ms)
            seen.prefilled_ms = record.prefilled_ms and (request.prefilled_ms or now_ms)

    def replace_all(self, records: Iterable[RequestRecord]) -> None:
        self._requests = {record.request_id: LiveRequest.adopted(record) for record in records}

    def records(self) -> list[RequestRecord]:
        return [request.record() for request in self._requests.values()]
