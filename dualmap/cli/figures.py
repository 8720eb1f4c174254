"""A fleet's figures at one moment: from the shared state, and from what its replicas count."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from http import HTTPStatus

from dualmap.cli.fetch import fetch
from dualmap.router.telemetry.pressure import WINDOW_S, overdue_in
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.call_values import PoolSnapshot

_SAMPLE = re.compile(r"^([a-z_]+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_FAILED = re.compile(r'outcome="(?:upstream_failed|timed_out|cut_off|refused|internal_error)"')
_SCRAPE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """Sums over replicas; tokens are those that the instance reported of an answer, or else those expected of it."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0
    slo_met: int = 0
    slo_missed: int = 0

    @property
    def judged(self) -> int:
        """Requests that were on time, or were not."""
        return self.slo_met + self.slo_missed

    def since(self, before: ReplicaCounts) -> ReplicaCounts:
        """The counts since ``before``."""
        grown = {each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)}
        return ReplicaCounts(**grown)


@dataclass(frozen=True, slots=True)
class InstanceFigures:
    instance_id: str
    state: str
    pending_tokens: int
    held: int
    running: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Figures of the live status."""

    instances: tuple[InstanceFigures, ...]
    replicas: int
    _: KW_ONLY
    leader: str | None
    migrations: int
    counts: ReplicaCounts
    requests_per_s: float
    overdue: int = 0
    """Requests whose deadline has passed without a first token."""
    last_minute: ReplicaCounts | None = None
    """The counts of the last minute; None: ``counts`` are."""

    @property
    def pending_tokens(self) -> int:
        return sum(instance.pending_tokens for instance in self.instances)

    @property
    def held(self) -> int:
        return sum(instance.held for instance in self.instances)

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens found cached; None before the first answer."""
        return self.counts.hit_tokens / self.counts.prompt_tokens if self.counts.prompt_tokens else None

    @property
    def on_time_share(self) -> float | None:
        """Share of requests on time, in the last minute if there were any; None before the first one."""
        last_minute = self.last_minute if self.last_minute is not None and self.last_minute.judged else self.counts
        return last_minute.slo_met / last_minute.judged if last_minute.judged else None


def fleet_figures(
    snapshots: Iterable[PoolSnapshot],
    counts: ReplicaCounts,
    requests_per_s: float,
    last_minute: ReplicaCounts | None = None,
) -> FleetFigures:
    """The figures of all pools together."""
    instances: list[InstanceFigures] = []
    replicas: set[str] = set()
    leader, migrations, overdue = None, 0, 0
    for snapshot in snapshots:
        held = Counter(record.instance_id for record in snapshot.requests if record.state is RequestState.HELD)
        for instance_id, spec in sorted(snapshot.instances.items()):
            load = snapshot.loads.get(instance_id)
            instances.append(
                InstanceFigures(
                    instance_id,
                    spec.state.value,
                    load.pending_tokens if load else 0,
                    held[instance_id],
                    load.running_requests if load else 0,
                    load.cached_blocks if load else 0,
                )
            )
        replicas.update(replica.replica_id for replica in snapshot.replicas)
        leader = leader or (snapshot.leader.owner if snapshot.leader else None)
        migrations += sum(snapshot.migrations.values())
        overdue += overdue_in(replica for replica in snapshot.replicas if replica.is_alive(snapshot.now_ms))
    return FleetFigures(
        tuple(instances),
        len(replicas),
        leader=leader,
        migrations=migrations,
        counts=counts,
        requests_per_s=requests_per_s,
        overdue=overdue,
        last_minute=last_minute,
    )


class RecentCounts:
    """Counts of the last minute, from sums that only grow."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, ReplicaCounts]] = deque()

    def last_minute(self, counts: ReplicaCounts, now_s: float) -> ReplicaCounts:
        """Take in the sums of now; returns what was counted since those of a minute ago, or the first ones."""
        self._readings.append((now_s, counts))
        while len(self._readings) > 1 and self._readings[1][0] <= now_s - WINDOW_S:
            self._readings.popleft()
        return counts.since(self._readings[0][1])


class FleetCounts:
    """Counts of the replicas at ``ops_urls``, and last read counts of those that ended there."""

    def __init__(self, ops_urls: Sequence[str]) -> None:
        self._ops_urls = ops_urls
        self._latest: dict[str, Mapping[str, float]] = {}
        self._ended: Mapping[str, float] = {}

    async def read(self) -> ReplicaCounts:
        """Counters of all replicas, summed; one that does not answer counts with its last values."""
        pages = await asyncio.gather(*(asyncio.to_thread(_fetch, f"{url}/metrics") for url in self._ops_urls))
        for url, page in zip(self._ops_urls, pages, strict=True):
            if page is None:
                continue
            before, now = self._latest.get(url, {}), _samples(page)
            if any(now.get(name, 0.0) < value for name, value in before.items()):  # another process answers there
                self._ended = _sum(self._ended, before)
            self._latest[url] = now
        return _counts(_sum(self._ended, *self._latest.values()))


def _sum(*several: Mapping[str, float]) -> Mapping[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for samples in several:
        for name, value in samples.items():
            total[name] += value
    return total


def _counts(total: Mapping[str, float]) -> ReplicaCounts:
    return ReplicaCounts(
        requests=int(total["requests"]),
        failed=int(total["failed"]),
        prompt_tokens=total["prompt_tokens.reported"] + total["prompt_tokens.unreported"],
        hit_tokens=total["hit_tokens.reported"] + total["hit_tokens.unreported"],
        slo_met=int(total["slo.met"]),
        slo_missed=int(total["slo.missed"]),
    )


def _fetch(url: str) -> str | None:
    answer = fetch(url, timeout_s=_SCRAPE_TIMEOUT_S)
    return answer.body.decode() if answer.status == HTTPStatus.OK else None


def _samples(page: str) -> Mapping[str, float]:
    """The counters the status needs, from a page in Prometheus' text format."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in _SAMPLE.findall(page):
        if name == "dualmap_requests_total":
            found["requests"] += float(value)
            if _FAILED.search(labels):
                found["failed"] += float(value)
        elif name in ("dualmap_prompt_tokens_total", "dualmap_hit_tokens_total", "dualmap_slo_total"):
            kind = re.search(r'(?:by|slo)="(\w+)"', labels)
            if kind:
                found[f"{name.removeprefix('dualmap_').removesuffix('_total')}.{kind[1]}"] += float(value)
    return found
