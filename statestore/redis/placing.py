"""A placement as its script takes it, and what the script replies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import orjson

from scheduling.chain import sample_depths
from scheduling.instance import Role
from scheduling.legs import Leg
from scheduling.placement import Placement, PlaceReply, PlaceStatus
from scheduling.weights import Form, Weights
from statestore.redis.codec import ToldLoads, queue_head_from

_LEGS = {leg.value: leg for leg in Leg}
_STATUSES = {status.value: status for status in PlaceStatus}


def ask_json(placement: Placement) -> bytes:
    """The ask of ``place_request``; what is false, empty or not given is left out."""
    request, chain, excluded = placement.request, placement.chain, placement.excluded
    known = b"" if not request.enqueued_ms else b'"enqueued_ms":%d,' % request.enqueued_ms
    if excluded:
        known += b'"excluded":%b,' % orjson.dumps(sorted(excluded))
    if placement.max_pending_tokens is not None:
        known += b'"max_pending_tokens":%d,' % placement.max_pending_tokens
    if (other := placement.other) is not None:
        terms = _side_json(other.weights, other.beyond_from_s, other.leg, other.roles, other.decider)
        known += b'"other":{"instances":%b,%b},' % (orjson.dumps(other.instances), terms)
    return b'{"request_id":%b,"block_tokens":%d,"instances":%b,"samples_at":%b,%b%b,%b}' % (
        orjson.dumps(request.request_id),
        chain.block_tokens,
        orjson.dumps(placement.instances),
        orjson.dumps(sample_depths(chain)),
        known,
        _side_json(placement.weights, placement.beyond_from_s, placement.leg, placement.roles, placement.decider),
        _terms_json(
            request.slo_ms,
            placement.rank_ms,
            placement.defers,
            placement.at_once,
            placement.refuses,
            placement.rebalances,
        ),
    )


@lru_cache(maxsize=256)
def _side_json(
    weights: Weights, beyond_from_s: float | None, leg: Leg, roles: tuple[Role, ...], decider: Form
) -> bytes:
    """The part of a side that is the same for most requests: a replica uses the same few weights until new ones are
    learned."""
    terms: dict[str, object] = {
        "leg": leg,
        "cost": weights.cost.named(),
        "ttft": weights.ttft.named(),
        "missed": weights.missed.named(),
        "decider": decider.named(),
    }
    if beyond_from_s is not None:
        terms |= {"beyond": beyond_from_s, "roles": roles}
    return orjson.dumps(terms)[1:-1]


@lru_cache(maxsize=256)
def _terms_json(slo_ms: int, rank_ms: int, defers: bool, at_once: bool, refuses: bool, rebalances: bool) -> bytes:
    terms: dict[str, object] = {"slo_s": slo_ms / 1000, "rank_ms": rank_ms}
    flags = {"defers": defers, "at_once": at_once, "refuses": refuses, "rebalances": rebalances}
    return orjson.dumps(terms | {name: True for name, is_set in flags.items() if is_set})[1:-1]


def reply_from(reply: Sequence[bytes]) -> PlaceReply:
    told = orjson.loads(reply[0])
    status, instance_id, alternative_id, uncached_tokens, enqueued_ms, epoch, tree_version, now_ms, queue, leg = told
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
        _LEGS[leg],
    )
