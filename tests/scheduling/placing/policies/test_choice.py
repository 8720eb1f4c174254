from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from dualmap.scheduling.placing.policies.choice import in_flight, ranked
from dualmap.scheduling.state.instance import InstanceLoad

Load = Callable[..., InstanceLoad]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.integers(0, 1000))
def test_the_best_and_the_next_best_are_two_instances_in_order_of_cost(load: Load, costs: list[int], turn: int) -> None:
    loads = [load(str(index)) for index in range(len(costs))]

    best, second = ranked(loads, [(cost,) for cost in costs], turn)

    assert second is not None
    assert best is not second
    assert [costs[int(best.instance_id)], costs[int(second.instance_id)]] == sorted(costs)[:2]


def test_equals_take_turns(load: Load) -> None:
    loads = [load("a"), load("b"), load("c")]

    picked = [ranked(loads, [(1.0,), (0.0,), (0.0,)], turn)[0].instance_id for turn in range(4)]

    assert picked == ["b", "c", "b", "c"]


def test_a_single_instance_has_no_alternative(load: Load) -> None:
    assert ranked([load("a")], [(1.0,)], 5)[1] is None


def test_requests_in_flight_are_those_held_and_those_running(load: Load) -> None:
    assert in_flight(load("a", queued_requests=2, running_requests=3)) == 5
