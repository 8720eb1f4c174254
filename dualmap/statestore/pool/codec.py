"""Values as the store keeps them, and back as types."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from dualmap.scheduling.estimates.learning import EndSample, FirstTokenSample, Sample
from dualmap.scheduling.estimates.load_window import LoadWindow
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.queues.queue_log import QueueStep, StepKind
from dualmap.scheduling.queues.queue_order import QueueEntry, QueueHead
from dualmap.scheduling.request.metering import COUNTS, KEPT, Counts
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter
from dualmap.scheduling.state.tier_load import NO_LOAD, TierLoad
from dualmap.scheduling.tenants.budgets import KINDS, Period
from dualmap.scheduling.tenants.shares import Work, grown
from dualmap.scheduling.values import in_order
from dualmap.statestore.call_values import Note, Transition
from dualmap.statestore.leases import Leadership, ReplicaInfo
from dualmap.statestore.pool.readable import LARGEST_COUNT, UNREADABLE, count_from, each_readable, is_readable
from dualmap.statestore.records import InstanceRecord, described, load_from

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")
PAIR = 2
CONFIRMED_STAMP = 2**52
"""Stamp in ``kv:ID`` of blocks that the engine confirmed: this, or more by the sequence of the batch. Blocks stored
next and evicted next are then at an end of the sorted set, where neighbours have been touched before."""
INNER_STAMP = 2 * CONFIRMED_STAMP
"""Stamp of confirmed blocks at which no hit ends: this, or more by the sequence of the batch."""


def is_inner(stamp: float) -> bool:
    """Whether a block with this stamp is listed, but no hit ends at it (``scheduling.prompts.cache_groups``)."""
    return stamp >= INNER_STAMP or stamp % 0.5 != 0


ALIAS = b"alias"
"""Value in ``names`` of another name of the pool's model."""


def known_fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass: a newer version writes others beside them (``statestore.pool.schema``)."""
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}


# instances ---------------------------------------------------------------------------------------------------
def text_of(kept: InstanceSpec | ReplicaInfo) -> bytes:
    """The text as which a record is kept, without its id: that is in the key or the field."""
    return orjson.dumps({name: getattr(kept, name) for name in _KEPT[type(kept)]})


_KEPT: Final[Mapping[type, Sequence[str]]] = {
    kind: [each.name for each in fields(kind)[1:]] for kind in (InstanceSpec, ReplicaInfo)
}
"""The fields of each kind of record that are kept: all but its id."""


@lru_cache(maxsize=1024)  # members are read every second, and hardly change
def spec_from(instance_id: str, text: bytes) -> InstanceSpec:
    """Raises ValueError, or the like, where a field is missing or wrong."""
    values = orjson.loads(text)
    parsed = {"role": Role(values["role"]), "state": InstanceState(values["state"]), "instance_id": instance_id}
    spec = InstanceSpec(**known_fields(InstanceSpec, values) | parsed)
    rank, mappings = spec.data_parallel_rank, (spec.models, spec.adapters, spec.origin)
    is_right = (
        isinstance(spec.url, str)
        and spec.url.startswith(("http://", "https://"))
        and all(_is_like(getattr(spec, name), usual) for name, usual in _DESCRIPTION.items())
        and (rank is None or _is_like(rank, 0))
        and (spec.drain_within_s is None or _is_like(spec.drain_within_s, 0.0))
        and all(texts is None or all(isinstance(each, str) for each in texts.values()) for texts in mappings)
    )
    if not is_right:
        raise ValueError(f"no description of an instance: {text!r}")
    return spec


_DESCRIPTION: dict[str, Any] = {each.name: each.default for each in fields(InstanceSpec)[1:]} | {
    "max_queued_requests": 0
}
"""Usual value of each field, by its name. An instance that may hold nothing has no room in its queue."""


def _is_like(each: object, usual: object) -> bool:
    """Whether a value can stand where usually such a one does. A figure is finite and not negative, and positive where
    the usual one is. Anything may stand where the usual one is no figure."""
    if not isinstance(usual, int | float):
        return True
    kind = int if isinstance(usual, int) else (int, float)
    if isinstance(each, bool) or not isinstance(each, kind) or not math.isfinite(each) or abs(each) >= LARGEST_COUNT:
        return False
    return each > 0 if usual > 0 else each >= 0


def is_count(each: object, *, positive: bool) -> bool:
    """Whether it can be a figure of an instance's record. A count may be negative until it is repaired."""
    if positive:
        return _is_like(each, 1.0)
    return isinstance(each, int) and not isinstance(each, bool) and abs(each) < LARGEST_COUNT


def specs_from(texts: Mapping[bytes, bytes]) -> dict[str, InstanceSpec]:
    """The readable instances, in id order."""
    return each_readable(texts, spec_from)


def name_from(_: str, kind: bytes) -> str:
    return "" if kind == ALIAS else kind.decode()


def names_from(kinds: Mapping[bytes, bytes]) -> dict[str, str]:
    return each_readable(kinds, name_from)


def adapter_from(_: str, text: bytes) -> RegisteredAdapter:
    return RegisteredAdapter.parse(text)


def adapters_from(texts: Mapping[bytes, bytes]) -> dict[str, RegisteredAdapter]:
    """The readable records of adapters, in the order of their names."""
    return each_readable(texts, adapter_from)


def note_from(_: str, text: bytes) -> Note:
    note = Note(**known_fields(Note, orjson.loads(text)))
    if not (isinstance(note.text, str) and _is_like(note.since_ms, 0)):
        raise ValueError(f"no note: {text!r}")
    return note


def notes_from(texts: Mapping[bytes, bytes]) -> dict[str, Note]:
    return each_readable(texts, note_from)


def new_record(spec: InstanceSpec) -> bytes:
    """The record of an instance without requests and blocks."""
    return InstanceRecord(**described(spec), tokens_per_s=spec.prefill_tokens_per_s).text


class LoadReader:
    """Loads with what was assigned recently: that follows from the growth of a count that this reader saw.

    The records that change are few between two reads: the others are not parsed again, and loads of one moment without
    a hit are made once.
    """

    def __init__(self) -> None:
        self._read: dict[str, tuple[bytes, InstanceRecord, LoadWindow, InstanceLoad | None]] = {}
        """The text of each record, what it says, and the window and the load of the last read; no load with a hit."""

    def load(
        self, instance_id: str, record: bytes, now_ms: int, hit_blocks: int = 0, found: TierLoad = NO_LOAD
    ) -> InstanceLoad:
        """See ``load_from``."""
        read, has_hit = self._read.get(instance_id), hit_blocks > 0 or found is not NO_LOAD
        if read is None:
            kept, window = InstanceRecord.parse(record), LoadWindow(0.0, now_ms)
        else:
            text, kept, window, made = read
            assigned_tokens = 0
            if text != record:
                former, kept = kept, InstanceRecord.parse(record)
                assigned_tokens = max(0, kept.assigned_tokens - former.assigned_tokens)
            elif made is not None and window.at_ms == now_ms and not has_hit:
                return made
            window = window.add(now_ms, assigned_tokens)
        load = kept.load(instance_id, now_ms, hit_blocks, window.tokens, found=found)
        self._read[instance_id] = (record, kept, window, None if has_hit else load)
        return load

    def forget(self, instance_id: str) -> None:
        self._read.pop(instance_id, None)


def queue_head_from(values: Sequence[Any] | None) -> QueueHead | None:
    """Parse a queue head as ``shared/instances.lua`` replies it."""
    if values is None:
        return None
    name, now_ms, record, listed = values
    entries = []
    for entry, rank_ms in zip(listed[::2], listed[1::2], strict=True):
        with contextlib.suppress(*UNREADABLE):  # no entry of this fleet: the repairer takes it out
            request_id, _, tokens = entry.decode().rpartition(" ")
            entries.append(QueueEntry.at(request_id, int(rank_ms), int(tokens)))
    return QueueHead(now_ms, load_from(name.decode(), record, now_ms), tuple(entries))


def transition_from(reply: Any) -> Transition:
    """Parse the reply of a script that ends a state of a request."""
    return Transition(False) if reply == 0 else Transition(True, queue_head_from(reply))


def grant_from(text: bytes) -> Grant:
    """A newer version appends fields."""
    return in_order(Grant, orjson.loads(text))


def queue_step_text(kind: StepKind, request_id: str, at_ms: int, *more: str | float) -> bytes:
    """One step of the log of a queue (``statestore/lua/shared/queue_log.lua``)."""
    return orjson.dumps([kind, request_id, at_ms, *more])


def queue_step_from(flat: Sequence[bytes]) -> QueueStep:
    """One entry of the log of a queue. A newer version appends fields."""
    kind, request_id, at_ms, *more = orjson.loads(flat[1])
    match StepKind(kind):
        case StepKind.DEFERRED:
            tokens, tokens_per_s, planner = more[:3]
            return QueueStep(
                StepKind.DEFERRED, request_id, at_ms, tokens=tokens, tokens_per_s=tokens_per_s, other=planner
            )
        case StepKind.MOVED:
            return QueueStep(StepKind.MOVED, request_id, at_ms, other=more[0])
        case dispatched:
            enqueued_ms, band, tenant = more[:3]
            return QueueStep(dispatched, request_id, at_ms, enqueued_ms, band, tenant)


# books of tenants --------------------------------------------------------------------------------------------
ALL_WORK: Final = Struct("<ddddd")
"""The sums over tenants: the work that instances were given, when that was so, the weights, the memory that contexts
hold, and where the last tenant above its share stands, by weight."""
WORK: Final = Struct("<ddddddd")
"""The beginning of a tenant's book: the work that it sent, what instances were given of it, when that was so, its
weight, when it was last seen, the part of an instance's memory that its contexts hold, and what is added to what it was
given."""
BUDGET: Final = Struct("<Bdd")
"""A budget, behind it: the number of its kind, the amount that was used, and since when."""


def budget_used(text: bytes | None, kind: int, now_ms: int, leak_per_s: float) -> float:
    """The amount that is used of the budget of a kind, by its book as the scripts write it
    (``statestore/lua/shared/budgets.lua``); 0 where nothing, or nothing that can be read, is written."""
    used, since = budgets_from(text).get(kind, (0.0, 0.0))
    period = KINDS[kind].rpartition("/")[2]
    if period == Period.MINUTE:
        return max(0.0, used - max(0.0, now_ms - since) / 1000 * leak_per_s)
    return used if period == Period.IN_FLIGHT or since == period_at(period, now_ms) else 0.0


def budgets_from(text: bytes | None) -> dict[int, tuple[float, float]]:
    """The amount that was used of each budget of a book, and since when, by the number of its kind."""
    packed = (text or b"")[WORK.size :]
    if len(packed) % BUDGET.size or len(packed) > BUDGET.size * len(KINDS):
        return {}
    return {kind: (used if used >= 0 else 0.0, since) for kind, used, since in BUDGET.iter_unpack(packed)}


def period_at(period: str, now_ms: int) -> int:
    """The number of the day since 1970, or of the month since the year 0, in UTC, in which a quota counts."""
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    return now_ms // 86_400_000 if period == Period.DAY else now.year * 12 + now.month


def work_from(text: bytes, of_all: bytes, now_ms: int) -> Work | None:
    """A tenant's work, from its book and the sums over all; None where it is not active. Raises ValueError, or the
    like, where they cannot be read."""
    _, given, since_ms, weight, _, held, _ = WORK.unpack_from(text)
    all_given, all_since_ms, weights, all_held, _ = ALL_WORK.unpack(of_all)
    if weight <= 0:
        return None
    given_s = grown(given, held, since_ms, now_ms)
    all_s = grown(all_given, all_held, all_since_ms, now_ms)
    part = given_s / all_s if all_s > 0 else 0.0
    return Work(given_s, min(1.0, part), min(1.0, weight / weights))


# metering ----------------------------------------------------------------------------------------------------
_COUNTS: Final = Struct(f"<{len(COUNTS)}d")
_FIGURES: Final = len(COUNTS)
_NOT_METERED: Final = frozenset({"", KEPT})
_PACKED: Final = b"\0"
"""Packed counts of a day begin with it; a text, which an older version wrote, with a figure."""


def packed_counts(counts: Counts) -> bytes:
    """Counts as the scripts take them."""
    return _COUNTS.pack(*astuple(counts))


def counts_of(used: str) -> bytes:
    """The counts that a usage begins with, where it has any, as the scripts take them."""
    if used in _NOT_METERED:
        return b""
    return _COUNTS.pack(*map(int, used.split(" ", _FIGURES)[:_FIGURES]))


def counts_text(counts: Counts) -> bytes:
    """The counts of an account on a day, as the scripts write them."""
    return _PACKED + packed_counts(counts)


def counts_from(text: bytes) -> Counts:
    """The reverse. Raises ValueError, or the like, if the text is malformed."""
    if text.startswith(_PACKED):
        return Counts(*map(int, _COUNTS.unpack(text[1:])))
    return Counts.parse(text.decode())


# samples -----------------------------------------------------------------------------------------------------
def sample_from(entry_id: bytes, flat: Sequence[bytes]) -> Sample:
    """One entry of the sample log: an instance and its first token, or 'noted' and what an end told."""
    subject, values = flat[0].decode(), orjson.loads(flat[1])
    if subject == "noted":
        return Sample(entry_id.decode(), EndSample.of_note(values))
    features = values.pop("note").get("features")
    content = FirstTokenSample(
        subject, **known_fields(FirstTokenSample, values), features=None if features is None else tuple(features)
    )
    return Sample(entry_id.decode(), content)


# publications ----------------------------------------------------------------------------------------------------
def fields_of(record: Any) -> dict[str, str]:
    """A dataclass as the fields of a hash: texts as they are, all else as JSON."""
    values = {each.name: getattr(record, each.name) for each in fields(record) if each.init}
    return {name: each if isinstance(each, str) else orjson.dumps(each).decode() for name, each in values.items()}


def record_from(known: Record, pairs: Mapping[bytes, bytes]) -> Record:
    """The reverse; ``known`` has what is missing."""
    values: dict[str, Any] = {}
    for each in fields(known):
        if each.init and each.name.encode() in pairs:
            several = "tuple" in str(each.type)
            values[each.name] = _field_from(each.name, pairs[each.name.encode()], getattr(known, each.name), several)
    return replace(known, **values)


def unreadable_fields(known: DataclassInstance, pairs: Mapping[bytes, bytes]) -> list[bytes]:
    """The fields of a record without which it can be read."""
    names = [each.name.encode() for each in fields(known) if each.init and each.name.encode() in pairs]
    return [name for name in names if not is_readable(partial(record_from, known, {name: pairs[name]}))]


def _field_from(name: str, text: bytes, usual: Any, several: bool) -> Any:
    """One field of a record; ``usual`` is what it is where it is missing. Where that is None, it is a figure, or a pair
    of figures where it is ``several``."""
    if isinstance(usual, str):
        return type(usual)(text.decode())
    each = orjson.loads(text)
    if isinstance(each, list):
        each = tuple(each)
    if isinstance(usual, tuple) and not usual:
        is_right = isinstance(each, tuple) and all(isinstance(one, str) for one in each)
    elif isinstance(usual, tuple):
        is_right = isinstance(each, tuple) and len(each) == len(usual) and all(map(_is_figure, each))
    elif usual is None:
        is_right = each is None or (
            isinstance(each, tuple) and len(each) == PAIR and all(map(_is_figure, each))
            if several
            else _is_figure(each)
        )
    else:
        is_right = _is_like(each, usual)
    if not is_right:
        raise ValueError(f"no {name}: {text!r}")
    return each


def _is_figure(one: object) -> bool:
    return isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)


def tree_fields(tree: HotnessTree, counts: Mapping[int, int]) -> dict[str, str]:
    """Prefix in hex to 'depth count'."""
    return {f"{prefix:016x}": f"{depth} {counts.get(prefix, 0)}" for prefix, depth in tree.hot.items()}


def tree_from(pairs: Mapping[bytes, bytes]) -> HotnessTree:
    found = each_readable(pairs, hot_prefix_from)
    return HotnessTree(dict(found.values()))


def hot_prefix_from(prefix: str, value: bytes) -> tuple[int, int]:
    """Parse a hot prefix and its depth."""
    return int(prefix, 16), count_from(value.split()[0])


@lru_cache(maxsize=256)  # several readers a second read the same text
def replica_from(replica_id: str, text: bytes) -> ReplicaInfo:
    lease = ReplicaInfo(**known_fields(ReplicaInfo, orjson.loads(text)) | {"replica_id": replica_id})
    times = (lease.expires_ms, lease.lease_ms, lease.schema)
    if not all(_is_like(each, 0) for each in times) or not {*map(type, lease.info.values())} <= {str}:
        raise ValueError(f"no lease: {text!r}")
    return lease


def lease_of(replica_id: str, text: bytes | None) -> ReplicaInfo | None:
    """None where there is none that can be read."""
    found = {} if text is None else each_readable({replica_id.encode(): text}, replica_from)
    return found.get(replica_id)


def replicas_from(pairs: Mapping[bytes, bytes]) -> tuple[ReplicaInfo, ...]:
    """Every replica, retired ones included, by id."""
    return tuple(each_readable(pairs, replica_from).values())


def pairs_from(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """HGETALL's reply as a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def leadership_from(known: Mapping[bytes, bytes]) -> Leadership:
    """Parse the leadership. If it cannot be read, no worker leads: the fence grows all the same, as the clock does."""
    return Leadership() if unreadable_fields(Leadership(), known) else record_from(Leadership(), known)
