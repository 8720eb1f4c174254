"""The bytes of bodies that a replica holds."""

from __future__ import annotations

import pytest

from dualmap.router.errors import ReplicaFullError
from dualmap.router.http.body_budget import BodyBudget


def test_what_does_not_fit_is_refused_uncounted_and_fits_when_enough_was_given_back() -> None:
    budget = BodyBudget(100)
    budget.take(60)
    with pytest.raises(ReplicaFullError, match=r"100 bytes.*router\.max_buffered_body_bytes") as refused:
        budget.take(41)
    assert refused.value.retry_after_s == 1.0
    budget.take(40)
    assert budget.held_bytes == 100
    budget.give_back(60)
    budget.take(60)
    assert budget.held_bytes == 100


def test_a_tenant_leaves_as_much_free_as_it_holds_so_that_others_get_in() -> None:
    budget = BodyBudget(1000, own_bytes=10)
    budget.take(500, "heavy")
    with pytest.raises(ReplicaFullError, match="your tenant's requests on this replica have reached 500 bytes"):
        budget.take(1, "heavy")
    budget.take(250, "light")
    budget.take(245)
    with pytest.raises(ReplicaFullError, match="1000 bytes in all"):
        budget.take(6, "third")
    budget.take(5, "third")
    budget.give_back(500, "heavy")
    budget.take(250, "heavy")
    for tenant, count in (("heavy", 250), ("light", 250), (None, 245), ("third", 5)):
        budget.give_back(count, tenant)
    assert budget.held_bytes == 0


def test_one_body_of_a_tenant_fits_however_small_the_budget_is() -> None:
    budget = BodyBudget(100, own_bytes=100)
    budget.take(100, "one")
    with pytest.raises(ReplicaFullError):
        budget.take(1, "one")
