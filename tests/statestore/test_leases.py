"""When a lease has run out."""

from __future__ import annotations

import pytest

from dualmap.statestore.leases import lease_runs


@pytest.mark.parametrize(
    ("left_ms", "runs"),
    [(1000, True), (1, True), (0, False), (-1, False), (2000, True), (2001, False), (600_000, False)],
)
def test_a_lease_runs_for_its_length_and_not_until_a_clock_that_was_set_back_has_caught_up(
    left_ms: int, runs: bool
) -> None:
    assert lease_runs(50_000 + left_ms, 1000, 50_000) is runs
