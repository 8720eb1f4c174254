"""What checks conclude, rule by rule."""

from __future__ import annotations

import pytest

from scheduling.instance import InstanceLoad, InstanceState
from scheduling.lifecycle import InstanceEvent
from workers.health_rules import (
    CheckResult,
    HealthRecord,
    Thresholds,
    conclude,
    evaluate,
    is_suspect,
    most_fail,
    update_suspicion,
)

LIMITS = Thresholds(down_after=3, up_after=2, stall_suspect_s=15.0, stall_down_s=30.0)


def row(*results: CheckResult) -> HealthRecord:
    record = HealthRecord(0.0)
    for result in results:
        record = record.after(result, 0.0)
    return record


GOOD, BAD, STALL = CheckResult.OK, CheckResult.FAILED, CheckResult.STALLED


@pytest.mark.parametrize(
    ("state", "results", "event"),
    [
        (InstanceState.STARTING, [GOOD], InstanceEvent.HEALTHY),
        (InstanceState.STARTING, [BAD, BAD, GOOD], InstanceEvent.HEALTHY),
        (InstanceState.READY, [BAD, BAD], None),
        (InstanceState.READY, [BAD, BAD, GOOD, BAD, BAD], None),
        (InstanceState.READY, [BAD, BAD, BAD], InstanceEvent.UNHEALTHY),
        (InstanceState.READY, [GOOD, STALL], InstanceEvent.UNHEALTHY),
        (InstanceState.DOWN, [GOOD], None),
        (InstanceState.DOWN, [GOOD, BAD, GOOD], None),
        (InstanceState.DOWN, [GOOD, GOOD], InstanceEvent.HEALTHY),
    ],
)
def test_a_row_of_checks_changes_the_state_at_its_threshold(
    state: InstanceState, results: list[CheckResult], event: InstanceEvent | None
) -> None:
    assert conclude(state, row(*results), results[-1], LIMITS) is event


@pytest.mark.parametrize(("running", "stalled_s", "expected"), [(1, 15.0, True), (1, 14.9, False), (0, 100.0, False)])
def test_only_an_instance_that_works_and_finishes_nothing_is_suspect(
    running: int, stalled_s: float, expected: bool
) -> None:
    load = InstanceLoad("a", InstanceState.READY, pending_tokens=9, running_requests=running, stalled_s=stalled_s)

    assert is_suspect(load, LIMITS) is expected


def test_an_instance_whose_load_is_unknown_is_not_suspect() -> None:
    assert not is_suspect(None, LIMITS)


def test_counters_that_move_keep_a_suspect_alive_for_ever() -> None:
    suspicion = None
    for second in range(1000):
        suspicion = update_suspicion(suspicion, float(second // 10), float(second))
        assert evaluate(None, suspicion, LIMITS) is CheckResult.OK


def results_on(readings: list[float | None], thresholds: Thresholds = LIMITS) -> list[CheckResult]:
    """One reading of the counters a second; None is one that failed."""
    suspicion, results = None, []
    for second, progress in enumerate(readings):
        suspicion = update_suspicion(suspicion, progress, float(second))
        results.append(evaluate(None, suspicion, thresholds))
    return results


def test_counters_that_stand_still_condemn_a_suspect_after_the_patience() -> None:
    assert results_on([5000.0] * 20) == [CheckResult.OK] * 15 + [CheckResult.STALLED] * 5


def test_counters_that_cannot_be_read_condemn_nobody() -> None:
    assert results_on([None] * 100) == [CheckResult.OK] * 100
    assert results_on([5000.0, *[None] * 99]) == [CheckResult.OK] * 100


def test_the_same_counters_before_and_after_readings_that_failed_condemn_a_suspect() -> None:
    assert results_on([None, 5000.0, *[None] * 20, 5000.0])[-1] is CheckResult.STALLED
    assert results_on([None, 5000.0, *[None] * 20, 5001.0])[-1] is CheckResult.OK


def test_one_reading_alone_condemns_nobody_however_short_the_patience() -> None:
    hasty = Thresholds(down_after=3, up_after=2, stall_suspect_s=15.0, stall_down_s=15.0)

    assert results_on([None, 7.0, 7.0], hasty) == [CheckResult.OK, CheckResult.OK, CheckResult.STALLED]


def test_a_failed_check_is_a_failed_check_whatever_the_counters_say() -> None:
    assert evaluate("status 500", None, LIMITS) is CheckResult.FAILED


def test_most_instances_fail_where_more_than_half_do() -> None:
    good, bad = HealthRecord(0.0, successes=1), HealthRecord(0.0, failures=1)
    assert [most_fail(records) for records in ([], [good, bad], [good, bad, bad], [bad])] == [False, False, True, True]
