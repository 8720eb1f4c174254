"""The record of the fleet's last minutes, which is kept without a viewer: samples, what happened, problems.

Every replica looks every few seconds whether a step is due; one of them makes it, whichever is first. It compares the
overview with what the last step left in the store, so nothing is told twice, and nothing is lost when replicas die.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from dualmap.router.replica.runtime import Runtime
from dualmap.router.telemetry.pressure import WINDOW_S, overdue_in
from dualmap.router.telemetry.traffic import PROCESS_FIELD, TrafficCounts
from dualmap.router.ui.happenings import Reading, happenings
from dualmap.router.ui.problems import FleetState, PoolState, Problem, Severity, problems
from dualmap.router.ui.status import Avoidance, Event, ReplicaStatus
from dualmap.scheduling.backoff import worth_logging
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.call_values import PoolOverview
from dualmap.statestore.errors import StoreError
from dualmap.statestore.leases import AVOIDED_FIELD, FAULTS_FIELD, LIMITED_FIELD, REFUSALS_FIELD, ReplicaInfo
from dualmap.statestore.pool.chronicle import ChronicleRecord, Happened, KnownProblem, PoolSample

log = logging.getLogger(__name__)

STEP_S: Final = 5.0
LAST_MINUTES_S: Final = 900.0
"""The report for people who come later."""
RECENT_SAMPLES: Final = 12
"""Samples of the last minute."""
OVER_AFTER_S: Final = 15.0
"""A problem that was not found for so long is over."""
LONGEST_TEXT: Final = 300
_AVOIDED = re.compile(r"(\S+) \((\w+): ([^)]*)\)")
_SEEN_IN_STATES: Final = ("/instance/", "/instances/", "/leader", "gone/")
"""Parts of keys of problems that what happened tells by itself."""


class Chronicler:
    """Makes steps for all pools of a replica."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._failures = 0

    async def run(self) -> None:
        """Make the first step at once, so that what is counted from now on is on record. Runs until cancelled."""
        while True:
            try:
                for name in self._runtime.pools.pools:
                    await self.step(name)
                self._failures = 0
            except StoreError as error:
                self._failures += 1
                if worth_logging(self._failures):
                    log.warning("the last minutes are not recorded failures=%d: %s", self._failures, error)
            await self._runtime.context.clock.sleep(STEP_S)

    async def step(self, name: str, *, least_s: float = STEP_S) -> bool:
        """Make a step of a pool, if the last one is ``least_s`` old; whether this replica made one.

        Raises:
            StoreError: the store is out of reach.
        """
        pool = self._runtime.pools.pools[name]
        if pool.store.degraded:
            return False
        chronicle = pool.store.chronicle
        after = await chronicle.last_step()
        if after is not None and after.isdigit() and 0 <= await chronicle.now_ms() - int(after) < 900 * least_s:
            return False
        former, recent = await chronicle.last_record(), await chronicle.samples(RECENT_SAMPLES)
        overviews = {each: await self._runtime.fleet.get(each, least_s / 2) for each in self._runtime.pools.pools}
        overview, counted = overviews[name], counts_of(overviews[name].replicas)
        grown = Counter(former.grown) + (growth(former.counted, counted) if former.at_ms else Counter[str]())
        sample = sample_of(overview, grown, former.sampled_ms or overview.now_ms)
        is_whole = sample.over_s >= 0.9 * STEP_S or not former.sampled_ms
        found = await self._found(name, overviews, (sample, *recent))
        reading = Reading.of(overview, pool.view.view)
        known, turns = followed(former.problems, found, overview.now_ms, begins=not former.at_ms)
        lines = [*(happenings(_reading_of(former), reading) if former.at_ms else ()), *turns]
        record = ChronicleRecord(
            overview.now_ms,
            self._runtime.context.replica_id,
            sampled_ms=overview.now_ms if is_whole else former.sampled_ms,
            states=reading.states,
            notes=reading.notes,
            replicas=tuple(sorted(reading.replicas)),
            leader=reading.leader,
            migrations=reading.migrations,
            hot=reading.hot,
            counted=counted,
            grown={} if is_whole else grown,
            problems=tuple(known),
        )
        happened = [Happened(overview.now_ms, kind, text[:LONGEST_TEXT]) for kind, text in lines]
        return await chronicle.record(record, sample if is_whole else None, happened, after=after)

    async def _found(
        self, name: str, overviews: Mapping[str, PoolOverview], samples: Sequence[PoolSample]
    ) -> list[Problem]:
        """The problems of this pool, and of the fleet in its first one."""
        overview = overviews[name]
        within = [each for each in samples if each.at_ms > overview.now_ms - 1000 * WINDOW_S]
        counts, over_s = sum((Counter(each.counts) for each in within), Counter[str]()), sum(e.over_s for e in within)
        states = [
            await self._state(each, of_it, TrafficCounts.from_sums(counts) if each == name else TrafficCounts(), over_s)
            for each, of_it in overviews.items()
        ]
        fleet = FleetState(self._runtime.context.replica_id, states, _statuses(name, overview), events_of(name, counts))
        is_first, of_pools = name == next(iter(overviews)), tuple(f"{each}/" for each in overviews)
        return [
            each
            for each in problems(fleet)
            if (each.severity is not Severity.NOTICE or each.key.startswith("limited/"))
            and (each.key.startswith(f"{name}/") or (is_first and not each.key.startswith(of_pools)))
        ]

    async def _state(self, name: str, overview: PoolOverview, recent: TrafficCounts, over_s: float) -> PoolState:
        pool = self._runtime.pools.pools[name]
        publications = pool.store.publications
        scaled = [*await publications.scaling_log(1), None][0]
        slo_s, may_be_empty = pool.scheduling.slo_ttft_s, pool.waiting_room is not None
        discovery = await publications.discovery()
        return PoolState(
            name,
            pool.view.view,
            slo_s,
            overview,
            recent=recent,
            scaled=scaled,
            may_be_empty=may_be_empty,
            discovery=discovery,
            recent_s=max(over_s, 1.0),
        )


def _statuses(name: str, overview: PoolOverview) -> dict[str, ReplicaStatus]:
    """The statuses of replicas, by the heartbeats of a pool."""
    return {
        replica.replica_id: ReplicaStatus(
            avoided={
                name: {
                    instance: Avoidance(state, reason, 0.0)
                    for instance, state, reason in _AVOIDED.findall(replica.info.get(AVOIDED_FIELD, ""))
                }
            }
        )
        for replica in overview.replicas
        if replica.is_alive(overview.now_ms)
    }


# counts ---------------------------------------------------------------------------------------------------------
def counts_of(replicas: Sequence[ReplicaInfo]) -> dict[str, dict[str, int]]:
    """The counts of each process since it began, by its replica and a name that no other process has."""
    counted = {}
    for replica in replicas:
        info = replica.info
        counts = {name: value for name, value in TrafficCounts.from_info(info).sums().items() if value}
        for field, kind in ((REFUSALS_FIELD, "refusal"), (FAULTS_FIELD, "fault"), (LIMITED_FIELD, "limited")):
            for what, _, number in (pair.rpartition("=") for pair in info.get(field, "").split()):
                if number.isdecimal():
                    counts[f"{kind}:{what}"] = int(number)
        counted[f"{replica.replica_id} {info.get(PROCESS_FIELD, '')}"] = counts
    return counted


def growth(before: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    """The counts between two readings. A process that was not there before has counted all of it since."""
    grown = Counter[str]()
    for process, counts in now.items():
        former = before.get(process, {})
        grown += Counter({name: value - former.get(name, 0) for name, value in counts.items()})
    return grown


def recent_traffic(record: ChronicleRecord, samples: Sequence[PoolSample]) -> tuple[TrafficCounts, float]:
    """The counts of the last minute, and its seconds, by the last step and the samples, the latest first."""
    counts, over_s = _recent_sums(record, samples)
    return TrafficCounts.from_sums(counts), max(1.0, over_s)


def recent_events(pool: str, record: ChronicleRecord, samples: Sequence[PoolSample]) -> Counter[Event]:
    """The events of the last minute, likewise."""
    return events_of(pool, _recent_sums(record, samples)[0])


def _recent_sums(record: ChronicleRecord, samples: Sequence[PoolSample]) -> tuple[Counter[str], float]:
    recent = [each for each in samples if each.at_ms > record.at_ms - 1000 * WINDOW_S]
    counts = sum((Counter(each.counts) for each in recent), Counter(record.grown))
    return counts, sum(each.over_s for each in recent) + (record.at_ms - record.sampled_ms) / 1000


def sample_of(overview: PoolOverview, grown: Mapping[str, int], since_ms: int) -> PoolSample:
    """The sample of what an overview says, with what was counted since the sample before."""
    loads = overview.loads.values()
    ready = [load for load in loads if load.state is InstanceState.READY]
    ahead_s = sum(load.pending_tokens / load.prefill_tokens_per_s for load in ready)
    return PoolSample(
        overview.now_ms,
        (overview.now_ms - since_ms) / 1000,
        counts=dict(grown),
        held=sum(load.queued_requests for load in loads),
        overdue=overdue_in(replica for replica in overview.replicas if replica.is_alive(overview.now_ms)),
        running=sum(load.running_requests for load in loads),
        ahead_s=round(ahead_s / max(1, len(ready)), 1),
        ready=len(ready),
        instances=len(loads),
    )


def events_of(pool: str, counts: Mapping[str, int]) -> Counter[Event]:
    """The refusals, faults and limits that were met among them."""
    events = Counter[Event]()
    for name, count in counts.items():
        kind, _, what = name.partition(":")
        if kind == "refusal":
            events["refusal", what] += count
        elif kind == "fault":
            instance_id, _, reason = what.rpartition("/")
            events["fault", pool, instance_id, reason] += count
        elif kind == "limited":
            events["limited", what] += count
    return events


def _reading_of(record: ChronicleRecord) -> Reading:
    alive = frozenset(record.replicas)
    return Reading(record.states, record.notes, alive, frozenset(), record.leader, record.migrations, record.hot)


# problems -------------------------------------------------------------------------------------------------------
def followed(
    former: Sequence[KnownProblem], found: Sequence[Problem], now_ms: int, *, begins: bool = False
) -> tuple[list[KnownProblem], list[tuple[str, str]]]:
    """The problems of the last minutes after this step, and lines on those that began, and those that are over."""
    known = {each.key: each for each in former}
    kept: list[KnownProblem] = []
    turns: list[tuple[str, str]] = []
    for problem in found:
        before = known.pop(problem.key, None)
        lasts = before is not None and before.until_ms is None
        since_ms = before.since_ms if before is not None and lasts else problem.since_ms or now_ms
        made = KnownProblem(
            problem.key,
            problem.severity.value,
            problem.what,
            problem.why[:LONGEST_TEXT],
            problem.advice,
            since_ms,
            now_ms,
            weight=problem.weight,
            from_begin=begins or (before is not None and lasts and before.from_begin),
        )
        if before is not None and lasts and before.weight > problem.weight:
            made = replace(before, seen_ms=now_ms)
        kept.append(made)
        if not lasts and not begins and _is_chronicled(problem.key):
            turns.append(("trouble", problem.what))
    for each in known.values():
        if each.from_begin:
            continue
        if each.until_ms is None and now_ms - each.seen_ms >= 1000 * OVER_AFTER_S:
            each = replace(each, until_ms=each.seen_ms)
            if _is_chronicled(each.key):
                turns.append(("good", f"over, after {_lasted(each)}: {each.what}"))
        if each.until_ms is None or now_ms - each.until_ms < 1000 * LAST_MINUTES_S:
            kept.append(each)
    return kept, turns


def _is_chronicled(key: str) -> bool:
    return not any(part in key for part in _SEEN_IN_STATES)


def _lasted(problem: KnownProblem) -> str:
    lasted_s = max(0, (problem.until_ms or problem.seen_ms) - problem.since_ms) / 1000
    return f"{lasted_s:.0f} s" if lasted_s < 90 else f"{lasted_s / 60:.0f} min"


def ended(known: Sequence[KnownProblem], now_ms: int) -> Iterator[KnownProblem]:
    """The problems that ended in the last minutes, the latest first."""
    over = [each for each in known if each.until_ms is not None and now_ms - each.until_ms < 1000 * LAST_MINUTES_S]
    yield from sorted(over, key=lambda each: -(each.until_ms or 0))
