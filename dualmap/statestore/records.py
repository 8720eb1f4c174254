"""Records that transitions read and write: JSON texts of instances and requests, by one table for Python and the
scripts; packed hashes of chains.

Every transition reads and writes such texts, and people read them with ``redis-cli``. Their fields stand in a fixed
order without spaces: a script writes one by a format, at half the cost of encoding a table. ``lua_module`` has the
functions that do so.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, fields, replace
from functools import lru_cache
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import orjson

from dualmap.scheduling.state.adapter_wait import AT_HAND, AdapterWait
from dualmap.scheduling.state.instance import (
    COUNTED,
    Counts,
    InstanceLoad,
    InstanceSpec,
    InstanceState,
    LiveCounts,
    Role,
    seconds_since,
    stalled_s,
)
from dualmap.scheduling.state.legs import Leg, serves
from dualmap.scheduling.state.request import PLACED_FIELDS, REPORTED_FIELDS, RequestState, StoredRequest
from dualmap.scheduling.state.tier_load import NO_LOAD, TierLoad
from dualmap.scheduling.values import documented, in_order, value
from dualmap.statestore.errors import UnreadableStateError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@value
class InstanceRecord(LiveCounts):
    """Counts of an instance, and the part of its description that transitions read."""

    state: str = documented("of the description")
    role: str = documented("of the description")
    kv_capacity_tokens: int = documented("of the description: its KV memory")
    dispatch_window_tokens: int = documented("of the description: dispatched tokens that it is given at most")
    max_running_requests: int = documented("of the description: requests that run there at most")
    max_queued_requests: int = documented("of the description: requests that are held for it at most")
    tokens_per_s: float = documented("learned prefill rate, as the leader published it")
    _: KW_ONLY
    passed_over_tokens: int = documented(
        "of held requests that the last plan of order `deadline` passed over, as they would make others late; new"
        " requests do not wait for them",
        default=0,
    )
    cached_blocks: int = documented("entries of `kv:ID`", default=0)
    assigned_tokens: int = documented(
        "prefill work assigned so far; readers tell from its growth what was assigned recently", default=0
    )
    last_prefill_ms: int = documented(
        "when a prefill was last seen to have finished: a first token, or a whole answer that shows none; never"
        " presumed",
        default=0,
    )
    unseen_prefills: int = documented(
        "since its last first token that was seen, prefills whose end was not: answers that do not stream", default=0
    )
    work_since_ms: int = documented(
        "when work on time came to it while it had none, or its state changed while work was pending", default=0
    )
    running_since_ms: int = documented(
        "when a request was dispatched to it while none ran, or its state changed while some did", default=0
    )
    kv_stamp: int = documented("highest whole stamp in `kv:ID`", default=0)
    hit_step_tokens: int = documented(
        "of a model with several cache groups, as its KV events show: a hit ends at some multiples of so many tokens;"
        " 0: any block may end one",
        default=0,
        sparse=True,
    )
    tiers: int = documented(
        "number of its tiers in `instances:tiers`; 1 where it has none, and pulls", default=0, sparse=True
    )
    adapter_slots: int = documented(
        "of the description: adapters that it has on the device at a time; 0: not known, and not followed",
        default=0,
        sparse=True,
    )
    adapter_host_slots: int = documented(
        "of the description: adapters that it has in host memory, those on the device among them",
        default=0,
        sparse=True,
    )
    adapter_host_ms: int = documented(
        "of the description: time of an adapter from host memory to the device", default=0, sparse=True
    )
    adapter_disk_ms: int = documented("of the description: time of an adapter into host memory", default=0, sparse=True)
    dropped_blocks: int = documented(
        "of the description: blocks at the end of a hit that its engine computes again", default=0, sparse=True
    )
    version: int = documented("grows with every change here; a plan for the queue is committed against it", default=0)

    @classmethod
    def parse(cls, text: bytes) -> InstanceRecord:
        """Raises ValueError, or the like, if the text is malformed: texts come first, then figures alone."""
        values = _in_order(INSTANCE.fields(text))
        total = sum(values[2:])
        if values[0] not in _STATES or values[1] not in _ROLES or total != total:
            raise ValueError(f"no record of an instance: {text!r}")
        return in_order(cls, values)

    def takes_requests(self, leg: Leg = Leg.WHOLE) -> bool:
        """Whether new requests may be placed on the instance for this leg, or held ones moved there."""
        return self.state == InstanceState.READY and serves(Role(self.role), leg)

    def begins(self, growth: Counts) -> list[str]:
        """The stamps of what begins once the counts have grown by so much: work on time where there is none, and
        requests that run."""
        on_time = self.pending_tokens - self.deferred_tokens
        works = on_time <= 0 < on_time + growth.pending_tokens - growth.deferred_tokens
        runs = self.running_requests <= 0 < self.running_requests + growth.running_requests
        begun = {"work_since_ms": works, "running_since_ms": runs}
        return [name for name, begins in begun.items() if begins]

    def load(
        self,
        instance_id: str,
        now_ms: int,
        hit_blocks: int,
        window_tokens: float = 0.0,
        *,
        found: TierLoad = NO_LOAD,
        adapter: AdapterWait = AT_HAND,
    ) -> InstanceLoad:
        seen_ms = self.last_prefill_ms
        silent_s = seconds_since(now_ms, seen_ms, self.running_since_ms) if self.running_requests > 0 else 0.0
        stalls = stalled_s(self, now_ms)
        derived = (hit_blocks, window_tokens, stalls, None, seen_ms, silent_s, self.hit_step_tokens, found, adapter)
        placed = (instance_id, _STATES[self.state], *_placed_figures(self), *_counts(self), *_named_figures(self))
        return in_order(InstanceLoad, (*placed, *derived))

    @property
    def text(self) -> bytes:
        """The text as which the store keeps it."""
        return INSTANCE.pack(_in_text(self))


_placed_figures = attrgetter("cached_blocks", "tokens_per_s", "kv_capacity_tokens")
_counts = attrgetter(*COUNTED)
_named_figures = attrgetter(
    *("passed_over_tokens", "dispatch_window_tokens", "max_running_requests", "max_queued_requests", "version")
)
"""Fields of the record that a load has before and behind the counts, in its order."""
_STATES = {str(state): state for state in InstanceState}
_ROLES = {str(role) for role in Role}
_DESCRIBED = [
    each.name for each in fields(InstanceSpec) if each.name in {known.name for known in fields(InstanceRecord)}
]


def described(spec: InstanceSpec) -> dict[str, Any]:
    """The part of a description that is in the record."""
    return {name: getattr(spec, name) for name in _DESCRIBED}


EMPTY: Final[Mapping[str, str | int]] = MappingProxyType({})
EMPTY_LOADED: Final[Mapping[str, TierLoad]] = MappingProxyType({})
NO_WAITS: Final[Mapping[str, Sequence[float]]] = MappingProxyType({})
_TEXTS = {"state", "role", *(each.name for each in fields(StoredRequest) if str(each.type) not in ("int", "bool"))}


class Record:
    """Some fields in one text of JSON, texts before numbers, what is sparse last. No text has quotes or backslashes,
    unless it was escaped before. A text may have fields that a newer version added, and lack those that this one
    did."""

    def __init__(
        self,
        names: Sequence[str],
        added: Mapping[str, str | int] = EMPTY,
        rare: int = 0,
        sparse: frozenset[str] = frozenset(),
        *,
        one_by_one: bool = False,
    ) -> None:
        """``added`` are fields that an older version beside this one does not write, and what they are then. The first
        ``rare`` ones seldom change. Those that are ``sparse`` are left out where all of them are 0: most records have
        none; with ``one_by_one``, which scripts do not write, each of them where it is."""
        self.rare = rare
        self.names = tuple(sorted(names, key=lambda name: (name in sparse, name not in _TEXTS)))
        self.added = added
        self._one_by_one = one_by_one
        self._usual = len(names) - len(sparse)
        """Fields before those that are sparse."""
        self._format, self._short = (
            "{" + ",".join(f'"{name}":{_form(name)}' for name in written) + "}"
            for written in (self.names, self.names[: self._usual])
        )

    def pack(self, values: Sequence[Any]) -> bytes:
        """The text of a record with these values, in the order of ``names``; none is None."""
        if self._usual == len(values) or any(values[self._usual :]):
            if self._one_by_one:
                return self._pack_present(values)
            return (self._format % tuple(values)).encode()
        return (self._short % tuple(values[: self._usual])).encode()

    def _pack_present(self, values: Sequence[Any]) -> bytes:
        given = [place for place, each in enumerate(values) if each or place < self._usual]
        form = ",".join([f'"{self.names[place]}":{_form(self.names[place])}' for place in given])
        return (f"{{{form}}}" % tuple([values[place] for place in given])).encode()

    def fields(self, text: bytes) -> dict[str, Any]:
        """The values of a record by name."""
        return {**self.added, **orjson.loads(text)}

    def lua_complete(self, function: str, table: str) -> str:
        """A function of Lua that gives a table the fields which the text that it is from may lack."""
        missing = [
            f"if {table}.{name} == nil then {table}.{name} = {each!r} end\n" for name, each in self.added.items()
        ]
        return f"local function {function}({table})\n{''.join(missing)}end\n"

    def lua_text(self, function: str, table: str, first: int = 0, last: int | None = None) -> str:
        """A function of Lua that gives the text of a table, or the part of it that some of its fields are."""
        sparse = self.names[self._usual :] if last is None else ()
        begins, ends = "," if first else "{", "" if last is not None else "}"

        def formatted(names: Sequence[str]) -> str:
            form = ",".join([f'"{name}":{_form(name)}' for name in names])
            return f"format('{begins}{form}{ends}', {', '.join([f'{table}.{name}' for name in names])})"

        code = f"return {formatted(self.names[first:last])}\n"
        if sparse:
            all_zero = " and ".join([f"{table}.{name} == 0" for name in sparse])
            code = f"if {all_zero} then\nreturn {formatted(self.names[first : self._usual])}\nend\n{code}"
        return f"local function {function}({table})\n{code}end\n"


def _form(name: str) -> str:
    return '"%s"' if name in _TEXTS else "%.17g" if name == "tokens_per_s" else "%d"


def _sparse(kind: type[DataclassInstance], names: Sequence[str]) -> frozenset[str]:
    return frozenset(each.name for each in fields(kind) if each.metadata["sparse"]) & frozenset(names)


def _added(kind: type[DataclassInstance], names: Sequence[str]) -> dict[str, str | int]:
    """The fields that an older version beside this one does not write (``statestore.pool.schema``), and what they are
    then."""
    usual: dict[str, Any] = {each.name: each.default for each in fields(kind) if each.metadata["added"]}
    return {name: each for name, each in usual.items() if name in names}


_INSTANCE_FIELDS = [each.name for each in fields(InstanceRecord)]
_RARE = [each.name for each in fields(InstanceRecord) if each.default is MISSING]
"""Fields that are described of an instance, or learned: no transition changes them."""
_RECORDED = [*_RARE, *COUNTED, *(name for name in _INSTANCE_FIELDS if name not in (*_RARE, *COUNTED))]
INSTANCE: Final = Record(
    _RECORDED,
    _added(InstanceRecord, _INSTANCE_FIELDS),
    rare=len(_RARE),
    sparse=_sparse(InstanceRecord, _INSTANCE_FIELDS),
)
_in_order, _in_text = itemgetter(*_INSTANCE_FIELDS), attrgetter(*INSTANCE.names)
PLACED: Final = Record(
    PLACED_FIELDS, _added(StoredRequest, PLACED_FIELDS), sparse=_sparse(StoredRequest, PLACED_FIELDS)
)
REPORTED: Final = Record(
    REPORTED_FIELDS,
    _added(StoredRequest, REPORTED_FIELDS),
    sparse=_sparse(StoredRequest, REPORTED_FIELDS),
    one_by_one=True,
)


REQUEST_TEXTS = ("placed", "told")
"""The fields of a request's key, see ``scheduling.state.request``."""


def reported_of(request: StoredRequest) -> bytes:
    """The text of what the replica reports of a request; it never changes."""
    named = request.account or request.model or request.adapter  # an account ends with the name of a model
    if named and not _is_plain(named):
        model, account, adapter = map(_escaped, (request.model, request.account, request.adapter))
        request = replace(request, model=model, account=account, adapter=adapter)
    return REPORTED.pack(_reported(request))


@lru_cache(maxsize=4096)
def _is_plain(text: str) -> bool:
    """Whether JSON has the text as it is."""
    return text.isprintable() and '"' not in text and "\\" not in text


def _escaped(text: str) -> str:
    return orjson.dumps(text).decode()[1:-1]


def placed_of(request: StoredRequest) -> bytes:
    """The text of where a request is, and how it counts there."""
    return PLACED.pack(["" if each is None else each for each in _placed(request)])


def listed_as(request: StoredRequest) -> str:
    """The entry of a held request in its queue."""
    return f"{request.request_id} {request.uncached_tokens}"


_REQUEST_FIGURES = tuple(name for record in (PLACED, REPORTED) for name in record.names if name not in _TEXTS)
_REQUEST_WORDS = tuple(name for record in (PLACED, REPORTED) for name in record.names if name in _TEXTS)
_REQUEST_FIELDS = (*PLACED.names, *REPORTED.names)
_reported, _placed = attrgetter(*REPORTED.names), attrgetter(*PLACED.names)


def request_from(request_id: str, texts: Sequence[bytes | None]) -> StoredRequest | None:
    """The record from its ``REQUEST_TEXTS``; None if it is gone, or cannot be read."""
    placed, told = texts
    if placed is None or told is None:
        return None
    try:
        written = PLACED.fields(placed) | REPORTED.fields(told)
        found = {name: written[name] for name in _REQUEST_FIELDS}
        math.fsum(found[name] for name in _REQUEST_FIGURES)  # raises where one is no figure
        "".join(found[name] for name in _REQUEST_WORDS)  # raises where one is no text
        found |= {"state": RequestState(found["state"]), "leg": Leg(found["leg"])}
        found |= {name: bool(found[name]) for name in ("deferred", "pinned")}
        return StoredRequest(request_id, **found | {"alternative_id": found["alternative_id"] or None})
    except (ValueError, TypeError, LookupError, ArithmeticError):
        return None


def load_from(instance_id: str, record: bytes, now_ms: int) -> InstanceLoad:
    return InstanceRecord.parse(record).load(instance_id, now_ms, 0)


_HIT_STEP: Final = b'"hit_step_tokens":'


class ReportedLoads(Mapping[str, InstanceLoad]):
    """Loads by instance id from what a script replied, each made when it is first read, which few are. Raises
    UnreadableStateError then where the record is none."""

    __slots__ = ("_flat", "_made", "_now_ms", "_waits", "hits", "loaded")

    def __init__(
        self,
        flat: Sequence[Any],
        now_ms: int,
        loaded: Mapping[str, TierLoad] = EMPTY_LOADED,
        waits: Mapping[str, Sequence[float]] = NO_WAITS,
    ) -> None:
        """``flat`` is an id, a record, a hit, an id, …; ``loaded`` has what is loaded from tiers, and ``waits`` the
        fields of the waits for the adapter."""
        self._flat = flat
        self.loaded = loaded
        self._waits = waits
        self.hits: dict[str, int] = dict(zip(map(bytes.decode, flat[::3]), flat[2::3], strict=True))
        self._now_ms = now_ms
        self._made: dict[str, InstanceLoad] = {}

    @property
    def raw(self) -> tuple[Sequence[Any], int, Mapping[str, TierLoad], Mapping[str, Sequence[float]]]:
        """The arguments that the loads are made from."""
        return self._flat, self._now_ms, dict(self.loaded), dict(self._waits)

    def is_hybrid(self, instance_id: bytes) -> bool:
        """Whether the load of an instance that is there has ``hit_step_tokens``. Every request needs that, and a load
        costs as much to make as the rest of its end; a record's text has a form in which no other value has quotes."""
        record: bytes = self._flat[self._flat.index(instance_id) + 1]
        _, named, value = record.partition(_HIT_STEP)
        return named != b"" and value[:1] != b"0"

    def __getitem__(self, instance_id: str) -> InstanceLoad:
        load = self._made.get(instance_id)
        if load is None:
            hit_blocks = self.hits[instance_id]
            record = self._flat[self._flat.index(instance_id.encode()) + 1]
            try:
                found = TierLoad.of(self.loaded.get(instance_id, NO_LOAD))
                adapter = AdapterWait(*self._waits.get(instance_id, AT_HAND))
                load = InstanceRecord.parse(record).load(
                    instance_id, self._now_ms, hit_blocks, found=found, adapter=adapter
                )
                self._made[instance_id] = load
            except (ValueError, TypeError) as error:
                raise UnreadableStateError(f"the record of {instance_id} cannot be read: {error}") from error
        return load

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self.hits

    def __iter__(self) -> Iterator[str]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)


def lua_module() -> str:
    """The module ``records`` of the scripts: functions on the tables of instances and requests."""
    functions = {
        "complete_instance": INSTANCE.lua_complete("complete_instance", "instance"),
        "described_text": INSTANCE.lua_text("described_text", "instance", last=INSTANCE.rare),
        "rest_text": INSTANCE.lua_text("rest_text", "instance", first=INSTANCE.rare),
        "complete_placed": PLACED.lua_complete("complete_placed", "request"),
        "placed_text": PLACED.lua_text("placed_text", "request"),
    }
    returned = ", ".join([f"{name} = {name}" for name in functions])
    return f"local format = string.format\n{''.join(functions.values())}return {{ {returned} }}\n"


# chains ------------------------------------------------------------------------------------------------------
HASH_BYTES: Final = 8


def pack_chain(hashes: Sequence[int]) -> bytes:
    """``HASH_BYTES`` a block, big-endian."""
    if isinstance(hashes, array):
        in_order = hashes[:]
        if sys.byteorder == "little":
            in_order.byteswap()
        return in_order.tobytes()
    return struct.pack(f">{len(hashes)}Q", *hashes)


def packed_hashes(hashes: Sequence[int]) -> list[bytes]:
    """Each block by itself, as sorted sets have them."""
    return [block.to_bytes(HASH_BYTES, "big") for block in hashes]


def unpack_chain(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(packed) // HASH_BYTES}Q", packed)
