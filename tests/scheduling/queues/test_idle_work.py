"""Which held requests leave a queue for an idle instance, and which do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.queues.idle_work import IdleWork, is_idle, late_requests
from dualmap.scheduling.queues.rebalance import HotQueue
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.tenants.classes import class_band

Load = Callable[..., InstanceLoad]
NOW_MS = 100_000
"""Instances prefill 1,000 tokens a second here, so that a token takes a millisecond."""


def held(name: str, tokens: int, **fields: Any) -> StoredRequest:
    """Arrived now, with an SLO of 5 s and no hit anywhere."""
    made = {"slo_ms": 5000, "enqueued_ms": NOW_MS, **fields}
    return StoredRequest(
        name,
        "replica",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=tokens,
        prompt_tokens=made.pop("prompt_tokens", tokens),
        expected_output_tokens=256,
        **made,
    )


def queue(load: Load, *requests: StoredRequest, dispatched_tokens: int = 3000, **figures: Any) -> HotQueue:
    pending = dispatched_tokens + sum(request.uncached_tokens for request in requests)
    deferred = sum(request.uncached_tokens for request in requests if request.deferred)
    told = {"pending_tokens": pending, "deferred_tokens": deferred, "queued_requests": len(requests), **figures}
    busy = load("a", dispatched_tokens=dispatched_tokens, dispatch_window_tokens=1000, **told)
    return HotQueue(NOW_MS, busy, requests, {})


def moves(idle: IdleWork, *of: HotQueue) -> list[tuple[str, str]]:
    return [(move.request_id, move.target_id) for move in idle.plan(of)]


@pytest.mark.parametrize(
    ("figures", "idle"),
    [
        ({}, True),
        ({"pending_tokens": 500, "deferred_tokens": 500}, True),
        ({"pending_tokens": 500, "dispatched_tokens": 500}, False),
        ({"pending_tokens": 500}, False),
        ({"running_requests": 256}, False),
        ({"context_tokens": 1_000_000}, False),
        ({"state": InstanceState.DRAINING}, False),
    ],
)
def test_an_instance_is_idle_if_it_could_serve_a_request_at_once(
    load: Load, figures: dict[str, Any], idle: bool
) -> None:
    assert is_idle(load("b", **figures)) is idle


def test_a_retry_stays_as_an_instance_that_failed_it_may_look_idle(load: Load) -> None:
    late = held("late", 100, deferred=True)
    idle = {"b": load("b")}

    assert moves(IdleWork(idle, 3.0), queue(load, late)) == [("late", "b")]
    assert moves(IdleWork(idle, 3.0), queue(load, replace(late, attempt=2))) == []


def test_what_a_queue_defers_or_passes_over_is_late(load: Load) -> None:
    of = queue(load, held("long", 2500), held("short", 500), held("late", 100, deferred=True))

    assert [request.request_id for request in late_requests(of)] == ["long", "late"]


def test_behind_an_engine_that_finishes_no_prefill_all_that_it_delays_is_late(load: Load) -> None:
    of = queue(load, held("short", 500), stalled_s=3.0)

    assert [request.request_id for request in late_requests(of)] == ["short"]
    assert late_requests(queue(load, held("short", 500), stalled_s=2.9)) == ()


def test_what_its_queue_makes_late_goes_to_an_idle_instance_that_serves_it_in_time(load: Load) -> None:
    of = queue(load, held("long", 2500), held("short", 500))

    assert moves(IdleWork({"a": of.load, "b": load("b")}), of) == [("long", "b")]


def test_a_pinned_request_waits_where_what_it_continues_is_stored(load: Load) -> None:
    of = queue(load, held("pinned", 2500, pinned=True), held("deferred", 100, deferred=True, pinned=True))

    assert [request.request_id for request in late_requests(of)] == ["pinned", "deferred"]
    assert moves(IdleWork({"a": of.load, "b": load("b")}), of) == []


@pytest.mark.parametrize(("tokens", "goes"), [(4900, True), (5001, False)])
def test_what_would_be_late_there_as_well_stays(load: Load, tokens: int, goes: bool) -> None:
    of = queue(load, held("long", tokens))

    assert bool(moves(IdleWork({"b": load("b", context_tokens=60_000)}), of)) is goes


@pytest.mark.parametrize(
    ("figures", "goes"),
    [
        ({}, True),
        ({"context_tokens": 50_000}, True),
        ({"context_tokens": 50_001}, False),  # a moment without prefill belongs to requests on time
        ({"pending_tokens": 1, "deferred_tokens": 1}, False),  # it has late ones of its own
        ({"prefill_tokens_per_s": 10.0}, False),  # it would take longer than the wait here
    ],
)
def test_what_is_late_wherever_it_goes_moves_to_an_instance_with_hardly_any_work(
    load: Load, figures: dict[str, Any], goes: bool
) -> None:
    of = queue(load, held("overdue", 900, deferred=True, enqueued_ms=NOW_MS - 60_000))

    assert bool(moves(IdleWork({"b": load("b", **figures)}), of)) is goes


def test_the_lowest_band_goes_to_the_idle_first_however_long_it_is(load: Load) -> None:
    overdue = {"deferred": True, "enqueued_ms": NOW_MS - 60_000}
    of = queue(load, held("within", 900, **overdue), held("over", 100, band=2, **overdue))

    assert moves(IdleWork({"b": load("b", dispatch_window_tokens=900)}), of) == [("within", "b")]


def test_the_lowest_band_goes_to_the_idle_first_whichever_queue_holds_it(load: Load) -> None:
    overdue = {"deferred": True, "enqueued_ms": NOW_MS - 60_000}
    longer = queue(load, held("over", 100, band=2, **overdue))
    other = queue(load, held("within", 900, **overdue))

    for queues in ((longer, other), (other, longer)):
        assert moves(IdleWork({"b": load("b", dispatch_window_tokens=900)}), *queues) == [("within", "b")]


def test_what_can_be_on_time_goes_to_the_idle_before_what_cannot(load: Load) -> None:
    overdue = held("overdue", 100, deferred=True, enqueued_ms=NOW_MS - 60_000)
    of = queue(load, held("late", 900, deferred=True), overdue)

    assert moves(IdleWork({"b": load("b", dispatch_window_tokens=900)}), of) == [("late", "b")]
    assert moves(IdleWork({"b": load("b", dispatch_window_tokens=901)}), of) == [("late", "b"), ("overdue", "b")]


@pytest.mark.parametrize(("cached_tokens", "goes"), [(1200, True), (1300, False)])
def test_a_request_that_would_lose_more_than_it_has_to_prefill_stays(
    load: Load, cached_tokens: int, goes: bool
) -> None:
    of = queue(load, held("r", 1250, deferred=True, prompt_tokens=1250 + cached_tokens))

    assert bool(moves(IdleWork({"b": load("b")}), of)) is goes


def test_its_next_best_instance_counts_with_what_it_holds(load: Load) -> None:
    request = held("r", 1000, deferred=True, prompt_tokens=4000, alternative_id="c", alternative_uncached_tokens=900)
    of = queue(load, request)

    assert moves(IdleWork({"b": load("b"), "c": load("c")}), of) == [("r", "c")]


def test_an_idle_instance_takes_no_more_than_its_window_has_room_for(load: Load) -> None:
    of = queue(load, *(held(f"r{number}", 600, deferred=True) for number in range(5)))
    idle = IdleWork({"b": load("b", dispatch_window_tokens=1000), "c": load("c", dispatch_window_tokens=1000)})

    assert moves(idle, of) == [("r0", "b"), ("r1", "c"), ("r2", "b"), ("r3", "c")]
    assert not idle


def test_a_queue_that_makes_nothing_late_keeps_all(load: Load) -> None:
    assert moves(IdleWork({"b": load("b")}), queue(load, held("one", 500), held("two", 500))) == []


def test_an_instance_takes_nothing_from_itself(load: Load) -> None:
    idle = queue(load, held("r", 100, deferred=True), dispatched_tokens=0)

    assert moves(IdleWork({"a": idle.load}), replace(idle, load=idle.load)) == []


def test_an_idle_prefill_instance_takes_no_whole_request(load: Load) -> None:
    instances = {
        "b": InstanceSpec("b", "http://b", Role.PREFILL, InstanceState.READY),
        "d": InstanceSpec("d", "http://d", Role.DECODE, InstanceState.READY),
    }
    loads = {"b": load("b"), "d": load("d")}
    of = queue(load, held("whole", 900, deferred=True), held("prefill", 800, deferred=True, leg=Leg.PREFILL))

    moved = IdleWork(loads, instances=instances).plan([of])

    assert {(move.request_id, move.target_id) for move in moved} == {("whole", "d"), ("prefill", "b")}


def test_an_idle_instance_takes_no_request_for_a_name_that_it_does_not_list(load: Load) -> None:
    def idle(models: dict[str, str]) -> IdleWork:
        lists = {"a": {"qwen": "", "sql": "qwen"}, "b": models}
        instances = {
            name: InstanceSpec(name, name, state=InstanceState.READY, models=each) for name, each in lists.items()
        }
        return IdleWork({"b": load("b")}, instances=instances)

    of = queue(load, held("late", 100, deferred=True, model="sql"))

    assert moves(idle({"qwen": ""}), of) == []
    assert moves(idle({"qwen": "", "sql": "qwen"}), of) == [("late", "b")]


def test_a_late_request_moves_before_one_of_a_lower_class_that_could_be_on_time(load: Load) -> None:
    """There is room for one of them: the higher class takes it, late as it is."""
    late = held("late", 900, enqueued_ms=NOW_MS - 9000, deferred=True)
    lower = held("lower", 900, band=class_band(1), enqueued_ms=NOW_MS - 4000)
    idle = {"b": load("b", dispatch_window_tokens=900)}

    assert moves(IdleWork(idle, 3.0), queue(load, lower, late)) == [("late", "b")]
    assert moves(IdleWork(idle, 3.0), queue(load, lower)) == [("lower", "b")]


def test_behind_late_requests_of_a_higher_class_a_lower_one_is_late(load: Load) -> None:
    lower = held("lower", 500, band=class_band(1))

    assert late_requests(queue(load, lower)) == ()
    above = held("above", 2000, deferred=True)
    assert [each.request_id for each in late_requests(queue(load, lower, above))] == ["lower", "above"]
