"""A placement as its script takes it, and what the script replies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import orjson

from scheduling.chain import sample_depths
from scheduling.placement import Placement, PlaceReply, PlaceStatus
from scheduling.weights import Weights
from statestore.redis.codec import ToldLoads, queue_head_from

_STATUSES = {status.value: status for status in PlaceStatus}


def ask_json(placement: Placement) -> bytes:
    """The ask of ``place_request``; what is false, empty or not given is left out."""
    request, chain, excluded = placement.request, placement.chain, placement.excluded
    known = b"" if not request.enqueued_ms else b'"enqueued_ms":%d,' % request.enqueued_ms
    if excluded:
        known += b'"excluded":%b,' % orjson.dumps(sorted(excluded))
    if placement.max_pending_tokens is not None:
        known += b'"max_pending_tokens":%d,' % placement.max_pending_tokens
    return b'{"request_id":%b,"block_tokens":%d,"instances":%b,"samples_at":%b,%b%b}' % (
        orjson.dumps(request.request_id),
        chain.block_tokens,
        orjson.dumps(placement.instances),
        orjson.dumps(sample_depths(chain)),
        known,
        _terms_json(
            placement.weights,
            request.slo_ms,
            placement.rank_ms,
            placement.beyond_from_s,
            placement.defers,
            placement.refuses,
            placement.rebalances,
        ),
    )


@lru_cache(maxsize=256)
def _terms_json(
    weights: Weights,
    slo_ms: int,
    rank_ms: int,
    beyond_from_s: float | None,
    defers: bool,
    refuses: bool,
    rebalances: bool,
) -> bytes:
    """The part of an ask that is the same for most requests: a replica uses the same few weights until new ones are
    learned."""
    terms: dict[str, object] = {
        "cost": weights.cost.named(),
        "ttft": weights.ttft.named(),
        "missed": weights.missed.named(),
        "slo_s": slo_ms / 1000,
        "rank_ms": rank_ms,
    }
    if beyond_from_s is not None:
        terms["beyond"] = beyond_from_s
    flags = {"defers": defers, "refuses": refuses, "rebalances": rebalances}
    return orjson.dumps(terms | {name: True for name, is_set in flags.items() if is_set})[1:-1]


def reply_from(reply: Sequence[bytes]) -> PlaceReply:
    told = orjson.loads(reply[0])
    status, instance_id, alternative_id, uncached_tokens, enqueued_ms, epoch, tree_version, now_ms, queue = told
    return PlaceReply(
        _STATUSES[status],
        epoch,
        tree_version,
        now_ms,
        ToldLoads(reply[1:], now_ms),
        instance_id,
        alternative_id,
        uncached_tokens,
        enqueued_ms,
        None if queue is None else queue_head_from(queue),
    )
