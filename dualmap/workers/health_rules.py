"""Conclusions from health checks: pure rules over the observations of one instance.

An answered ``/health`` proves that the HTTP server of an engine lives, not that the engine does: a stopped, paused or
sleeping one keeps answering while requests hang. So an instance on which requests run, and none was seen to finish its
prefill for long, becomes a *suspect*. First tokens are seen, and the whole answers of requests that show none; a first
token that routers presume proves nothing. The token counters of a suspect are read, and it is taken down only if they
do not move: an engine that decodes for long, its KV memory full, makes progress there. Counters that cannot be read
show nothing: a busy engine answers slowly, and one without counters is left to the time limits of its requests.

A suspect whose metrics say that it has no request is sent a request for one token. Where it answers, the requests that
it seems to have are the store's mistake. Where it does not, it hung while it was idle: the gauges of an engine that
stands still stay as they were.

Failed checks alone do not show that a KV cache is gone: on a machine that is short of CPU an answer comes too late, and
the engine runs on. An instance's KV metadata is forgotten when it goes down if its process takes no connections, if it
makes no progress (it may sleep, which empties its cache), or if its metrics were never read. Otherwise the start time
decides when the instance returns: the metadata is kept if the process is the same, and forgotten if it is not known.

An engine that is restarted between two checks answers both, with an empty KV cache. Only a connection that has to be
opened again can hide a restart from the checker. Then, and at intervals in case a proxy keeps its connection open, it
reads from the metrics which run of the process answers.

Checks are made from one place. Where those of most instances fail at once, more likely the checker is cut off than all
of them are gone: then an instance stays in service unless it is lost to a router too, or has made no progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum

from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.instance_lifecycle import SERVING, InstanceEvent
from dualmap.workers.engine_metrics import ServerRun

RUN_INTERVAL_S = 15.0
"""Time between two readings of a server's run over one connection. Frequent scrapes slow down a busy server."""

MOVED_INTERVAL_S = 3.0
"""Time to the next reading of a suspect's counters once they moved."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When checks change an instance's state."""

    down_after: int
    up_after: int
    stall_suspect_s: float
    stall_down_s: float
    unmoved_s: float
    """Counters of a suspect that stand still for less show nothing."""


class CheckResult(StrEnum):
    """Outcome of one check."""

    OK = "ok"
    FAILED = "failed"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long requests have waited for an instance since it was seen to finish a prefill.

    The time while none runs does not count, and takes back as much: so clients that give up and come again do not hide
    an engine that hangs, and one that was cancelled an hour ago accuses no instance.
    """

    waited_s: float
    last_prefill_ms: int
    at_s: float
    """When that was, of the checker's own monotonic clock."""
    alive_s: float = -math.inf
    """When it last completed a token for the checker, of the same clock."""

    def after(self, load: InstanceLoad, now_s: float) -> Waiting:
        """The waiting after one more look at the load."""
        silent_s, passed_s = min(load.silent_s, now_s - self.alive_s), now_s - self.at_s
        if self.last_prefill_ms != load.last_prefill_ms:
            waited_s = 0.0
        elif load.running_requests > 0:
            waited_s = self.waited_s + passed_s
        else:
            waited_s = max(0.0, self.waited_s - passed_s)
        return Waiting(max(waited_s, silent_s), load.last_prefill_ms, now_s, self.alive_s)

    def ended(self) -> Waiting:
        """The instance completed a token just now."""
        return replace(self, waited_s=0.0, alive_s=self.at_s)


def update_waiting(former: Waiting | None, load: InstanceLoad | None, now_s: float) -> Waiting | None:
    """The waiting after one more look at the load; None where the instance has no load, or does not serve."""
    if load is None or load.state not in SERVING:
        return None
    return (former or Waiting(load.silent_s, load.last_prefill_ms, now_s)).after(load, now_s)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """An instance with work that finishes none; times are the checker's own monotonic seconds."""

    progress: float | None
    """Tokens processed when its counters were first read, or last moved; None if not reported yet."""
    since_s: float
    """When that was."""
    unmoved_s: float | None = None
    """When they were last read and still the same; None before the second reading."""

    def is_read_again(self, now_s: float) -> bool:
        """Whether the counters are due: at every check while they stand still, else after a while."""
        return self.unmoved_s is not None or now_s - self.since_s >= MOVED_INTERVAL_S


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """The checker's memory of one instance between two checks."""

    due_s: float
    _: KW_ONLY
    successes: int = 0
    """Successes in a row. One of ``successes`` and ``failures`` is always 0."""
    failures: int = 0
    waiting: Waiting | None = None
    suspicion: Suspicion | None = None
    run: ServerRun | None = None
    """The server's run as last read; None before the first reading."""
    run_due_s: float = 0.0
    """When it is read again, even if the connection stays open."""
    forgotten: bool = False
    """The instance is down, and its KV metadata was forgotten when it went down."""
    sleep_due_s: float = 0.0
    """When it is queried again whether its engine is paused or asleep."""
    models_due_s: float = 0.0
    """When the model names that it lists are read again."""
    model_complaint: str | None = None
    """The complaint that the last reading of its models gave."""

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


def is_suspect(waiting: Waiting | None, load: InstanceLoad | None, thresholds: Thresholds) -> bool:
    """Whether requests run on the instance, and have waited for long."""
    runs = load is not None and load.running_requests > 0
    return runs and waiting is not None and waiting.waited_s >= thresholds.stall_suspect_s


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


def is_lost(
    instance_id: str,
    waiting: Waiting | None,
    load: InstanceLoad | None,
    lost: Sequence[frozenset[str]],
    rule: Thresholds,
) -> bool:
    """Whether an instance whose checks fail, as those of most do, is gone; ``lost``: what each router has lost."""
    return not lost or any(instance_id in each for each in lost) or is_suspect(waiting, load, rule)


def evaluate(
    complaint: str | None, waiting: Waiting | None, suspicion: Suspicion | None, thresholds: Thresholds
) -> CheckResult:
    """The result of one check from the answer of ``/health``, the time that requests waited, and the counters."""
    if complaint is not None:
        return CheckResult.FAILED
    if waiting is None or suspicion is None or suspicion.unmoved_s is None:
        return CheckResult.OK
    stands_still = suspicion.unmoved_s - suspicion.since_s >= thresholds.unmoved_s
    return CheckResult.STALLED if stands_still and waiting.waited_s >= thresholds.stall_down_s else CheckResult.OK


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
