"""The conclusions of health checks, rule by rule."""

from __future__ import annotations

import pytest

from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.instance_lifecycle import InstanceEvent
from dualmap.workers.health_rules import (
    CheckResult,
    HealthRecord,
    Suspicion,
    Thresholds,
    Waiting,
    conclude,
    evaluate,
    is_suspect,
    most_fail,
    update_suspicion,
    update_waiting,
)

LIMITS = Thresholds(down_after=3, up_after=2, stall_suspect_s=15.0, stall_down_s=30.0, unmoved_s=12.0)
LONG = Waiting(100.0, 0, 0.0)


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


def seen(running: int = 1, silent_s: float = 0.0, last_prefill_ms: int = 5) -> InstanceLoad:
    figures = {"running_requests": running, "silent_s": silent_s, "last_prefill_ms": last_prefill_ms}
    return InstanceLoad("a", InstanceState.READY, **figures)


@pytest.mark.parametrize(("running", "waited_s", "expected"), [(1, 15.0, True), (1, 14.9, False), (0, 100.0, False)])
def test_only_an_instance_on_which_requests_wait_for_long_is_suspect(
    running: int, waited_s: float, expected: bool
) -> None:
    assert is_suspect(Waiting(waited_s, 5, 0.0), seen(running), LIMITS) is expected


def test_an_instance_whose_load_is_unknown_is_not_suspect() -> None:
    assert not is_suspect(update_waiting(LONG, None, 1.0), None, LIMITS)


def test_an_instance_that_does_not_serve_makes_nobody_wait() -> None:
    assert update_waiting(LONG, InstanceLoad("a", InstanceState.DOWN, running_requests=3, silent_s=50.0), 1.0) is None


def test_clients_that_give_up_and_come_again_do_not_hide_an_engine_that_hangs() -> None:
    waiting, seconds = None, 0
    while waiting is None or waiting.waited_s < 30.0:
        age_s = seconds % 11  # ten seconds each, and a second until the next one
        load = seen(int(age_s < 10), float(age_s) if age_s < 10 else 0.0)
        waiting, seconds = update_waiting(waiting, load, float(seconds)), seconds + 1

    assert seconds <= 40


def test_a_request_that_was_cancelled_long_ago_accuses_nobody() -> None:
    waiting = update_waiting(None, seen(1, 14.0), 0.0)

    waiting = update_waiting(waiting, seen(0), 30.0)
    waiting = update_waiting(waiting, seen(1, 0.5), 31.0)

    assert waiting is not None
    assert waiting.waited_s <= 1.0


def test_a_prefill_that_is_seen_to_finish_ends_the_waiting() -> None:
    waiting = update_waiting(Waiting(29.0, 5, 0.0), seen(1, 0.3, last_prefill_ms=6), 1.0)

    assert waiting == Waiting(0.3, 6, 1.0)


def test_counters_that_move_keep_a_suspect_alive_for_ever() -> None:
    suspicion = None
    for second in range(1000):
        suspicion = update_suspicion(suspicion, float(second // 10), float(second))
        assert evaluate(None, LONG, suspicion, LIMITS) is CheckResult.OK


def results_on(readings: list[float | None], thresholds: Thresholds = LIMITS) -> list[CheckResult]:
    """One reading of the counters a second; None is one that failed."""
    suspicion, results = None, []
    for second, progress in enumerate(readings):
        suspicion = update_suspicion(suspicion, progress, float(second))
        results.append(evaluate(None, LONG, suspicion, thresholds))
    return results


def test_counters_that_stand_still_condemn_a_suspect_after_the_patience() -> None:
    assert results_on([5000.0] * 20) == [CheckResult.OK] * 12 + [CheckResult.STALLED] * 8


def test_counters_that_stand_still_condemn_nobody_for_whom_requests_wait_for_less() -> None:
    still = Suspicion(5000.0, 0.0, 60.0)

    assert evaluate(None, Waiting(29.9, 5, 60.0), still, LIMITS) is CheckResult.OK
    assert evaluate(None, Waiting(30.0, 5, 60.0), still, LIMITS) is CheckResult.STALLED


def test_counters_of_a_suspect_are_read_at_every_check_while_they_stand_still() -> None:
    moved = update_suspicion(None, 1.0, 10.0)

    assert [moved.is_read_again(now_s) for now_s in (11.0, 13.0)] == [False, True]
    assert update_suspicion(moved, 1.0, 13.0).is_read_again(13.1)


def test_counters_that_cannot_be_read_condemn_nobody() -> None:
    assert results_on([None] * 100) == [CheckResult.OK] * 100
    assert results_on([5000.0, *[None] * 99]) == [CheckResult.OK] * 100


def test_the_same_counters_before_and_after_readings_that_failed_condemn_a_suspect() -> None:
    assert results_on([None, 5000.0, *[None] * 20, 5000.0])[-1] is CheckResult.STALLED
    assert results_on([None, 5000.0, *[None] * 20, 5001.0])[-1] is CheckResult.OK


def test_one_reading_alone_condemns_nobody_however_short_the_patience() -> None:
    hasty = Thresholds(down_after=3, up_after=2, stall_suspect_s=15.0, stall_down_s=15.0, unmoved_s=0.0)

    assert results_on([None, 7.0, 7.0], hasty) == [CheckResult.OK, CheckResult.OK, CheckResult.STALLED]


def test_a_failed_check_is_a_failed_check_whatever_the_counters_say() -> None:
    assert evaluate("status 500", LONG, None, LIMITS) is CheckResult.FAILED


def test_most_instances_fail_where_more_than_half_do() -> None:
    good, bad = HealthRecord(0.0, successes=1), HealthRecord(0.0, failures=1)
    assert [most_fail(records) for records in ([], [good, bad], [good, bad, bad], [bad])] == [False, False, True, True]
