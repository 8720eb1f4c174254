from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dualmap.scheduling.queues.evacuation import plan_evacuation
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest

Load = Callable[..., InstanceLoad]


def held(name: str, other: str | None, *, there: int = 100, prompt: int = 1000) -> StoredRequest:
    figures = {"alternative_id": other, "alternative_uncached_tokens": there}
    return StoredRequest(
        name,
        "replica",
        "lost",
        RequestState.HELD,
        1,
        uncached_tokens=500,
        prompt_tokens=prompt,
        expected_output_tokens=256,
        slo_ms=5000,
        **figures,
    )


def targets(*loads: InstanceLoad, requests: list[StoredRequest], **roles: Role) -> list[tuple[str, str]]:
    """Who goes where; ``roles`` are those of the instances of that name."""
    by_id = {each.instance_id: each for each in loads}
    instances = {
        name: InstanceSpec(name, f"http://{name}", state=load.state, role=roles.get(name, Role.MIXED))
        for name, load in by_id.items()
    }
    moves = plan_evacuation(requests, "lost", by_id, instances)
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


def test_each_leg_goes_to_an_instance_that_serves_it_and_to_members_alone(load: Load) -> None:
    decoder, prefill = load("decoder"), load("prefill", pending_tokens=9000)
    requests = [
        replace(held("r1", "decoder"), leg=Leg.PREFILL),
        replace(held("r2", None), leg=Leg.PREFILL),
        held("whole", "prefill"),
    ]

    moved = targets(decoder, prefill, requests=requests, decoder=Role.DECODE, prefill=Role.PREFILL)

    assert moved == [("r1", "prefill"), ("r2", "prefill"), ("whole", "decoder")]
    assert plan_evacuation(requests, "lost", {"stray": load("stray")}, {}) == ()


def test_a_request_whose_other_candidate_has_a_full_queue_goes_to_the_least_loaded_with_room(load: Load) -> None:
    moved = targets(
        load("full", queued_requests=9, max_queued_requests=10),
        load("full-too", queued_requests=10, max_queued_requests=10),
        load("open", pending_tokens=9000),
        requests=[held("r1", "full"), held("r2", "full"), held("r3", "full-too")],
    )

    assert moved == [("r1", "full"), ("r2", "open"), ("r3", "open")]


def test_a_request_that_finds_no_place_stays_for_another_round_and_keeps_no_other(load: Load) -> None:
    full = load("full", queued_requests=1, max_queued_requests=1)
    small = load("small", pending_tokens=10, max_queued_requests=2)

    moved = targets(full, small, requests=[held("r1", None), held("r2", None), held("r3", None)])

    assert moved == [("r1", "small"), ("r2", "small")]


def test_an_instance_in_a_decode_bottleneck_is_not_the_least_loaded(load: Load) -> None:
    stalled = load("stalled", pending_tokens=10, stalled_s=4.0)

    assert targets(stalled, load("busy", pending_tokens=3000), requests=[held("r1", None)]) == [("r1", "busy")]


def test_a_request_for_a_name_that_some_serve_goes_to_one_of_those(load: Load) -> None:
    loads = {name: load(name) for name in ("base", "tuned", "unknown")}
    lists = {"base": {"qwen": ""}, "tuned": {"qwen": "", "sql": "qwen"}, "unknown": None}
    instances = {
        name: InstanceSpec(name, f"http://{name}", state=InstanceState.READY, models=models)
        for name, models in lists.items()
    }
    requests = [replace(held(f"r{number}", "base"), model="sql") for number in range(4)]

    moved = {move.target_id for move in plan_evacuation(requests, "lost", loads, instances)}

    assert moved == {"tuned", "unknown"}
