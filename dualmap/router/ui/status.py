"""Knowledge of a replica about the fleet that the store does not have: whether it reaches the store, which instances it
avoids, what it refused, and which faults it saw. Peers send theirs beside their requests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualmap.router.replica.runtime import Runtime
from dualmap.router.telemetry.pressure import WINDOW_S
from dualmap.runtime.certificates import CertificateReport


@dataclass(frozen=True, slots=True)
class Avoidance:
    """Why a replica sends an instance nothing, or trial requests alone; see ``scheduling.request.breakers``."""

    state: str
    reason: str
    for_s: float


@dataclass(kw_only=True, frozen=True, slots=True)
class ReplicaStatus:
    """One replica at one moment. Counts are since it started."""

    stores: Mapping[str, str] = field(default_factory=dict)
    """State of the store by pool: ``ok``, ``unreachable`` or ``local``."""
    avoided: Mapping[str, Mapping[str, Avoidance]] = field(default_factory=dict)
    """Avoidances by pool and instance."""
    panics: Sequence[str] = ()
    """Pools in which ejections are ignored."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Why it cannot reach other replicas, by their ids."""
    contested: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Model names that several pools serve, with these pools."""
    certificates: Mapping[str, str] = field(default_factory=dict)
    """The problem of each certificate that has one, by the setting that names it."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Answers with an error of the router, by code."""
    faults: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    """Faults by pool, instance and reason."""
    limited: Mapping[str, int] = field(default_factory=dict)
    """Requests that limits of tenants kept out (``LimitHits.counts``)."""


def status_of(runtime: Runtime) -> ReplicaStatus:
    """The replica's own; touches no network."""
    metrics, now_s, pools = runtime.context.metrics, runtime.context.clock.monotonic_s(), runtime.pools.pools
    faults: dict[str, dict[str, dict[str, int]]] = {}
    for (pool, instance_id, reason), counter in metrics.faults.instruments.items():
        faults.setdefault(pool, {}).setdefault(instance_id, {})[reason] = int(counter.value)
    avoided = {
        name: {each: Avoidance(why.state, why.reason, round(why.for_s, 1)) for each, why in found.items()}
        for name, pool in pools.items()
        if (found := pool.evidence.breakers.avoided(now_s))
    }
    return ReplicaStatus(
        stores={name: replica.store_state for name, replica in runtime.replicas.items()},
        avoided=avoided,
        panics=[name for name, pool in pools.items() if pool.evidence.breakers.panics],
        unreachable=dict(runtime.peer_watch.unreachable),
        contested={name: list(each) for name, each in runtime.pools.contested.items()},
        certificates={each.name: each.problem for each in _reports(runtime) if each.problem},
        refusals={code: int(counter.value) for (code,), counter in metrics.refusals.instruments.items()},
        faults=faults,
        limited=runtime.context.limit_hits.counts,
    )


def _reports(runtime: Runtime) -> list[CertificateReport]:
    return [followed.report() for followed in runtime.certificates]


Event = tuple[str, ...]
"""``("refusal", code)``, ``("limited", tenant and limit)`` or ``("fault", pool, instance, reason)``."""


class RecentEvents:
    """How often things happened in the last ``WINDOW_S``, from counts of replicas that only grow. What a replica had
    counted when it was seen first happened before."""

    def __init__(self) -> None:
        self._counted: dict[str, Counter[Event]] = {}
        self._grown: deque[tuple[float, Counter[Event]]] = deque()

    def read(self, statuses: Mapping[str, ReplicaStatus], now_s: float) -> Counter[Event]:
        """``statuses`` by replica id, at ``now_s`` of a monotonic clock."""
        grown = Counter[Event]()
        for replica_id, status in statuses.items():
            counted = _events(status)
            if (before := self._counted.get(replica_id)) is not None:
                grown += counted - before  # a process that began again counts less: nothing, until it has caught up
            self._counted[replica_id] = counted
        if grown:
            self._grown.append((now_s, grown))
        while self._grown and self._grown[0][0] <= now_s - WINDOW_S:
            self._grown.popleft()
        return sum((each for _, each in self._grown), Counter[Event]())


def _events(status: ReplicaStatus) -> Counter[Event]:
    events = Counter[Event]({("refusal", code): count for code, count in status.refusals.items()})
    events.update({("limited", name): count for name, count in status.limited.items()})
    for pool, instances in status.faults.items():
        for instance_id, reasons in instances.items():
            events.update({("fault", pool, instance_id, reason): count for reason, count in reasons.items()})
    return events
