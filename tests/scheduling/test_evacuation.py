from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduling.evacuation import plan_evacuation
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from scheduling.rebalance import HeldRequest

Load = Callable[..., InstanceLoad]


def held(name: str, other: str | None, *, there: int = 100, prompt: int = 1000) -> HeldRequest:
    return HeldRequest(name, 500, prompt, 5.0, 0.0, other, there)


def targets(
    *loads: InstanceLoad, requests: list[HeldRequest], by_deadline: bool = False, **changed: dict[str, Any]
) -> list[tuple[str, str]]:
    """Who goes where; ``changed`` are figures of the instances of that name."""
    by_id = {each.instance_id: each for each in loads}
    instances = {
        name: InstanceSpec(name, f"http://{name}", state=load.state, **changed.get(name, {}))
        for name, load in by_id.items()
    }
    moves = plan_evacuation(requests, "lost", by_id, instances, by_deadline=by_deadline)
    return [(move.request_id, move.target_id) for move in moves]


def test_held_requests_go_to_their_other_candidate_while_it_is_ready(load: Load) -> None:
    moved = targets(load("busy", pending_tokens=9000), load("idle"), requests=[held("r1", "busy")])

    assert moved == [("r1", "busy")]


def test_without_a_ready_other_candidate_they_go_to_the_least_loaded(load: Load) -> None:
    moved = targets(
        load("down", state=InstanceState.DOWN),
        load("busy", pending_tokens=9000),
        load("idle", pending_tokens=10),
        requests=[held("r1", "down"), held("r2", None), held("r3", "unknown")],
    )

    assert moved == [("r1", "idle"), ("r2", "idle"), ("r3", "idle")]


def test_a_long_queue_spreads_over_the_ready_instances(load: Load) -> None:
    requests = [held(f"r{i}", None) for i in range(6)]

    moved = targets(load("a"), load("b"), load("c"), requests=requests)

    assert sorted(target for _, target in moved) == ["a", "a", "b", "b", "c", "c"]


def test_tokens_moved_to_an_other_candidate_count_for_the_least_loaded(load: Load) -> None:
    moved = targets(load("a"), load("b", pending_tokens=50), requests=[held("r1", "a"), held("r2", None)])

    assert moved == [("r1", "a"), ("r2", "b")]


def test_nobody_is_sent_back_to_the_lost_instance_or_to_one_that_is_not_ready(load: Load) -> None:
    lost = load("lost")
    draining = load("draining", state=InstanceState.DRAINING)

    assert targets(lost, draining, requests=[held("r1", "lost"), held("r2", "draining")]) == []


def test_nobody_is_sent_to_a_decode_instance_or_to_one_that_is_no_member(load: Load) -> None:
    decoder, prefill = load("decoder"), load("prefill", pending_tokens=9000)
    requests = [held("r1", "decoder"), held("r2", None)]

    moved = targets(decoder, prefill, requests=requests, decoder={"role": Role.DECODE}, prefill={"role": Role.PREFILL})

    assert moved == [("r1", "prefill"), ("r2", "prefill")]
    assert plan_evacuation(requests, "lost", {"stray": load("stray")}, {}) == ()


def test_whoever_finds_the_queue_of_its_other_candidate_full_goes_to_the_least_loaded_with_room(load: Load) -> None:
    busy = {"dispatched_tokens": 5000, "pending_tokens": 5000}

    moved = targets(
        load("full", **busy, queued_requests=9),
        load("full-too", **busy, queued_requests=10),
        load("open", **busy | {"pending_tokens": 9000}),
        requests=[held("r1", "full"), held("r2", "full"), held("r3", "full-too")],
        **{"full": {"max_queued_requests": 10}, "full-too": {"max_queued_requests": 10}},
    )

    assert moved == [("r1", "full"), ("r2", "open"), ("r3", "open")]


def test_an_instance_that_dispatches_at_once_has_room_whatever_its_queue_takes(load: Load) -> None:
    requests = [held(f"r{i}", "a") for i in range(4)]
    figures = {"max_queued_requests": 1, "max_running_requests": 2}

    moved = targets(load("a"), requests=requests, a=figures)

    assert moved == [("r0", "a"), ("r1", "a"), ("r2", "a")], "two run, one is held, the last waits for another round"


def test_in_order_of_deadline_who_is_late_waits_for_no_engine_that_has_to_be_idle_first(load: Load) -> None:
    # given an instance that holds nobody and has room, but not for one that is late, and another that holds
    late, on_time = HeldRequest("late", 500, 1000, 5.0, 4.5), held("on-time", None)
    busy, other = load("busy", pending_tokens=100, dispatched_tokens=100), load("other", pending_tokens=300)
    figures: dict[str, Any] = {"busy": {"max_queued_requests": 0}, "requests": [late, on_time]}

    assert targets(busy, other, by_deadline=True, **figures) == [("late", "other"), ("on-time", "busy")]
    assert targets(busy, by_deadline=True, **figures) == [("on-time", "busy")], "nobody is kept by one who must stay"
    assert targets(busy, other, by_deadline=False, **figures) == [("late", "busy"), ("on-time", "other")]
    idle, full = load("busy"), load("busy", context_tokens=1_000_000, kv_capacity_tokens=1_000_000)
    assert targets(idle, other, by_deadline=True, **figures) == [("late", "busy"), ("on-time", "other")]
    assert targets(full, other, by_deadline=True, **figures) == [("late", "other"), ("on-time", "busy")]


def test_in_order_of_deadline_the_rest_of_a_step_makes_late(load: Load) -> None:
    # given an instance whose engine is under way, and which would hold nobody, and another that holds
    short = HeldRequest("short", 500, 100, 5.0, 4.7)
    figures: dict[str, Any] = {"busy": {"max_queued_requests": 0}, "requests": [short], "by_deadline": True}
    little, much = (load("busy", pending_tokens=tokens, dispatched_tokens=tokens) for tokens in (99, 2_000))
    other = load("other", pending_tokens=5_000)

    assert targets(little, other, **figures) == [("short", "busy")]
    assert targets(much, other, **figures) == [("short", "other")]
