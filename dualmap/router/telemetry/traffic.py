"""Sums over what a replica has served. Its heartbeat carries them, so that any reader of the store sees those of the
whole fleet without calling a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Final

from dualmap.router.telemetry.metrics import COMPUTED, PEER, TPOT_BOUNDS_S, WAIT_BOUNDS_S, PoolMetrics
from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.request.outcome import ANSWERED, FAILED_BY_THE_FLEET, Outcome
from dualmap.statestore.leases import ReplicaInfo

INFO_FIELD = "traffic"
"""Field of the heartbeat that carries them, as ``name=count`` pairs; a histogram is ``name=count,count,…``."""

PROCESS_FIELD: Final = "process"
"""Field of the heartbeat that names the process that counts, as a restarted one begins at zero under the same replica
id."""

_BUCKETS: Final = {"ttft_buckets": len(WAIT_BOUNDS_S) + 1, "tpot_buckets": len(TPOT_BOUNDS_S) + 1}
"""The histograms, with their buckets. One with other buckets, of another version, cannot be added."""


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """Sums since the replica started, none of which ever falls. Tokens are those that the instance reported of an
    answer, or else those that were expected of it."""

    ended: int = 0
    """Requests, however they ended."""
    failed: int = 0
    refused: int = 0
    _: KW_ONLY
    on_time: int = 0
    """Requests whose first token came within their TTFT SLO (``RequestMachine.on_time``)."""
    late: int = 0
    """Requests whose deadline passed without one, and those that the fleet refused or failed."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens found in the instances' caches."""
    host_tokens: int = 0
    """Prompt tokens that were to be loaded from host memory, of ``hit_tokens``; likewise the next three."""
    disk_tokens: int = 0
    pool_tokens: int = 0
    peer_tokens: int = 0
    """Tokens that were to be pulled from another instance."""
    forgone_tokens: int = 0
    """Prompt tokens that a tier had, and that were computed as that cost less."""
    output_tokens: int = 0
    """Output tokens of whole answers, as instances reported them."""
    continued: int = 0
    """Times that a stream was to go on elsewhere."""
    arrived: int = 0
    """Requests, whether or not they have ended."""
    answered: int = 0
    """Requests that were answered to the end."""
    limited: int = 0
    """Refused requests that a limit of their tenant kept out."""
    ttft_buckets: tuple[int, ...] = ()
    """First tokens of streamed answers by their time, in the buckets of ``WAIT_BOUNDS_S``; empty: none."""
    tpot_buckets: tuple[int, ...] = ()
    """Streamed answers by their time per output token, in the buckets of ``TPOT_BOUNDS_S``."""

    @classmethod
    def of(cls, metrics: PoolMetrics) -> TrafficCounts:
        """The counts of one pool on the replica."""
        outcomes = {outcome: int(counter.value) for outcome, counter in metrics.outcomes.items()}
        return cls(
            ended=sum(outcomes.values()),
            failed=sum(outcomes[outcome] for outcome in FAILED_BY_THE_FLEET),
            refused=outcomes[Outcome.REFUSED],
            on_time=int(metrics.slo_met.value),
            late=int(metrics.slo_missed.value),
            prompt_tokens=int(metrics.prompt_tokens_reported.value + metrics.prompt_tokens_unreported.value),
            hit_tokens=int(metrics.hit_tokens_reported.value + metrics.hit_tokens_unreported.value),
            host_tokens=metrics.tier_hits[Tier.HOST],
            disk_tokens=metrics.tier_hits[Tier.DISK],
            pool_tokens=metrics.tier_hits[Tier.POOL],
            peer_tokens=metrics.tier_hits[PEER],
            forgone_tokens=metrics.tier_hits[COMPUTED],
            output_tokens=int(metrics.output_tokens.value),
            continued=int(sum(counter.value for counter in metrics.continuations.values())),
            arrived=int(metrics.arrived.value),
            answered=sum(outcomes[outcome] for outcome in ANSWERED),
            limited=int(metrics.limited.value),
            ttft_buckets=_counted(metrics.ttft_s.counts),
            tpot_buckets=_counted(metrics.tpot_s.counts),
        )

    @classmethod
    def from_info(cls, info: Mapping[str, str]) -> TrafficCounts:
        """The counts that a heartbeat carried; zeros where it carried none, or nothing that is understood."""
        counts: dict[str, Any] = {}
        for name, _, text in (pair.partition("=") for pair in info.get(INFO_FIELD, "").split()):
            numbers = text.split(",")
            if not all(map(str.isdecimal, numbers)):
                continue
            if name in _SUMS and len(numbers) == 1:
                counts[name] = int(text)
            elif _BUCKETS.get(name) == len(numbers):
                counts[name] = tuple(map(int, numbers))
        return cls(**counts)

    @classmethod
    def from_sums(cls, sums: Mapping[str, int]) -> TrafficCounts:
        """The counts with these values by name; others are left out, and there are no histograms."""
        return cls(**{name: value for name, value in sums.items() if name in _SUMS})  # type: ignore[arg-type]

    @property
    def by_tier(self) -> Mapping[str, int]:
        """Tokens by the memory that they were to be loaded from, as far as there were any."""
        found: dict[str, int] = {Tier.HOST: self.host_tokens, Tier.DISK: self.disk_tokens, Tier.POOL: self.pool_tokens}
        found[PEER] = self.peer_tokens
        return {name: tokens for name, tokens in found.items() if tokens}

    def sums(self) -> dict[str, int]:
        """The values by name, without histograms."""
        return {name: getattr(self, name) for name in _SUMS}

    def to_text(self) -> str:
        texts = [f"{name}={getattr(self, name)}" for name in _SUMS]
        for name in _BUCKETS:
            if counted := getattr(self, name):
                texts.append(f"{name}={','.join(map(str, counted))}")
        return " ".join(texts)

    def plus(self, other: TrafficCounts) -> TrafficCounts:
        return self._with(other, lambda mine, theirs: mine + theirs)

    def since(self, before: TrafficCounts) -> TrafficCounts:
        """The counts after ``before``; everything, where a process that began again counts less."""
        return self if self.falls_short_of(before) else self._less(before)

    def falls_short_of(self, other: TrafficCounts) -> bool:
        """Whether any count is less than the other's, as of one that was taken earlier."""
        less = self._less(other)
        counted = (getattr(less, name) for name in _NAMES)
        return any(min(each, default=0) < 0 if isinstance(each, tuple) else each < 0 for each in counted)

    def _less(self, other: TrafficCounts) -> TrafficCounts:
        return self._with(other, lambda mine, theirs: mine - theirs)

    def _with(self, other: TrafficCounts, change: Callable[[int, int], int]) -> TrafficCounts:
        """Each count together with the other's."""
        changed: dict[str, Any] = {}
        for name in _NAMES:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, tuple):
                length = max(len(mine), len(theirs))
                pairs = zip(mine or (0,) * length, theirs or (0,) * length, strict=True)
                changed[name] = tuple(change(*pair) for pair in pairs)
            else:
                changed[name] = change(mine, theirs)
        return TrafficCounts(**changed)


_NAMES: Final = tuple(field.name for field in fields(TrafficCounts))
_SUMS: Final = tuple(name for name in _NAMES if name not in _BUCKETS)
"""All counts but the histograms."""


def _counted(buckets: Sequence[int]) -> tuple[int, ...]:
    return tuple(buckets) if any(buckets) else ()


class FleetTraffic:
    """The sums of a pool's replicas over time. Those of replicas that left stay counted, as far as they were seen."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], TrafficCounts] = {}
        """Last counts by replica and process."""
        self.total = TrafficCounts()
        """Counts since each replica started."""

    def read(self, replicas: Iterable[ReplicaInfo]) -> TrafficCounts:
        """The sums, after what the heartbeats say now.

        A process that counts less than before repeats an older heartbeat, as after a hand-over to a store that is back:
        that adds nothing. A heartbeat that names no process is taken for that of one that began again.
        """
        for replica in replicas:
            process, counts = replica.info.get(PROCESS_FIELD, ""), TrafficCounts.from_info(replica.info)
            before = self._last.get((replica.replica_id, process), TrafficCounts())
            if process and counts.falls_short_of(before):
                continue
            self.total = self.total.plus(counts.since(before))
            self._last[replica.replica_id, process] = counts
        return self.total
