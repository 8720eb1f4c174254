"""A tenant at its limit is counted by limit, and named in the log now and then."""

from __future__ import annotations

import logging

import pytest

from dualmap.router.tenants.limit_hits import LOG_EVERY_S, MOST, LimitHits
from dualmap.scheduling.tenants.budgets import Budget, Draw, Drawn, Draws, Limit, Measure, Period

OWN = Draw(Budget("acme/requests/minute", Limit(Measure.REQUESTS, Period.MINUTE, 60)), 1)
OF_KEY = Draw(Budget("acme/key:ci/tokens/day", Limit(Measure.TOKENS, Period.DAY, 1000, "key:ci")), 70)
DRAWS = Draws.of(OWN, OF_KEY)


def test_a_tenant_that_stays_at_a_limit_has_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    hits = LimitHits()
    places = [draw.budget.name for draw in DRAWS.each]
    own, of_key = (Drawn((0, 0), places.index(draw.budget.name)) for draw in (OWN, OF_KEY))

    with caplog.at_level(logging.WARNING):
        for second in range(90):
            hits.hit("acme", DRAWS, own, float(second))
        hits.hit("acme", DRAWS, of_key, 90.0)

    assert hits.counts == {"acme/requests_per_minute": 90, "acme/tokens_per_day/key:ci": 1}
    first, second_line, other = (record.getMessage() for record in caplog.records)
    assert first == "tenant acme is at its limit requests_per_minute of 60: 1 requests refused since this was last said"
    assert second_line.endswith(f": {LOG_EVERY_S:.0f} requests refused since this was last said")
    assert "tokens_per_day of 1000 for key:ci" in other


def test_what_is_counted_is_bounded() -> None:
    hits = LimitHits()
    for number in range(MOST + 10):
        hits.hit(f"tenant-{number}", Draws.of(OWN), Drawn((0,), 0), 0.0)

    assert len(hits.counts) == MOST
    assert f"tenant-{MOST + 9}/requests_per_minute" in hits.counts
