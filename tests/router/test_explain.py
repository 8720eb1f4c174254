"""The bounded memory of decisions."""

from __future__ import annotations

from router.explain import KEPT_CANDIDATES, DecisionLog, Explanation, PlacementRound
from scheduling.decision import Decision, Reason
from scheduling.instance import InstanceLoad, InstanceState
from scheduling.placement import Placed, PlaceReply, PlaceStatus
from scheduling.weights import Form


def explanation(request_id: str) -> Explanation:
    return Explanation(request_id, "m", "default", "dualmap", 5.0, 10, 1, 1, 7, 0, 0, 0.0)


def test_the_oldest_is_forgotten_first() -> None:
    log = DecisionLog(limit=3)
    for number in range(5):
        log.add(explanation(str(number)))

    assert len(log) == 3
    assert log.get("1") is None
    assert [entry.request_id for entry in log.recent(2)] == ["4", "3"]


def test_a_limit_of_none_remembers_nothing() -> None:
    log = DecisionLog(limit=0)
    log.add(explanation("x"))
    assert log.get("x") is None


def test_an_id_that_ends_again_is_the_newest_and_tells_its_last_story() -> None:
    log, again = DecisionLog(limit=2), explanation("a")
    for entry in (explanation("a"), explanation("b"), again, explanation("c")):
        log.add(entry)

    assert log.get("a") is again
    assert log.get("b") is None


def test_a_round_over_the_whole_fleet_remembers_a_few_loads_with_the_chosen_one() -> None:
    names = tuple(f"i{number}" for number in range(100))
    loads = {name: InstanceLoad(name, InstanceState.READY) for name in names}
    decision = Decision("i77", 0, 1, 0.1, Reason.COST, alternative_id="i50")

    reply = PlaceReply(PlaceStatus.HELD, 0, 0, 0, loads, "i77", "i50")

    kept = PlacementRound.of(Placed(reply, names, (decision, Form())), attempt=1)

    assert kept.considered == 100
    assert kept.status is PlaceStatus.HELD
    assert len(kept.candidates) == len(kept.loads) == KEPT_CANDIDATES
    assert {"i77", "i50"} <= set(kept.loads)


def test_a_round_tells_of_the_instances_beyond_the_candidates_that_were_weighed() -> None:
    loads = {name: InstanceLoad(name, InstanceState.READY) for name in "abc"}
    reply = PlaceReply(PlaceStatus.DISPATCHED, 0, 0, 0, loads, "c", "a")

    decision = Decision("c", 0, 1, 0.1, Reason.BEYOND_PAIR, alternative_id="a")

    kept = PlacementRound.of(Placed(reply, ("a", "b"), (decision, Form())), attempt=1)

    assert kept.candidates == ("a", "b", "c")
