"""A placement as its script takes it, and what the script replies."""

from __future__ import annotations

from functools import lru_cache

import orjson

from scheduling.chain import sample_depths
from scheduling.granting import Grant
from scheduling.placement import Placement, PlaceReply, PlaceStatus
from scheduling.weights import Form
from statestore.keys import InstanceKeys, PoolKeys
from statestore.redis.calls import PackedCall, bulk
from statestore.redis.codec import HASH_BYTES, load_from, pack_chain, pack_new_request, queue_head_from

MAX_PLACED = 131_072
"""Hints kept at most, the oldest dropped first; a missing hint costs one look-up."""
MAX_MOVES = 8
"""A request that moved this often within one call can wait for the next."""
_STATUSES = {status.value: status for status in PlaceStatus}


class PlaceCalls:
    """Packs the calls of ``place_request``. What is the same in every call is packed once."""

    def __init__(self, keys: PoolKeys) -> None:
        self._keys = keys
        pool_keys = (
            keys.meta,
            keys.replicas,
            keys.arrivals,
            keys.wanted_rebalances,
            *keys.prefixes,
            keys.least_loaded,
        )
        self._pool_key_count, self._pool_keys = len(pool_keys), b"".join(map(bulk, pool_keys))
        self._instance_keys = lru_cache(maxsize=1024)(self._pack_instance_keys)

    def pack(self, placement: Placement) -> PackedCall:
        request, chain, instances = placement.request, placement.chain, placement.instances
        keys = self._pool_keys + bulk(self._keys.request(request.request_id)) + self._instance_keys(instances)
        hashes, depths = pack_chain(chain.hashes), sample_depths(chain)
        samples = b"".join([bulk(hashes[HASH_BYTES * (depth - 1) : HASH_BYTES * depth]) for depth in depths])
        count, told = pack_new_request(request)
        ask = ask_json(placement, depths)
        arguments = b"$%d\r\n%b\r\n$%d\r\n%b\r\n%b%b" % (len(ask), ask, len(hashes), hashes, samples, told)
        key_count = self._pool_key_count + 1 + len(InstanceKeys._fields) * len(instances)
        return PackedCall(key_count, keys, count + 2 + len(depths), arguments)

    def _pack_instance_keys(self, instances: tuple[str, ...]) -> bytes:
        return b"".join([bulk(key) for name in instances for key in self._keys.instance(name)])


def ask_json(placement: Placement, sample_depths: tuple[int, ...]) -> bytes:
    """The ask of ``place_request``; fields that are false or null are left out."""
    request, weights = placement.request, placement.weights
    ask: dict[str, object] = {
        "request_id": request.request_id,
        "replica_id": request.replica_id,
        "attempt": request.attempt,
        "prompt_tokens": request.prompt_tokens,
        "expected_output_tokens": request.expected_output_tokens,
        "block_tokens": placement.chain.block_tokens,
        "cost": _form_json(weights.cost),
        "ttft": _form_json(weights.ttft),
        "missed": _form_json(weights.missed),
        "slo_s": request.slo_ms / 1000,
        "instances": placement.instances,
        "asked": placement.asked,
        "samples_at": sample_depths,
        "rank_ms": placement.rank_ms,
    }
    if placement.beyond_from_s is not None:
        ask["beyond"] = placement.beyond_from_s
    if placement.chain.key_stride > 1:
        ask["key_stride"] = placement.chain.key_stride
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


def reply_from(placement: Placement, text: bytes) -> PlaceReply:
    (
        status,
        instance_id,
        alternative_id,
        uncached_tokens,
        enqueued_ms,
        epoch,
        tree_version,
        now_ms,
        seen,
        least_loaded,
        to_ask,
        queue,
    ) = orjson.loads(text)
    names = placement.instances
    loads = {
        names[place - 1]: load_from(names[place - 1], figures, now_ms)
        for place, figures in zip(seen[::2], seen[1::2], strict=True)
    }
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
        tuple(map(tuple, least_loaded)),
        tuple(to_ask),
        None if queue is None else queue_head_from(instance_id, queue),
    )


class PlacedRequests:
    """Instance id by request id, bounded in number."""

    def __init__(self) -> None:
        self._instances: dict[str, str] = {}

    def get(self, request_id: str) -> str | None:
        return self._instances.get(request_id)

    def put(self, request_id: str, instance_id: str) -> None:
        self._instances[request_id] = instance_id
        if len(self._instances) > MAX_PLACED:
            del self._instances[next(iter(self._instances))]

    def granted(self, grant: Grant) -> None:
        if grant.request_id in self._instances:
            self._instances[grant.request_id] = grant.instance_id

    def discard(self, request_id: str) -> None:
        self._instances.pop(request_id, None)
