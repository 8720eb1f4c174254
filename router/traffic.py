"""What a replica has served, in a few sums. Its heartbeat carries them, so that any reader of the store sees those of
the whole fleet without asking a replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from router.metrics import PoolMetrics
from router.outcome import Outcome
from statestore.leases import ReplicaInfo

INFO_FIELD = "traffic"
"""Where the heartbeat carries them, as ``name=count`` pairs."""

_FAILED = (Outcome.UPSTREAM_FAILED, Outcome.TIMED_OUT, Outcome.CUT_OFF, Outcome.INTERNAL_ERROR)


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """Sums since the replica started. Tokens are those that instances reported, or else those that were expected."""

    ended: int = 0
    """Requests, however they ended."""
    failed: int = 0
    refused: int = 0
    on_time: int = 0
    """First tokens of streamed answers within their TTFT SLO."""
    late: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens found in the instances' caches."""

    @classmethod
    def of(cls, metrics: PoolMetrics) -> TrafficCounts:
        """What the replica has counted in one pool."""
        outcomes = {outcome: int(counter.value) for outcome, counter in metrics.outcomes.items()}
        reported = metrics.prompt_tokens_reported.value > 0
        return cls(
            ended=sum(outcomes.values()),
            failed=sum(outcomes[outcome] for outcome in _FAILED),
            refused=outcomes[Outcome.REFUSED],
            on_time=int(metrics.slo_met.value),
            late=int(metrics.slo_missed.value),
            prompt_tokens=int((metrics.prompt_tokens_reported if reported else metrics.prompt_tokens_expected).value),
            hit_tokens=int((metrics.hit_tokens_reported if reported else metrics.hit_tokens_expected).value),
        )

    @classmethod
    def from_info(cls, info: Mapping[str, str]) -> TrafficCounts:
        """What a heartbeat carried; zeros where it carried none, or nothing that is understood."""
        known = {field.name for field in fields(cls)}
        pairs = (pair.partition("=") for pair in info.get(INFO_FIELD, "").split())
        return cls(**{name: int(count) for name, _, count in pairs if name in known and count.isdecimal()})

    def to_text(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    def plus(self, other: TrafficCounts) -> TrafficCounts:
        return TrafficCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def since(self, before: TrafficCounts) -> TrafficCounts:
        """What was counted after ``before``; everything, where a process that began again counts less."""
        grown = [getattr(self, field.name) - getattr(before, field.name) for field in fields(self)]
        return self if min(grown) < 0 else TrafficCounts(*grown)


class FleetTraffic:
    """The sums of a pool's replicas over time. Those of replicas that left stay counted, as far as they were seen."""

    def __init__(self) -> None:
        self._last: dict[str, TrafficCounts] = {}
        self.total = TrafficCounts()
        """Since each replica started."""

    def read(self, replicas: Iterable[ReplicaInfo]) -> TrafficCounts:
        """The sums, after what the heartbeats say now."""
        for replica in replicas:
            counts = TrafficCounts.from_info(replica.info)
            self.total = self.total.plus(counts.since(self._last.get(replica.replica_id, TrafficCounts())))
            self._last[replica.replica_id] = counts
        return self.total
