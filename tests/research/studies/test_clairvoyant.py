"""The planner that knows the future pays for what runs, and for what it starts in advance."""

from __future__ import annotations

from dualmap.research.studies.clairvoyant import paid_hours
from dualmap.simulation.virtual_time.scenario import FleetChange


def test_hours_are_those_of_each_size_and_of_each_start() -> None:
    changes = (FleetChange(0.0, 2), FleetChange(3600.0, 4), FleetChange(7200.0, 1))
    assert paid_hours(changes, 3 * 3600.0, 0.0) == 2 + 4 + 1
    assert paid_hours(changes, 3 * 3600.0, 1800.0) == 2 + 4 + 1 + 2 * 0.5
