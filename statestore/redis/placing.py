"""Placements as their script takes them, and what the script replies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import orjson

from scheduling.chain import sample_depths
from scheduling.instance import Role
from scheduling.legs import Leg
from scheduling.placement import Placement, PlaceReply, PlaceStatus
from scheduling.ways import Side
from scheduling.weights import Form, Weights
from statestore.redis.calls import Argument
from statestore.redis.codec import HASH_BYTES, ToldLoads, pack_chain, queue_head_from, told_of

_LEGS = {leg.value.encode(): leg for leg in Leg}
_STATUSES = {status.value.encode(): status for status in PlaceStatus}


def arguments_of(placements: Sequence[Placement], key_blocks: int) -> list[Argument]:
    """What ``place_requests`` takes; ``key_blocks`` of a chain's head go to the arrival log."""
    sides: dict[bytes, int] = {}
    arguments: list[Argument] = []
    for placement in placements:
        chain = placement.chain
        packed = pack_chain(chain.hashes)
        whole = chain.key_stride == 1
        head = packed[: HASH_BYTES * key_blocks] if whole else pack_chain(chain.key_hashes[:key_blocks])
        arguments += (_ask_json(placement, sides), packed, told_of(placement.request), head)
    return [b"[%b]" % b",".join(sides), *arguments]


def _ask_json(placement: Placement, sides: dict[bytes, int]) -> bytes:
    """What is false, empty or not given is left out. ``sides`` has the number of each; new ones are added."""
    request, chain = placement.request, placement.chain
    excluded = b'"excluded":%b,' % orjson.dumps(dict.fromkeys(placement.excluded, True)) if placement.excluded else b""
    known = excluded if not request.enqueued_ms else excluded + b'"enqueued_ms":%d,' % request.enqueued_ms
    if placement.max_pending_tokens is not None:
        known += b'"max_pending_tokens":%d,' % placement.max_pending_tokens
    side = _number_of(placement, sides)
    if (other := placement.other) is not None:
        named = orjson.dumps(other.instances)
        known += b'"other":{%b"side":%d,"instances":%b},' % (excluded, _number_of(other, sides), named)
    return b'{"request_id":%b,"block_tokens":%d,"side":%d,"instances":%b,"samples_at":%b,%b%b}' % (
        orjson.dumps(request.request_id),
        chain.block_tokens,
        side,
        orjson.dumps(placement.instances),
        orjson.dumps(sample_depths(chain)),
        known,
        _terms_json(
            request.slo_ms,
            placement.rank_ms,
            placement.defers,
            placement.at_once,
            placement.refuses,
            placement.rebalances,
        ),
    )


def _number_of(side: Placement | Side, sides: dict[bytes, int]) -> int:
    text = _side_json(side.weights, side.beyond_from_s, side.leg, side.roles, side.decider)
    return sides.setdefault(text, len(sides) + 1)


@lru_cache(maxsize=256)
def _side_json(
    weights: Weights, beyond_from_s: float | None, leg: Leg, roles: tuple[Role, ...], decider: Form
) -> bytes:
    """What is the same of most requests: a replica uses the same few weights until new ones are learned."""
    forms = {"cost": weights.cost, "ttft": weights.ttft, "missed": weights.missed, "decider": decider}
    terms: dict[str, object] = {"leg": leg} | {name: _placed(form) for name, form in forms.items()}
    if beyond_from_s is not None:
        terms |= {"beyond": beyond_from_s, "roles": roles}
    return orjson.dumps(terms)


def _placed(form: Form) -> list[float]:
    """The weights that are not 0, each behind the place of its feature."""
    return [each for place, weight in enumerate(form, 1) if weight for each in (place, weight)]


@lru_cache(maxsize=256)
def _terms_json(slo_ms: int, rank_ms: int, defers: bool, at_once: bool, refuses: bool, rebalances: bool) -> bytes:
    terms: dict[str, object] = {"slo_s": slo_ms / 1000, "rank_ms": rank_ms}
    flags = {"defers": defers, "at_once": at_once, "refuses": refuses, "rebalances": rebalances}
    return orjson.dumps(terms | {name: True for name, is_set in flags.items() if is_set})[1:-1]


def reply_from(reply: Sequence[Any]) -> PlaceReply:
    status, instance_id, other_id, uncached_tokens, enqueued_ms, epoch, tree_version, now_ms, queue, leg, *seen = reply
    return PlaceReply(
        _STATUSES[status],
        int(epoch),
        int(tree_version),
        now_ms,
        ToldLoads(seen, now_ms),
        instance_id.decode() or None,
        other_id.decode() or None,
        uncached_tokens,
        enqueued_ms,
        queue_head_from(queue),
        _LEGS[leg],
    )
