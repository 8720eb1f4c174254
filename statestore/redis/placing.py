"""A placement as its script takes it, and what the script replies."""

from __future__ import annotations

from functools import lru_cache

import orjson

from scheduling.chain import sample_depths
from scheduling.placement import Placement, PlaceReply, PlaceStatus
from scheduling.weights import Form
from statestore.redis.codec import load_from, queue_head_from

_STATUSES = {status.value: status for status in PlaceStatus}


def ask_json(placement: Placement) -> bytes:
    """The ask of ``place_request``; fields that are false or null are left out."""
    request, weights = placement.request, placement.weights
    ask: dict[str, object] = {
        "request_id": request.request_id,
        "block_tokens": placement.chain.block_tokens,
        "cost": _form_json(weights.cost),
        "ttft": _form_json(weights.ttft),
        "missed": _form_json(weights.missed),
        "slo_s": request.slo_ms / 1000,
        "instances": placement.instances,
        "excluded": sorted(placement.excluded),
        "samples_at": sample_depths(placement.chain),
        "rank_ms": placement.rank_ms,
    }
    if placement.beyond_from_s is not None:
        ask["beyond"] = placement.beyond_from_s
    if placement.defers:
        ask["defers"] = True
    if placement.refuses:
        ask["refuses"] = True
    if placement.rebalances:
        ask["rebalances"] = True
    if request.enqueued_ms:
        ask["enqueued_ms"] = request.enqueued_ms
    if placement.max_pending_tokens is not None:
        ask["max_pending_tokens"] = placement.max_pending_tokens
    return orjson.dumps(ask)


@lru_cache(maxsize=256)
def _form_json(form: Form) -> orjson.Fragment:
    """A replica uses the same few weights until new ones are learned."""
    return orjson.Fragment(orjson.dumps(form.named()))


def reply_from(text: bytes) -> PlaceReply:
    reply = orjson.loads(text)
    status, instance_id, alternative_id, uncached_tokens, enqueued_ms, epoch, tree_version, now_ms, seen, queue = reply
    loads = {name: load_from(name, told, now_ms) for name, told in zip(seen[::2], seen[1::2], strict=True)}
    return PlaceReply(
        _STATUSES[status],
        epoch,
        tree_version,
        now_ms,
        loads,
        instance_id,
        alternative_id,
        uncached_tokens,
        enqueued_ms,
        queue_head_from(queue),
    )
