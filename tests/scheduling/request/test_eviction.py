"""Eviction: what leaves an instance for a request of a higher class, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.placing.placement import Placed, SearchFailed
from dualmap.scheduling.request.eviction import MOST_AT_ONCE, MOST_EVICTIONS, AnswerUnderWay, EvictionRule, Shortage
from dualmap.scheduling.request.machine import (
    Arrived,
    Evict,
    Failed,
    FirstToken,
    NotPlaced,
    Phase,
    Refuse,
    Reserve,
    Reserved,
    Sent,
)
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure
from dualmap.scheduling.settings import PriorityClassSettings
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from tests.scheduling.request.lives import Life, course_of

CHAT, BATCH = 0, 2
CLASSES = (
    PriorityClassSettings(name="chat"),
    PriorityClassSettings(name="default"),
    PriorityClassSettings(name="batch", evictable=True),
)
RULE = EvictionRule(CLASSES)
LOAD = InstanceLoad("a", InstanceState.READY, prefill_tokens_per_s=1000.0, kv_capacity_tokens=10_000)
EVICTED = InstanceFailure(FailureKind.EVICTED)


def answer(request_id: str, **more: Any) -> AnswerUnderWay:
    known = {"class_rank": BATCH, "prefill_tokens": 0, "context_tokens": 1000, "since_s": 1.0, "evictions": 0}
    return AnswerUnderWay(request_id, **(known | more))


def lacks(class_rank: int = CHAT, **more: Any) -> Shortage | None:
    load = replace(LOAD, **{name: more.pop(name) for name in ("dispatched_tokens", "kv_used_tokens") if name in more})
    known = {"ttft_s": 1.0, "slo_s": 5.0, "uncached_tokens": 100, "context_tokens": 200}
    return RULE.shortage(class_rank, load, **(known | more))


def test_a_request_that_meets_its_slo_lacks_nothing_and_neither_does_one_below_which_none_may_leave() -> None:
    assert lacks() is None
    assert lacks(BATCH, ttft_s=60.0) is None
    assert lacks(1, ttft_s=60.0) is not None


def test_a_request_lacks_the_time_that_it_would_be_late_and_the_memory_that_is_in_use() -> None:
    assert lacks(ttft_s=7.0) == Shortage(2000.0, 0)
    assert lacks(dispatched_tokens=5900) == Shortage(1000.0, 0), "what was dispatched is not overtaken"
    assert lacks(kv_used_tokens=9900) == Shortage(0.0, 100)
    assert lacks(kv_used_tokens=20_000) == Shortage(0.0, 200), "no more than it needs itself"


def test_those_that_were_sent_last_leave_first_and_no_more_than_are_needed() -> None:
    answers = [answer("old", prefill_tokens=500), answer("new", prefill_tokens=500, since_s=2.0)]

    assert RULE.evicted(CHAT, Shortage(400.0, 0), answers) == ["new"]
    assert RULE.evicted(CHAT, Shortage(600.0, 0), answers) == ["new", "old"]
    assert RULE.evicted(CHAT, Shortage(0.0, 1500), answers) == ["new", "old"]


def test_what_helps_nothing_stays_and_so_does_what_left_often_enough_or_is_not_below() -> None:
    stays = [
        answer("answers", prefill_tokens=0),
        answer("often", prefill_tokens=500, evictions=MOST_EVICTIONS),
        answer("default", prefill_tokens=500, class_rank=1),
    ]

    assert RULE.evicted(CHAT, Shortage(400.0, 0), stays) == []
    assert RULE.evicted(BATCH, Shortage(400.0, 0), [answer("equal", prefill_tokens=500)]) == []


def test_a_request_evicts_a_bounded_number() -> None:
    answers = [answer(str(number), prefill_tokens=1) for number in range(2 * MOST_AT_ONCE)]

    assert len(RULE.evicted(CHAT, Shortage(1e9, 0), answers)) == MOST_AT_ONCE


def life(class_rank: int, **spec: Any) -> Life:
    made = Life(class_rank=class_rank, can_go_on=True, **spec)
    made.machine.rules = made.rules = replace(
        made.rules, scheduling=made.rules.scheduling.model_copy(update={"classes": CLASSES})
    )
    return made


def late(one: Life, *, held: bool = False) -> Placed:
    """A placement where it would be late."""
    placed = one.placed(held=held)
    found = placed.reply
    reply = replace(found, chosen=replace(found.chosen, ttft_s=9.0), seen=replace(found.seen, loads={"a": LOAD}))
    return Placed(reply, placed.candidates, placed.decision)


@pytest.mark.parametrize("held", [True, False])
def test_a_request_that_would_be_late_has_others_leave_its_instance(held: bool) -> None:
    one = life(CHAT)
    one.on(Arrived())

    one.on(Reserved(course_of(late(one, held=held)), None if held else one.rules.fleet.sight.view.instances["a"]))

    assert one.names == ["Evict", "AwaitGrant" if held else "Send"]
    assert one.one(Evict) == Evict("a", Shortage(4000.0, 0))


def test_a_request_is_placed_though_it_would_be_late_where_others_may_leave_for_it_and_refused_else() -> None:
    for rank, refused in ((CHAT, False), (BATCH, True)):
        one = life(rank)
        one.on(Arrived())
        one.on(NotPlaced(SearchFailed(missed=late(one))))

        assert isinstance(one.effects[-1], Refuse if refused else Reserve)
        if not refused:
            assert not one.effects[-1].search.refuses
            one.on(NotPlaced(SearchFailed(missed=late(one))))
            assert isinstance(one.effects[-1], Refuse), "once"


def test_an_answer_that_leaves_goes_on_without_the_loss_of_a_try_and_may_come_back() -> None:
    one = life(BATCH)
    one.dispatch()
    one.on(Sent())
    under_way = one.machine.under_way()
    assert under_way is not None
    assert (under_way.prefill_tokens, under_way.evictions) == (48, 0)
    one.on(FirstToken(), after_s=1.0)
    answers = one.machine.under_way()
    assert answers is not None
    assert answers.prefill_tokens == 0

    one.on(Failed(EVICTED, sent_tokens=5), after_s=1.0)

    assert one.machine.phase is Phase.PLACING
    assert (one.machine.excluded, one.machine.evictions, one.machine.sent_tokens) == (frozenset(), 1, 5)
    assert one.machine.tries == one.machine.former_tries


def test_what_cannot_go_on_or_is_of_another_class_may_not_be_evicted() -> None:
    for other in (life(1), life(BATCH)):
        other.dispatch()
        if other.machine.spec.claim.class_rank == BATCH:
            other.machine.spec = replace(other.machine.spec, can_go_on=False)
        assert other.machine.under_way() is None


def test_without_such_a_class_nothing_is_asked_for() -> None:
    one = Life()
    assert one.rules.eviction is None
    one.on(Arrived())
    one.on(Reserved(course_of(late(one, held=True)), None))
    assert one.names == ["AwaitGrant"]
