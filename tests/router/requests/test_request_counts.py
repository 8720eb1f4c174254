"""Where the time of turns is counted."""

from __future__ import annotations

from dualmap.router.requests.request_counts import count_turn
from dualmap.router.telemetry.metrics import TURN_PARTS, RouterMetrics
from dualmap.scheduling.request.machine import Ended, FirstToken, Refusal, Sent, TurnedAway, TurnGoes
from dualmap.scheduling.request.outcome import Outcome, Usage
from tests.scheduling.request.lives import Life


def counted(life: Life) -> list[float]:
    """The seconds of each part that are counted of a turn of class *batch*."""
    metrics = RouterMetrics(["default"])
    count_turn(life.machine, metrics.pools["default"].turns_of("batch"))
    return [metrics.turn_s.labels("default", "batch", part).value for part in TURN_PARTS]


def test_the_time_of_a_turn_is_counted_by_where_it_went() -> None:
    life = Life(admit_runs=True)
    life.park()
    life.on(TurnGoes(), after_s=50.0)
    life.reserve()
    life.on(Sent())
    life.on(FirstToken(), after_s=2.0)
    life.on(Ended(Outcome.COMPLETED, Usage(output_tokens=9)), after_s=3.0)

    assert counted(life) == [50.0, 2.0, 3.0]


def test_a_turn_that_never_went_has_waited_to_its_end() -> None:
    life = Life(admit_runs=True)
    life.park()
    life.on(TurnedAway(Refusal.HELD_TOO_LONG), after_s=60.0)

    assert counted(life) == [60.0, 0.0, 0.0]
