"""Conclusions from health checks: pure rules over the observations of one instance.

An answered ``/health`` proves that the HTTP side of an engine lives, not that the engine does: a stopped, paused or
sleeping one keeps answering while requests hang. So an instance with work that has finished no prefill for long becomes
a *suspect*. Its token counters are then read, and it is taken down only if they do not move: an engine that decodes for
long, its KV memory full, makes progress there. Counters that cannot be read show nothing: a busy engine answers slowly,
and one without counters is left to the time limits of its requests.

Failed checks alone do not show that a KV cache is gone: on a machine that is short of CPU an answer comes too late,
and the engine runs on. An instance's KV metadata is forgotten when it goes down if its process takes no connections, if
it makes no progress (it may sleep, which empties its cache), or if its metrics were never read. Otherwise the start
time decides when the instance returns: the metadata is kept if the process is the same, and forgotten if it is not
known.

An engine that is restarted between two checks answers both, with an empty KV cache. Only a connection that has to be
opened again can hide a restart from the checker. Then, and at intervals in case a proxy keeps its connection open, it
reads from the metrics which run of the process answers.

Checks are made from one place. Where those of most instances fail at once, more likely the checker is cut off than all
of them are gone: then an instance stays in service unless it is lost to a router too, or has made no progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from scheduling.instance import InstanceLoad, InstanceState
from scheduling.lifecycle import InstanceEvent
from workers.engine_metrics import ServerRun

RUN_INTERVAL_S = 15.0
"""Time between two readings of a server's run over one connection. Frequent scrapes slow down a busy server."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When checks change an instance's state."""

    down_after: int
    up_after: int
    stall_suspect_s: float
    stall_down_s: float


class CheckResult(StrEnum):
    """Outcome of one check."""

    OK = "ok"
    FAILED = "failed"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """An instance with work that finishes none; times are the checker's own monotonic seconds."""

    progress: float | None
    """Tokens processed when its counters were first read, or last moved; None if not reported yet."""
    since_s: float
    """When that was."""
    unmoved_s: float | None = None
    """When they were last read and still the same; None before the second reading."""


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """What the checker remembers of one instance between two checks."""

    due_s: float
    successes: int = 0
    """In a row; at most one of the two is not 0."""
    failures: int = 0
    suspicion: Suspicion | None = None
    run: ServerRun | None = None
    """As last read; None before the first reading."""
    run_due_s: float = 0.0
    """When it is read again, even if the connection stays open."""
    forgotten: bool = False
    """It is down, and its KV metadata was forgotten when it went down."""
    models_due_s: float = 0.0
    """When the model names that it lists are read again."""
    model_complaint: str | None = None
    """What the last reading of these says is wrong."""

    def after(self, result: CheckResult, due_s: float) -> HealthRecord:
        """The record after one more check."""
        if result is CheckResult.OK:
            return replace(self, due_s=due_s, successes=self.successes + 1, failures=0)
        return replace(self, due_s=due_s, successes=0, failures=self.failures + 1)

    def after_reading(self, run: ServerRun | None, now_s: float) -> HealthRecord:
        """The record after the metrics were read; None: they could not be."""
        return replace(self, run=run or self.run, run_due_s=now_s + RUN_INTERVAL_S)

    def keeps_cache(self, result: CheckResult, *, refused: bool) -> bool:
        """Whether the KV metadata is kept when the instance goes down now: for its return, see ``is_same_run``."""
        return result is CheckResult.FAILED and not refused and self.run is not None

    def is_same_run(self, run: ServerRun | None) -> bool:
        """Whether the run just read is certainly the one read before."""
        return self.run is not None and run is not None and run.is_same_as(self.run)

    def shows_restart(self, run: ServerRun | None) -> bool:
        """Whether the run just read is not the one read before."""
        return self.run is not None and run is not None and run.is_restart_of(self.run)


def is_suspect(load: InstanceLoad | None, thresholds: Thresholds) -> bool:
    """Whether the instance has had requests and pending work for long without finishing a prefill."""
    return load is not None and load.running_requests > 0 and load.stalled_s >= thresholds.stall_suspect_s


def update_suspicion(former: Suspicion | None, progress: float | None, now_s: float) -> Suspicion:
    """The suspicion after one more reading of the counters; any movement starts its clock again, and a reading that
    failed changes nothing."""
    if former is None or (progress is not None and progress != former.progress):
        return Suspicion(progress, now_s)
    return former if progress is None else replace(former, unmoved_s=now_s)


def most_fail(records: Iterable[HealthRecord]) -> bool:
    """Whether the latest checks of most of the instances in service failed."""
    failed = [record.failures > 0 for record in records]
    return 2 * sum(failed) > len(failed)


def is_lost(instance_id: str, load: InstanceLoad | None, lost: Sequence[frozenset[str]], rule: Thresholds) -> bool:
    """Whether an instance whose checks fail, as those of most do, is gone; ``lost``: what each router has lost."""
    return not lost or any(instance_id in each for each in lost) or is_suspect(load, rule)


def evaluate(complaint: str | None, suspicion: Suspicion | None, thresholds: Thresholds) -> CheckResult:
    """The result of one check from the answer of ``/health`` and the counters."""
    if complaint is not None:
        return CheckResult.FAILED
    patience_s = thresholds.stall_down_s - thresholds.stall_suspect_s
    if suspicion is None or suspicion.unmoved_s is None or suspicion.unmoved_s - suspicion.since_s < patience_s:
        return CheckResult.OK
    return CheckResult.STALLED


def conclude(
    state: InstanceState, record: HealthRecord, result: CheckResult, thresholds: Thresholds
) -> InstanceEvent | None:
    """The event in the instance's life that the latest check, the last of a row, causes; None while it is too early.

    One good check is enough for an instance that starts. A stall has been observed for long enough by itself.
    """
    enough = 1 if state is InstanceState.STARTING else thresholds.up_after
    if record.successes >= enough:
        return InstanceEvent.HEALTHY
    if result is CheckResult.STALLED or record.failures >= thresholds.down_after:
        return InstanceEvent.UNHEALTHY
    return None
