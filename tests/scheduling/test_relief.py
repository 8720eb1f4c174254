"""Held requests move to newcomers: those that wait longest, no more than a newcomer computes soon, none for nothing."""

from __future__ import annotations

from dataclasses import replace

from scheduling.instance import InstanceLoad, InstanceState
from scheduling.rebalance import HotQueue
from scheduling.relief import plan_relief
from scheduling.request import Request, RequestState

RATE = 1000.0


def load(name: str, **figures: int) -> InstanceLoad:
    return InstanceLoad(name, InstanceState.READY, prefill_tokens_per_s=RATE, **figures)  # type: ignore[arg-type]


def held(name: str, tokens: int, prompt_tokens: int | None = None, slo_ms: int = 5000) -> Request:
    return Request(name, "r", "hot", RequestState.HELD, 1, tokens, prompt_tokens or tokens, 256, slo_ms, 10_000)


def queue(*requests: Request, dispatched_tokens: int = 4000) -> HotQueue:
    pending = dispatched_tokens + sum(request.uncached_tokens for request in requests)
    hot = load("hot", pending_tokens=pending, dispatched_tokens=dispatched_tokens, queued_requests=len(requests))
    return HotQueue(10_000, hot, requests, {})


def test_those_that_wait_longest_move_until_a_newcomer_has_half_an_slo_of_work() -> None:
    waiting = queue(*(held(f"r{number}", 1000) for number in range(8)))
    moves = plan_relief([waiting], {"new": load("new")})
    assert [move.request_id for move in moves] == ["r7", "r6", "r5"]
    assert {move.target_id for move in moves} == {"new"}
    assert all(move.benefit_s > 0 for move in moves)


def test_two_newcomers_share() -> None:
    waiting = queue(*(held(f"r{number}", 1000) for number in range(8)))
    moves = plan_relief([waiting], {"new": load("new"), "other": load("other")})
    assert [move.target_id for move in moves[:4]] == ["new", "other", "new", "other"]


def test_a_request_whose_prefix_is_cached_where_it_waits_stays_if_computing_all_takes_longer() -> None:
    assert plan_relief([queue(held("a", 100, prompt_tokens=9000))], {"new": load("new")}) == ()


def test_one_on_time_does_not_move_to_be_late_and_one_that_is_late_anyway_may() -> None:
    on_time = held("a", 500, prompt_tokens=4000, slo_ms=4600)
    assert plan_relief([queue(replace(on_time, slo_ms=3900))], {"new": load("new")})
    assert plan_relief([queue(on_time, dispatched_tokens=3000)], {"new": load("new")}) == ()


def test_without_newcomers_or_held_requests_nothing_moves() -> None:
    assert plan_relief([queue(held("a", 1000))], {}) == ()
    assert plan_relief([queue()], {"new": load("new")}) == ()
