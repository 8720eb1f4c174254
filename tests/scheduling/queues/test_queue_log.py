"""The log of a queue: what went past a held request, and why it was deferred."""

from __future__ import annotations

from dualmap.scheduling.queues.queue_log import (
    QUEUE_LOG,
    Deferral,
    QueueStep,
    StepKind,
    WaitEnd,
    WentAhead,
    wait_in_queue,
)
from dualmap.scheduling.tenants.classes import class_band

HELD_MS = 1000
"""The time at which the request came; its SLO is 5 s."""


def wait(*steps: QueueStep, since_ms: int = HELD_MS, until_ms: int | None = None):  # type: ignore[no-untyped-def]
    return wait_in_queue("a", "slow", 5000, HELD_MS, since_ms, steps, until_ms)


def granted(name: str, at_ms: int, enqueued_ms: int, band: int = 0, tenant: str = "") -> QueueStep:
    return QueueStep(StepKind.GRANTED, name, at_ms, enqueued_ms, band, tenant)


def passed(name: str, at_ms: int, band: int = 0, tenant: str = "") -> QueueStep:
    return QueueStep(StepKind.PASSED, name, at_ms, at_ms, band, tenant)


def test_requests_that_went_ahead_are_counted_by_class_and_tenant_until_its_own_grant() -> None:
    found = wait(
        granted("before it came", 900, 800),
        granted("came earlier", 1100, 800, tenant="acme"),
        granted("came later", 1200, 1100, tenant="acme"),
        passed("placed", 1300, tenant="acme"),
        granted("lower", 1400, 700, class_band(1) + 3, "other"),
        granted("slow", 6000, HELD_MS, class_band(1)),
        granted("behind it", 6100, 5000),
    )

    assert found.end is WaitEnd.GRANTED
    assert found.ahead == (WentAhead(0, "acme", 3, 2), WentAhead(1, "other", 1, 0))
    assert (found.went_ahead, found.overtaken_by, found.is_whole) == (4, 2, True)


def test_a_deferral_has_its_figures_and_is_no_end() -> None:
    deferral = QueueStep(StepKind.DEFERRED, "slow", 4000, tokens=3000, tokens_per_s=1000.0, other="router-1")
    other = QueueStep(StepKind.DEFERRED, "another", 4000, tokens=1, tokens_per_s=1.0)

    found = wait(deferral, other, granted("ahead", 4100, 4000))

    assert found.deferral == Deferral(3.0, "router-1", 3.0, 2.0)
    assert (found.end, found.went_ahead) == (WaitEnd.NOT_LOGGED, 1)


def test_a_wait_ends_where_the_request_moves_to_another_queue() -> None:
    moved = QueueStep(StepKind.MOVED, "slow", 3000, other="b")

    found = wait(granted("ahead", 2000, 2000), moved, granted("behind", 4000, 2000))

    assert (found.end, found.moved_to, found.ended_ms, found.went_ahead) == (WaitEnd.MOVED, "b", 3000, 1)


def test_nothing_counts_after_the_end_of_a_request_that_was_never_granted() -> None:
    steps = granted("ahead", 2000, 2000), granted("behind", 4000, 2000)

    assert wait(*steps, until_ms=3000).went_ahead == 1
    assert wait(*steps).went_ahead == 2


def test_a_log_that_was_cut_since_the_request_came_is_not_whole() -> None:
    cut = [granted(f"r{number}", HELD_MS + 1 + number, 1) for number in range(QUEUE_LOG)]

    assert not wait(*cut).is_whole
    assert wait(*cut[1:]).is_whole
    assert wait(granted("older", HELD_MS, 1), *cut).is_whole
