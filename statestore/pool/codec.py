"""What goes into the store and what comes back, as typed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from scheduling.granting import Grant
from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from scheduling.learning import Finished, FirstToken, Sample
from scheduling.load_window import LoadWindow
from scheduling.queue_order import QueueEntry, QueueHead
from statestore.answers import Note, Transition
from statestore.leases import ReplicaInfo
from statestore.records import INSTANCE, InstanceRecord, described, load_from

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")
CONFIRMED_STAMP = 2**52
"""In ``kv:ID``, of what the engine of an instance confirmed: this, or more by the sequence of the batch. What is stored
next, and evicted next, is then at an end of the sorted set, where neighbours have been touched before."""


ALIAS = b"alias"
"""In ``names``, of another name of the pool's model."""


# instances ---------------------------------------------------------------------------------------------------
def text_of(kept: InstanceSpec | ReplicaInfo) -> bytes:
    """As it is kept, without its id: that is in the key or the field."""
    _, *told = asdict(kept).items()
    return orjson.dumps(dict(told))


def spec_from(instance_id: str, text: bytes) -> InstanceSpec:
    told = orjson.loads(text)
    parsed = {"role": Role(told["role"]), "state": InstanceState(told["state"])}
    return InstanceSpec(instance_id, **told | parsed)


def specs_from(texts: Mapping[bytes, bytes]) -> dict[str, InstanceSpec]:
    """In id order."""
    return {name.decode(): spec_from(name.decode(), text) for name, text in sorted(texts.items())}


def names_from(kinds: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): "" if kind == ALIAS else kind.decode() for name, kind in kinds.items()}


def notes_from(texts: Mapping[bytes, bytes]) -> dict[str, Note]:
    return {name.decode(): Note(**orjson.loads(text)) for name, text in texts.items()}


def new_record(spec: InstanceSpec) -> bytes:
    """The record of an instance without requests and blocks."""
    return INSTANCE.pack(astuple(InstanceRecord(**described(spec), tokens_per_s=spec.prefill_tokens_per_s)))


class LoadReader:
    """Loads with what was assigned recently: that follows from the growth of a count that this reader saw."""

    def __init__(self) -> None:
        self._assigned: dict[str, tuple[int, LoadWindow]] = {}

    def load(self, instance_id: str, record: bytes, now_ms: int, hit_blocks: int = 0) -> InstanceLoad:
        """See ``load_from``."""
        kept = InstanceRecord.parse(record)
        assigned_tokens = kept.assigned_tokens
        seen_tokens, window = self._assigned.get(instance_id, (assigned_tokens, LoadWindow()))
        window = window.add(now_ms, max(0, assigned_tokens - seen_tokens))
        self._assigned[instance_id] = (assigned_tokens, window)
        return kept.load(instance_id, now_ms, hit_blocks, window.tokens)

    def forget(self, instance_id: str) -> None:
        self._assigned.pop(instance_id, None)


def queue_head_from(told: Sequence[Any] | None) -> QueueHead | None:
    """From what ``shared/instance.lua`` replies."""
    if told is None:
        return None
    name, now_ms, record, listed = told
    entries = []
    for entry, rank_ms in zip(listed[::2], listed[1::2], strict=True):
        request_id, _, tokens = entry.decode().rpartition(" ")
        entries.append(QueueEntry(request_id, int(rank_ms), int(tokens)))
    return QueueHead(now_ms, load_from(name.decode(), record, now_ms), tuple(entries))


def transition_from(reply: Any) -> Transition:
    """From what a script replies that ends a state of a request."""
    return Transition(False) if reply == 0 else Transition(True, queue_head_from(reply))


def grant_from(text: bytes) -> Grant:
    return Grant(*orjson.loads(text))


# samples -----------------------------------------------------------------------------------------------------
def sample_from(entry_id: bytes, flat: Sequence[bytes]) -> Sample:
    """One entry of the sample log: an instance and its first token, or 'noted' and what an end told."""
    subject, told = flat[0].decode(), orjson.loads(flat[1])
    if subject == "noted":
        return Sample(entry_id.decode(), Finished.of_note(told))
    features = told.pop("note").get("features")
    lesson = FirstToken(subject, **told, features=None if features is None else tuple(features))
    return Sample(entry_id.decode(), lesson)


# publications ----------------------------------------------------------------------------------------------------
def fields_of(record: Any) -> dict[str, str]:
    """A dataclass as the fields of a hash: texts as they are, all else as JSON."""
    told = {each.name: getattr(record, each.name) for each in fields(record) if each.init}
    return {name: each if isinstance(each, str) else orjson.dumps(each).decode() for name, each in told.items()}


def record_from(known: Record, pairs: Mapping[bytes, bytes]) -> Record:
    """The reverse; ``known`` has what is missing."""
    told: dict[str, Any] = {}
    for name in (each.name for each in fields(known) if each.init and each.name.encode() in pairs):
        text, former = pairs[name.encode()], getattr(known, name)
        each = type(former)(text.decode()) if isinstance(former, str) else orjson.loads(text)
        told[name] = tuple(each) if isinstance(each, list) else each
    return replace(known, **told)


def tree_fields(tree: HotnessTree, counts: Mapping[int, int]) -> dict[str, str]:
    """Prefix in hex to 'depth count'."""
    return {f"{prefix:016x}": f"{depth} {counts.get(prefix, 0)}" for prefix, depth in tree.hot.items()}


def tree_from(pairs: Mapping[bytes, bytes]) -> HotnessTree:
    return HotnessTree({int(prefix, 16): int(value.split()[0]) for prefix, value in pairs.items()})


def lease_of(replica_id: str, text: bytes | None) -> ReplicaInfo | None:
    """None where there is none."""
    return None if text is None else ReplicaInfo(replica_id, **orjson.loads(text))


def replicas_from(pairs: Mapping[bytes, bytes]) -> tuple[ReplicaInfo, ...]:
    """Every replica, retired ones included, by id."""
    return tuple(ReplicaInfo(name.decode(), **orjson.loads(text)) for name, text in sorted(pairs.items()))


def pairs_from(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """HGETALL's reply as a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
