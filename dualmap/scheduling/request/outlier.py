"""Outlier detection: an instance is judged by its share of failures beside its peers', as Envoy does.

Every instance fails some requests when the network, a client or the load is at fault: an instance stands out only where
it fails significantly more than the rest of the pool did at the same time. Without peers there is nothing to compare
with. However many stand out, no more than a share of the pool is ejected at once: beyond it the rest could not carry
the load, and the fault is more likely one that all have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OutlierRule:
    window_s: float = 30.0
    """Outcomes of the last one to two halves of it count."""
    min_faults: int = 3
    """Fewer faults show nothing."""
    min_share: float = 0.1
    """A smaller share of faults never ejects."""
    sigma: float = 3.0
    """Number of standard deviations by which an instance's share must exceed its peers' (a test of two proportions)."""
    max_ejected_share: float = 0.5
    """Largest share of the instances in service that may be ejected at once, rounded up; one always may be, where there
    are others."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Outcomes of one or more instances."""

    successes: int = 0
    faults: int = 0

    @property
    def total(self) -> int:
        return self.successes + self.faults

    @property
    def share(self) -> float:
        """Share of faults among the outcomes, 0..1; 0 without any outcome."""
        return self.faults / self.total if self.faults else 0.0


def stands_out(own: Tally, peers: Tally, rule: OutlierRule) -> bool:
    """Whether an instance fails significantly more of its requests than its peers do of theirs."""
    if own.faults < rule.min_faults or own.share < rule.min_share or not peers.total:
        return False
    common = (own.faults + peers.faults) / (own.total + peers.total)
    deviation = math.sqrt(common * (1.0 - common) * (1.0 / own.total + 1.0 / peers.total))
    return own.share - peers.share > rule.sigma * deviation


def most_ejected(in_service: int, rule: OutlierRule) -> int:
    """How many of the instances in service may be ejected at once."""
    if in_service < 2:
        return 0
    return min(in_service - 1, math.ceil(in_service * rule.max_ejected_share))


@dataclass(slots=True)
class OutcomeWindow:
    """Recent outcomes by instance, in two halves of the window: counting costs a request one addition.

    Times are the caller's monotonic seconds.
    """

    rule: OutlierRule
    _turn_s: float = -math.inf
    """When the newer half ends."""
    _newer: dict[str, list[int]] = field(default_factory=dict)
    """Successes and faults."""
    _older: dict[str, list[int]] = field(default_factory=dict)
    _newer_all: list[int] = field(default_factory=lambda: [0, 0])
    _older_all: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, instance_id: str, fault: bool, now_s: float) -> None:
        if now_s >= self._turn_s:
            self._turn(now_s)
        counts = self._newer.get(instance_id)
        if counts is None:
            counts = self._newer[instance_id] = [0, 0]
        counts[fault] += 1
        self._newer_all[fault] += 1

    def of(self, instance_id: str, now_s: float) -> tuple[Tally, Tally]:
        """The outcomes of an instance, and of all others together."""
        if now_s >= self._turn_s:
            self._turn(now_s)
        none = (0, 0)
        newer, older = self._newer.get(instance_id, none), self._older.get(instance_id, none)
        own = Tally(newer[0] + older[0], newer[1] + older[1])
        successes, faults = (a + b for a, b in zip(self._newer_all, self._older_all, strict=True))
        return own, Tally(successes - own.successes, faults - own.faults)

    def forget(self, instance_id: str) -> None:
        """The outcomes of an instance count no more, neither for itself nor among others' peers."""
        for counts, total in ((self._newer, self._newer_all), (self._older, self._older_all)):
            successes, faults = counts.pop(instance_id, (0, 0))
            total[0] -= successes
            total[1] -= faults

    def keep_only(self, instance_ids: Mapping[str, object]) -> None:
        """Forget all other instances."""
        gone: Iterable[str] = (self._newer.keys() | self._older.keys()) - instance_ids.keys()
        for instance_id in gone:
            self.forget(instance_id)

    def _turn(self, now_s: float) -> None:
        half_s = self.rule.window_s / 2
        aged = now_s < self._turn_s + half_s
        self._older, self._older_all = (self._newer, self._newer_all) if aged else ({}, [0, 0])
        self._newer, self._newer_all = {}, [0, 0]
        self._turn_s = now_s + half_s
