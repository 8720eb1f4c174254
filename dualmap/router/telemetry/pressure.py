"""How a pool copes with what arrives, and whether that is an overload: one rule for the live page, ``dualmap top``,
``/health`` and the record of the last minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Final

from dualmap.router.telemetry.traffic import TrafficCounts
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.statestore.call_values import PoolOverview
from dualmap.statestore.leases import OVERDUE_FIELD, ReplicaInfo

WINDOW_S: Final = 60.0
"""Window of recent counts."""
LATE_SHARE: Final = 0.1
"""Share of requests that are not on time from which on it is reported; the alert "SLO missed" has the same."""
FEWEST_JUDGED: Final = 10
"""Requests before a share of late ones is reported; and overdue ones before these are reported alone."""
WORST_SHARE: Final = 0.5
"""Share from which on it is critical."""
ADVICE: Final = (
    "The fleet is too small for this load: add instances (dualmap instances add, or a larger"
    " pools[].autoscale.max_instances), or end early what comes too late anyway: scheduling.max_deferred_s bounds how"
    " long a late request waits, router.late_requests: refuse turns it away at once"
)


@dataclass(frozen=True, slots=True)
class Pressure:
    """A pool in the last moments."""

    recent: TrafficCounts
    """Counts of the last ``over_s``."""
    over_s: float
    overdue: int
    """Requests that wait for their first token, though their deadline has passed."""
    slo_s: float
    held: int = 0
    _: KW_ONLY
    ahead_s: float = 0.0
    """Seconds of prefill that the ready instances have ahead, on average."""
    crowded: int = 0
    """Ready instances with more work ahead than fits the SLO."""
    ready: int = 0

    @classmethod
    def of(cls, overview: PoolOverview, recent: TrafficCounts, over_s: float, slo_s: float) -> Pressure:
        """The pressure on a pool by its overview."""
        loads = overview.loads.values()
        ready = [load for load in loads if load.state is InstanceState.READY]
        ahead_s = [*map(_ahead_s, ready)]
        return cls(
            recent,
            over_s,
            overdue_in(replica for replica in overview.replicas if replica.is_alive(overview.now_ms)),
            slo_s,
            sum(load.queued_requests for load in loads),
            ahead_s=sum(ahead_s) / max(1, len(ready)),
            crowded=sum(each > slo_s for each in ahead_s),
            ready=len(ready),
        )

    @property
    def judged(self) -> int:
        """Requests that were on time, or were not."""
        return self.recent.on_time + self.recent.late

    @property
    def late_share(self) -> float:
        return self.recent.late / max(1, self.judged)

    @property
    def is_late(self) -> bool:
        """Whether enough requests are late that an operator must know."""
        return (self.judged >= FEWEST_JUDGED and self.late_share >= LATE_SHARE) or self.overdue >= FEWEST_JUDGED

    @property
    def is_crowded(self) -> bool:
        """Whether most ready instances have more work ahead than fits the SLO."""
        return 2 * self.crowded > self.ready

    @property
    def is_overload(self) -> bool:
        """Whether more arrives than the pool can serve in time."""
        return self.is_crowded and (self.is_late or self.overdue > 0)

    @property
    def is_worst(self) -> bool:
        return self.judged >= FEWEST_JUDGED and self.late_share >= WORST_SHARE

    @property
    def arriving_per_s(self) -> float:
        return self.recent.arrived / max(self.over_s, 1.0)

    @property
    def served_per_s(self) -> float:
        return self.recent.answered / max(self.over_s, 1.0)

    @property
    def headline(self) -> str:
        """The present trouble in a few words; "" where there is none."""
        if not (self.is_late or self.is_overload):
            return ""
        named = "Overload: " if self.is_overload else ""
        if self.judged >= FEWEST_JUDGED and self.late_share >= LATE_SHARE:
            return f"{named}{100 * self.late_share:.0f} % of requests are not on time"
        return f"{named}{self.overdue:,} request{'s are' if self.overdue != 1 else ' is'} overdue"

    @property
    def figures(self) -> str:
        """The figures behind it, as a sentence."""
        recent = self.recent
        said = [
            f"{self.arriving_per_s:,.1f} requests/s arrive and {self.served_per_s:,.1f}/s are answered",
            f"{self.held:,} held, {self.overdue:,} overdue: without a first token after their deadline",
        ]
        if recent.late:
            said.insert(
                0, f"{recent.late:,} of {self.judged:,} missed {self.slo_s:g} s in the last {self.over_s:.0f} s"
            )
        if self.is_crowded:
            said.append(
                f"{self.crowded} of {self.ready} instances have more work ahead than fits the SLO,"
                f" {self.ahead_s:,.0f} s on average"
            )
        return "; ".join(said)


def _ahead_s(load: InstanceLoad) -> float:
    return load.pending_tokens / load.prefill_tokens_per_s


def overdue_in(replicas: Iterable[ReplicaInfo]) -> int:
    """The overdue requests that these replicas report."""
    reported = (replica.info.get(OVERDUE_FIELD, "") for replica in replicas)
    return sum(int(text) for text in reported if text.isdecimal())


class RecentTraffic:
    """Counts of one replica over the recent window."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, TrafficCounts]] = deque()

    def add(self, now_s: float, counts: TrafficCounts) -> None:
        self._readings.append((now_s, counts))
        while len(self._readings) > 1 and self._readings[1][0] <= now_s - WINDOW_S:
            self._readings.popleft()

    def since(self, now_s: float, counts: TrafficCounts) -> tuple[TrafficCounts, float]:
        """The growth of ``counts``, those of now, since the window began; and its seconds."""
        if not self._readings:
            return counts, 0.0
        since_s, before = self._readings[0]
        return counts.since(before), now_s - since_s
