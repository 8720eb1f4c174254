"""Retries as a share of traffic."""

from __future__ import annotations

from dualmap.scheduling.request.retry_budget import RetryBudget


def test_retries_are_bounded_by_the_share_of_requests() -> None:
    accepted = 0
    budget = RetryBudget(0.1, 0.0, 0.0, lambda: accepted)

    granted = 0
    for _ in range(100):
        accepted += 1
        granted += budget.withdraw(0.0)

    assert 9 <= granted <= 10


def test_a_quiet_replica_may_retry_a_few_times_a_second() -> None:
    budget = RetryBudget(share=0.0, per_s=2.0, now_s=0.0)

    at_once = sum(budget.withdraw(0.0) for _ in range(100))
    a_second_later = sum(budget.withdraw(1.0) for _ in range(100))

    assert at_once == 20  # ten quiet seconds' worth, no more
    assert a_second_later == 2


def test_asking_what_is_available_takes_nothing() -> None:
    budget = RetryBudget(share=0.0, per_s=1.0, now_s=0.0)
    assert budget.available(0.0) == budget.available(0.0) == 10.0
    assert budget.withdraw(0.0)
    assert budget.available(0.5) == 9.5


def test_no_budget_means_no_retry() -> None:
    accepted = 0
    budget = RetryBudget(0.0, 0.0, 0.0, lambda: accepted)
    accepted += 1
    assert not budget.withdraw(1e6)
