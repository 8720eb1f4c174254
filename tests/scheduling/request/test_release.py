"""Releases."""

from dataclasses import fields, replace

from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.turn import TurnEnd
from dualmap.scheduling.tenants.budgets import Budget, Draw, Draws, Limit, Measure, Period


def test_a_release_that_ends_a_turn_has_all_else_that_it_had() -> None:
    draws = Draws.of(Draw(Budget("acme/requests/day", Limit(Measure.REQUESTS, Period.DAY, 8)), 1))
    release = Release("x", "a", "r", 2, note="{}", seen=True, returned=draws, used="1 2 3")
    over = TurnEnd("x", "r", 9)
    assert all(getattr(release, each.name) != getattr(Release(""), each.name) for each in fields(Release)[:-1])

    assert release.ending(over) == replace(release, turn=over)
