"""The load of instances as router replicas that share no store know it of each other.

A replica's own books count what it sent itself. Its view adds what it knows of the others, exactly, as of the last
reading, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from dualmap.scheduling.state.instance import COUNTED
from dualmap.statestore.records import InstanceRecord


class LoadView(StrEnum):
    """The load of instances that a replica knows. Of prefixes it knows those that it routed itself, and all where
    instances report their caches."""

    EXACT = "exact"
    """The load that all replicas cause, at the moment of the decision."""
    LATE = "late"
    """The load that it causes itself, and that of the others as of the last reading."""
    GAUGES = "gauges"
    """The load that all cause as of the last reading, its own included: it counts nothing itself."""
    OWN = "own"
    """The load that it causes itself."""


READ_VIEWS = frozenset({LoadView.LATE, LoadView.GAUGES})

SUMMED = (*COUNTED, "passed_over_tokens")
"""Counts of a record that add up over replicas."""
STAMPED = ("last_prefill_ms", "work_since_ms", "running_since_ms")
"""Times of a record, of which the latest counts."""


@dataclass(frozen=True, slots=True)
class SentLoad:
    """An instance's load by what one replica sent there."""

    record: InstanceRecord
    waiting_requests: int
    """Requests in the engine's own queue."""
    window_tokens: float
    """Prefill work of the last minutes, see ``InstanceLoad.window_tokens``."""


@dataclass(frozen=True, slots=True)
class KnownLoad:
    """An instance's load as one replica knows it."""

    growth: Mapping[str, int]
    """The excess of the known counts over the replica's own, by field of a record."""
    stamps: Mapping[str, int]
    """The times that are later than in the replica's own books."""
    waiting_requests: int
    window_tokens: float
    kv_used_tokens: int | None
    """The engine's gauge of KV use; None: not read."""


@dataclass(slots=True)
class _Reading:
    """The gauges of all instances at one moment."""

    sent: Sequence[Mapping[str, SentLoad]]
    """Loads by replica and instance."""
    kv_used_tokens: Mapping[str, int]


class LoadReadings:
    """The loads of a fleet's instances, and the last reading of them."""

    def __init__(
        self,
        view: LoadView,
        sent: Sequence[Callable[[], Mapping[str, SentLoad]]],
        kv_used_tokens: Callable[[], Mapping[str, int]],
    ) -> None:
        """``sent`` gives what each replica has sent to the instances now, ``kv_used_tokens`` the engines' gauges."""
        self.view = view
        self._sent = sent
        self._kv_used_tokens = kv_used_tokens
        self._last = _Reading([MappingProxyType({}) for _ in sent], {})

    def read(self) -> None:
        """Read all gauges."""
        self._last = self._now()

    def _now(self) -> _Reading:
        return _Reading([sent() for sent in self._sent], self._kv_used_tokens())

    def known_to(self, replica: int) -> Mapping[str, KnownLoad]:
        """The load of each instance as the replica of this number knows it."""
        own, last = self._sent[replica](), self._last
        match self.view:
            case LoadView.EXACT:
                now = self._now()
                parts, kv_used_tokens = now.sent, now.kv_used_tokens
            case LoadView.LATE:
                parts = [*last.sent[:replica], own, *last.sent[replica + 1 :]]
                kv_used_tokens = last.kv_used_tokens
            case LoadView.GAUGES:
                parts, kv_used_tokens = last.sent, last.kv_used_tokens
            case _:
                parts, kv_used_tokens = (own,), {}
        known: dict[str, KnownLoad] = {}
        for name, mine in own.items():
            loads = [part[name] for part in parts if name in part]
            known[name] = _known(mine, loads, kv_used_tokens.get(name))
        return known


def _known(own: SentLoad, loads: Sequence[SentLoad], kv_used_tokens: int | None) -> KnownLoad:
    mine = own.record
    growth = {name: sum(getattr(load.record, name) for load in loads) - getattr(mine, name) for name in SUMMED}
    stamps = {name: max((getattr(load.record, name) for load in loads), default=0) for name in STAMPED}
    return KnownLoad(
        {name: count for name, count in growth.items() if count},
        {name: at_ms for name, at_ms in stamps.items() if at_ms > getattr(mine, name)},
        sum(load.waiting_requests for load in loads),
        sum(load.window_tokens for load in loads),
        kv_used_tokens,
    )
