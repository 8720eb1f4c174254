"""What goes into Redis and what comes back, as the contract's types."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

import orjson

from scheduling.granting import Grant
from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState, Role, stalled_s
from scheduling.learned import Learned
from scheduling.learning import FirstToken, PromptLength, Sample
from scheduling.load_window import LoadWindow
from scheduling.queue_order import QueueEntry, QueueHead
from scheduling.request import Request, RequestState
from statestore.leases import RETIRED, Lease, ReplicaInfo, lease_runs
from statestore.redis.calls import bulk

_STATES = {state.value: state for state in InstanceState}

LOAD_FIELDS = (
    "state",
    "role",
    "tokens_per_s",
    "kv_capacity_tokens",
    "dispatch_window_tokens",
    "max_running_requests",
    "max_queued_requests",
    "pending_tokens",
    "dispatched_tokens",
    "deferred_tokens",
    "passed_over_tokens",
    "context_tokens",
    "queued_requests",
    "running_requests",
    "cached_blocks",
    "assigned_tokens",
    "last_prefill_ms",
    "work_since_ms",
    "kv_stamp",
    "version",
)
"""The fields of an instance that ``shared/instance.lua`` reads, in its order."""

SPEC_FIELDS = (
    "url",
    "role",
    "state",
    "prefill_tokens_per_s",
    "kv_capacity_tokens",
    "dispatch_window_tokens",
    "max_running_requests",
    "max_queued_requests",
    "block_tokens",
    "data_parallel_rank",
)
_OPTIONAL_SPEC_FIELDS = 2
"""The last of them may be missing: records of an older version have no such fields."""


HASH_BYTES = 8


def pack_chain(hashes: Sequence[int]) -> bytes:
    """``HASH_BYTES`` a block, big-endian."""
    return struct.pack(f">{len(hashes)}Q", *hashes)


def unpack_chain(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(packed) // HASH_BYTES}Q", packed)


# instances ---------------------------------------------------------------------------------------------------
def spec_arguments(spec: InstanceSpec) -> list[str]:
    """Name, value, name, value, … of an instance's description, its state left out."""
    return field_arguments({name: getattr(spec, name) for name in SPEC_FIELDS if name != "state"})


def field_arguments(values: Mapping[str, object]) -> list[str]:
    """Name, value, name, value, … of some fields of a description."""
    return [part for name, value in values.items() for part in (name, _text(value))]


def _text(value: object) -> str:
    if value is None:
        return ""
    return value.value if isinstance(value, Role) else str(value)


def spec_from(instance_id: str, values: Sequence[bytes | None]) -> InstanceSpec | None:
    """The description from the values of ``SPEC_FIELDS``; None if the instance is gone."""
    required, optional = values[:-_OPTIONAL_SPEC_FIELDS], values[-_OPTIONAL_SPEC_FIELDS:]
    if any(value is None for value in required):
        return None
    url, role, state, rate, kv_capacity, window, running, queued = (value.decode() for value in required if value)
    block_tokens, rank = optional
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
        int(block_tokens or 0),
        int(rank) if rank else None,
    )


def load_from(instance_id: str, figures: Sequence[Any], now_ms: int, window_tokens: float = 0.0) -> InstanceLoad:
    """From ``LOAD_FIELDS`` and a hit."""
    (
        state,
        _role,
        tokens_per_s,
        kv_capacity_tokens,
        dispatch_window_tokens,
        max_running_requests,
        max_queued_requests,
        pending_tokens,
        dispatched_tokens,
        deferred_tokens,
        passed_over_tokens,
        context_tokens,
        queued_requests,
        running_requests,
        cached_blocks,
        _assigned_tokens,
        last_prefill_ms,
        work_since_ms,
        _kv_stamp,
        version,
        hit_blocks,
    ) = figures
    return InstanceLoad(
        instance_id,
        _STATES[state],
        pending_tokens,
        dispatched_tokens,
        queued_requests,
        running_requests,
        context_tokens,
        cached_blocks,
        window_tokens,
        tokens_per_s,
        stalled_s(now_ms, last_prefill_ms, work_since_ms) if pending_tokens > deferred_tokens else 0.0,
        kv_capacity_tokens,
        hit_blocks,
        deferred_tokens,
        passed_over_tokens,
        dispatch_window_tokens,
        max_running_requests,
        max_queued_requests,
        version,
    )


_ASSIGNED = LOAD_FIELDS.index("assigned_tokens")


class LoadReader:
    """Loads with what was assigned recently: that follows from the growth of a count that this reader saw."""

    def __init__(self) -> None:
        self._assigned: dict[str, tuple[int, LoadWindow]] = {}

    def load(self, instance_id: str, figures: Sequence[Any], now_ms: int) -> InstanceLoad:
        """See ``load_from``."""
        window_tokens = self._window_tokens(instance_id, figures[_ASSIGNED], now_ms)
        return load_from(instance_id, figures, now_ms, window_tokens)

    def _window_tokens(self, instance_id: str, assigned_tokens: int, now_ms: int) -> float:
        seen_tokens, window = self._assigned.get(instance_id, (assigned_tokens, LoadWindow()))
        window = window.add(now_ms, max(0, assigned_tokens - seen_tokens))
        self._assigned[instance_id] = (assigned_tokens, window)
        return window.tokens

    def forget(self, instance_id: str) -> None:
        self._assigned.pop(instance_id, None)


def queue_head_from(instance_id: str, told: Sequence[Any] | None) -> QueueHead | None:
    """From what ``shared/instance.lua`` replies."""
    if told is None:
        return None
    now_ms, figures, listed = told
    entries = []
    for entry, rank_ms in zip(listed[::2], listed[1::2], strict=True):
        request_id, _, tokens = entry.rpartition(" ")
        entries.append(QueueEntry(request_id, int(rank_ms), int(tokens)))
    return QueueHead(now_ms, load_from(instance_id, figures, now_ms), tuple(entries))


def load_figures(texts: Sequence[bytes | None]) -> list[Any]:
    """``LOAD_FIELDS`` as figures, from the texts that are stored."""
    state, role, *numbers = (text or b"null" for text in texts)
    return [state.decode(), role.decode(), *map(orjson.loads, numbers)]


# requests ----------------------------------------------------------------------------------------------------
_REQUEST_FIELDS = tuple(field.name for field in fields(Request) if field.name != "request_id")
_DEFAULTS = {field.name: field.default for field in fields(Request) if field.default is not MISSING}
_FOUND_OUT = frozenset({"instance_id", "state", "uncached_tokens", "enqueued_ms"})
"""Fields that a placement determines itself."""
_TEXTS = frozenset({"replica_id", "instance_id", "alternative_id"})
_FLAGS = frozenset({"deferred", "rejected"})


_TOLD_FIELDS = tuple(name for name in _REQUEST_FIELDS if name not in _FOUND_OUT)
_ALWAYS = tuple(name for name in _TOLD_FIELDS if name not in _DEFAULTS)
_AT_TIMES = tuple(name for name in _TOLD_FIELDS if name in _DEFAULTS)
_always, _at_times = attrgetter(*_ALWAYS), attrgetter(*_AT_TIMES)
_USUAL = tuple(_DEFAULTS[name] for name in _AT_TIMES)


def pack_new_request(request: Request) -> tuple[int, bytes]:
    """The fields that a placement is given, as bulk strings: how many, and name, value, …"""
    packed = [*map(_pack_field, _ALWAYS, _always(request))]
    unusual = _at_times(request)
    if unusual != _USUAL:
        told = zip(_AT_TIMES, unusual, _USUAL, strict=True)
        packed += [_pack_field(name, value) for name, value, usual in told if value != usual]
    return 2 * len(packed), b"".join(packed)


@lru_cache(maxsize=8192)
def _pack_field(name: str, value: str | int) -> bytes:
    """Most values come again: a replica's own id, its pool's SLO, prompts of the same length."""
    return bulk(name.encode()) + bulk(value.encode() if isinstance(value, str) else b"%d" % value)


def request_arguments(request: Request) -> list[str]:
    """Name, value, … of a request's fields, those left out that have their default."""
    arguments = []
    for name in _REQUEST_FIELDS:
        value = getattr(request, name)
        if name not in _DEFAULTS or value != _DEFAULTS[name]:
            arguments += [name, str(int(value)) if isinstance(value, bool) else str(value)]
    return arguments


def request_from(request_id: str, pairs: Mapping[bytes, bytes]) -> Request | None:
    """The record from its hash; None if it is gone."""
    if b"instance_id" not in pairs:
        return None
    stored = {name: pairs[name.encode()].decode() for name in _REQUEST_FIELDS if name.encode() in pairs}
    return Request(request_id, **{name: _request_value(name, text) for name, text in stored.items()})


def _request_value(name: str, text: str) -> Any:
    if name in _TEXTS:
        return text
    if name == "state":
        return RequestState(text)
    return text == "1" if name in _FLAGS else int(text)


def grant_from(text: bytes) -> Grant:
    return Grant(*orjson.loads(text))


# samples -----------------------------------------------------------------------------------------------------
def sample_from(entry_id: bytes, flat: Sequence[bytes]) -> Sample:
    """One entry of the sample log: an instance and its first token, or 'noted' and a prompt's length."""
    subject, text = flat[0].decode(), flat[1]
    if subject == "noted":
        noted = orjson.loads(text)
        return Sample(entry_id.decode(), PromptLength(noted["text_bytes"], noted["tokens"]))
    *times, note = text.split(b" ", 5)
    features = orjson.loads(note).get("features")
    tokens, enqueued_ms, dispatched_ms, former_ms, prefilled_ms = map(int, times)
    return Sample(
        entry_id.decode(),
        FirstToken(
            subject,
            tokens,
            enqueued_ms,
            dispatched_ms,
            former_ms,
            prefilled_ms,
            None if features is None else tuple(features),
        ),
    )


def learned_fields(learned: Learned) -> dict[str, str]:
    """What is published of a pool."""
    return {
        "bytes_per_token": repr(learned.bytes_per_token),
        "ttft_weights": orjson.dumps(learned.ttft_weights).decode(),
    }


def learned_from(pairs: Mapping[bytes, bytes], prior: Learned) -> Learned:
    if b"ttft_weights" not in pairs:
        return prior
    return Learned(float(pairs[b"bytes_per_token"]), tuple(orjson.loads(pairs[b"ttft_weights"])))


# the rest ----------------------------------------------------------------------------------------------------
def tree_fields(tree: HotnessTree, counts: Mapping[int, int]) -> dict[str, str]:
    """Prefix in hex to 'depth count'."""
    return {f"{prefix:016x}": f"{depth} {counts.get(prefix, 0)}" for prefix, depth in tree.hot.items()}


def tree_from(pairs: Mapping[bytes, bytes]) -> HotnessTree:
    return HotnessTree({int(prefix, 16): int(value.split()[0]) for prefix, value in pairs.items()})


def replicas_from(pairs: Mapping[bytes, bytes]) -> tuple[ReplicaInfo, ...]:
    """Every replica, retired ones included, by id."""
    replicas = []
    for replica_id, text in sorted(pairs.items()):
        values = orjson.loads(text)
        lease = int(values["expires_ms"]), int(values["lease_ms"])
        replicas.append(ReplicaInfo(replica_id.decode(), *lease, dict(values["info"])))
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
