"""What goes into Redis and what comes back, as the contract's types."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from scheduling.decision import Decision, Horizon
from scheduling.hotness import HotnessTree
from scheduling.idle_holder import idle_holder_reason
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from scheduling.load_window import decayed_tokens
from scheduling.prefill_rate import learned_tokens_per_s
from scheduling.queue_order import behind_tokens
from scheduling.ttft_model import PRIOR_WEIGHTS, TtftFeatures
from statestore.base import Grant, Observation, RequestRecord, RequestState
from statestore.last_seen import UnreadLoads
from statestore.leases import RETIRED, Lease, ReplicaInfo, lease_runs
from statestore.reservation import Reservation

_STATES = {state.value: state for state in InstanceState}
_HELD = RequestState.HELD.value

LOAD_FIELDS = (
    "state",
    "pending_tokens",
    "dispatched_tokens",
    "context_tokens",
    "window_tokens",
    "window_ms",
    "rate_tokens",
    "rate_busy_s",
    "last_prefill_ms",
    "work_since_ms",
    "kv_capacity_tokens",
    "late_tokens",
    "late_requests",
    "aside_tokens",
    "ttft_weights",
)
"""The fields of an account that ``shared/load.lua`` reads, in its order."""

SPEC_FIELDS = (
    "url",
    "role",
    "state",
    "prefill_tokens_per_s",
    "kv_capacity_tokens",
    "dispatch_window_tokens",
    "max_running_requests",
    "max_queued_requests",
)


def pack_chain(hashes: Sequence[int]) -> bytes:
    """Eight bytes a block, big-endian."""
    return struct.pack(f">{len(hashes)}Q", *hashes)


def unpack_chain(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(packed) // 8}Q", packed)


# instances ---------------------------------------------------------------------------------------------------
def spec_arguments(spec: InstanceSpec) -> list[str]:
    """Name, value, name, value, … of an instance's description, its state left out."""
    return field_arguments({name: getattr(spec, name) for name in SPEC_FIELDS if name != "state"})


def field_arguments(fields: Mapping[str, object]) -> list[str]:
    """Name, value, name, value, … of some fields of a description."""
    return [part for name, value in fields.items() for part in (name, _text(value))]


def _text(value: object) -> str:
    return value.value if isinstance(value, Role) else str(value)


def spec_from(instance_id: str, values: Sequence[bytes | None]) -> InstanceSpec | None:
    """The description from the values of ``SPEC_FIELDS``; None if the instance is gone."""
    if any(value is None for value in values):
        return None
    url, role, state, rate, kv_capacity, window, running, queued = (value.decode() for value in values if value)
    return InstanceSpec(
        instance_id,
        url,
        Role(role),
        InstanceState(state),
        float(rate),
        int(kv_capacity),
        int(window),
        int(running),
        int(queued),
    )


def load_figures(texts: Sequence[bytes | None]) -> list[Any]:
    """``LOAD_FIELDS`` as figures, from the texts that are stored."""
    state, *numbers = (text or b"null" for text in texts)
    return [state.decode(), *map(orjson.loads, numbers)]


def observation_from(instance_ids: Sequence[str], text: bytes) -> Observation:
    """From the reply of ``observe_instances``."""
    return _observation(instance_ids, orjson.loads(text), None)


def wide_observation_from(instance_ids: Sequence[str], text: bytes, depths: Sequence[int]) -> Observation:
    """From the reply of ``observe_horizon``: the place of the holders' mark in ``depths`` counts from 1, 0 for none."""
    holders, mark, lightest, seen = orjson.loads(text)
    return _observation(instance_ids, seen, _horizon(holders, mark, lightest, depths))


def idle_reservation_from(
    instance_ids: Sequence[str], text: bytes, depths: Sequence[int]
) -> tuple[Observation, Decision | None]:
    """From the reply of ``reserve_idle``."""
    reserved, (holders, mark, lightest, figures) = orjson.loads(text)
    horizon = _horizon(holders, mark, lightest, depths)
    if reserved is None:
        return _observation(instance_ids, figures, horizon), None
    # Nothing was weighed by the loads: nobody may ever ask for them.
    seen = _observation(instance_ids, figures, horizon, unread=True)
    place, hit_blocks, uncached_tokens, expected_ttft_s, features, other = reserved
    return seen, Decision(
        instance_ids[place],
        hit_blocks,
        uncached_tokens,
        expected_ttft_s,
        idle_holder_reason(hit_blocks, alone=other is None),
        None if other is None else instance_ids[other[0]],
        0 if other is None else other[1],
        seen_pending_tokens=0,
        ttft_features=TtftFeatures(*features),
    )


def _horizon(holders: Sequence[str], mark: int, lightest: Sequence[Any], depths: Sequence[int]) -> Horizon:
    """``mark`` is the place of the holders' mark in ``depths``, counted from 1; 0 for none."""
    return Horizon(tuple(holders), depths[mark - 1] if mark else 0, tuple(map(tuple, lightest)))


def _observation(
    instance_ids: Sequence[str], seen: Sequence[Any], horizon: Horizon | None, *, unread: bool = False
) -> Observation:
    epoch, tree_version, sequence, now_ms, *found = seen
    replied = {name: figures for name, figures in zip(instance_ids, found, strict=True) if figures is not None}
    loads: Mapping[str, InstanceLoad]
    if unread:
        loads = UnreadLoads(replied, lambda name, figures: load_from(name, figures, now_ms))
    else:
        loads = {name: load_from(name, figures, now_ms) for name, figures in replied.items()}
    return Observation(epoch, tree_version, sequence, loads, horizon)


def load_from(instance_id: str, figures: Sequence[Any], now_ms: int) -> InstanceLoad:
    """The load from what ``shared/load.lua`` replies: ``LOAD_FIELDS``, then queued, running, cached and hit."""
    (
        state,
        pending_tokens,
        dispatched_tokens,
        context_tokens,
        window_tokens,
        window_ms,
        rate_tokens,
        rate_busy_s,
        last_prefill_ms,
        work_since_ms,
        kv_capacity_tokens,
        late_tokens,
        late_requests,
        aside_tokens,
        ttft_weights,
        queued_requests,
        running_requests,
        cached_blocks,
        hit_blocks,
    ) = figures
    return InstanceLoad(
        instance_id,
        _STATES[state],
        pending_tokens,
        dispatched_tokens,
        queued_requests + late_requests,
        running_requests,
        context_tokens,
        cached_blocks,
        decayed_tokens(window_tokens, window_ms, now_ms),
        learned_tokens_per_s(rate_tokens, rate_busy_s),
        max(0, now_ms - max(last_prefill_ms, work_since_ms)) / 1000 if pending_tokens > late_tokens else 0.0,
        kv_capacity_tokens,
        hit_blocks,
        behind_tokens(pending_tokens, dispatched_tokens, late_tokens, aside_tokens),
        PRIOR_WEIGHTS if ttft_weights is None else tuple(ttft_weights),
    )


# requests ----------------------------------------------------------------------------------------------------
def reservation_json(reservation: Reservation) -> bytes:
    """The live request as the script starts it; it fills in times and sequence."""
    fields = {
        "request_id": reservation.request_id,
        "replica_id": reservation.replica_id,
        "instance_id": reservation.instance_id,
        "state": _HELD,
        "attempt": reservation.attempt,
        "uncached_tokens": reservation.uncached_tokens,
        "prompt_tokens": reservation.chain.prompt_tokens,
        "block_tokens": reservation.chain.block_tokens,
        "expected_output_tokens": reservation.expected_output_tokens,
        "slo_ms": reservation.slo_ms,
        "enqueued_ms": 0,
        "dispatched_ms": 0,
        "prefilled_ms": 0,
        "alternative_uncached_tokens": reservation.alternative_uncached_tokens,
        "sequence": 0,
        "late": False,
    }
    if reservation.alternative_id is not None:  # Lua has no null that compares well
        fields["alternative_id"] = reservation.alternative_id
    if reservation.ttft_features is not None:
        fields["ttft_features"] = [*reservation.ttft_features]
    return orjson.dumps(fields)


def record_json(record: RequestRecord) -> bytes:
    """A request as it is adopted: no KV metadata is known to have its chain."""
    names = RequestRecord.__dataclass_fields__
    fields = {name: value for name in names if (value := getattr(record, name)) is not None}
    return orjson.dumps(fields | {"kv_instance_id": ""})


def record_from(text: bytes) -> RequestRecord:
    fields = orjson.loads(text)
    return RequestRecord(
        fields["request_id"],
        fields["replica_id"],
        fields["instance_id"],
        RequestState(fields["state"]),
        int(fields["attempt"]),
        int(fields["uncached_tokens"]),
        int(fields["prompt_tokens"]),
        int(fields["expected_output_tokens"]),
        int(fields["slo_ms"]),
        int(fields["enqueued_ms"]),
        int(fields["dispatched_ms"]),
        int(fields["prefilled_ms"]),
        fields.get("alternative_id"),
        int(fields["alternative_uncached_tokens"]),
        int(fields["sequence"]),
        fields["late"],
        fields.get("surplus", False),
    )


def records_from(texts: Iterable[bytes | None]) -> dict[str, RequestRecord]:
    """By id; entries that are gone are left out."""
    records = (record_from(text) for text in texts if text is not None)
    return {record.request_id: record for record in records}


def grant_from(text: bytes) -> Grant:
    fields = orjson.loads(text)
    return Grant(fields["request_id"], fields["instance_id"], int(fields["attempt"]), int(fields["uncached_tokens"]))


# the rest ----------------------------------------------------------------------------------------------------
def tree_arguments(tree: HotnessTree, counts: Mapping[int, int]) -> list[str]:
    """Prefix in hex, 'depth count', prefix, … in a stable order."""
    return [
        part
        for prefix, depth in sorted(tree.hot.items(), key=lambda item: (item[1], item[0]))
        for part in (f"{prefix:016x}", f"{depth} {counts.get(prefix, 0)}")
    ]


def tree_from(pairs: Mapping[bytes, bytes]) -> HotnessTree:
    return HotnessTree({int(prefix, 16): int(value.split()[0]) for prefix, value in pairs.items()})


def replicas_from(pairs: Mapping[bytes, bytes]) -> tuple[ReplicaInfo, ...]:
    """Every replica, retired ones included, by id."""
    replicas = []
    for replica_id, text in sorted(pairs.items()):
        fields = orjson.loads(text)
        lease = int(fields["expires_ms"]), int(fields["lease_ms"])
        replicas.append(ReplicaInfo(replica_id.decode(), *lease, dict(fields["info"])))
    return tuple(replicas)


def not_retired(replicas: Iterable[ReplicaInfo]) -> tuple[ReplicaInfo, ...]:
    return tuple(replica for replica in replicas if replica.expires_ms != RETIRED)


def lease_from(pairs: Mapping[bytes, bytes], now_ms: int) -> Lease | None:
    """The leader's lease, if it has not run out."""
    owner, expires_ms = pairs.get(b"owner"), int(pairs.get(b"expires_ms", b"0"))
    if owner is None or not lease_runs(expires_ms, int(pairs.get(b"lease_ms", b"0")), now_ms):
        return None
    return Lease(owner.decode(), int(pairs[b"fence"]), expires_ms)


def pairs_from(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """HGETALL's reply as a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
