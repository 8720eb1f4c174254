"""A store's queue snapshot in the words of the scheduling core's plans."""

from __future__ import annotations

from scheduling.rebalance import HeldRequest, HotQueue
from statestore.base import QueueSnapshot, RequestRecord


def held_request(record: RequestRecord, now_ms: int) -> HeldRequest:
    """One held request as it stands at ``now_ms`` of the store's clock."""
    return HeldRequest(
        request_id=record.request_id,
        uncached_tokens=record.uncached_tokens,
        prompt_tokens=record.prompt_tokens,
        slo_s=record.slo_ms / 1000,
        waited_s=max(0, now_ms - record.enqueued_ms) / 1000,
        alternative_id=record.alternative_id,
        alternative_uncached_tokens=record.alternative_uncached_tokens,
    )


def hot_queue(snapshot: QueueSnapshot) -> HotQueue:
    """The question that ``plan_rebalance`` answers."""
    held = tuple(held_request(record, snapshot.now_ms) for record in snapshot.held)
    return HotQueue(load=snapshot.load, held=held, alternatives=snapshot.alternatives)
