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
