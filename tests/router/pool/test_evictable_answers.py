"""Answers of a replica that are told to leave an instance."""

from __future__ import annotations

from dualmap.router.pool.evictable_answers import EvictableAnswers
from dualmap.scheduling.request.eviction import AnswerUnderWay, EvictionRule, Shortage
from dualmap.scheduling.settings import PriorityClassSettings

RULE = EvictionRule((PriorityClassSettings(name="chat"), PriorityClassSettings(name="batch", evictable=True)))


class Machine:
    def __init__(self, known: AnswerUnderWay | None) -> None:
        self.under_way = lambda: known


class Answer:
    def __init__(self, request_id: str, since_s: float, *, may_leave: bool = True) -> None:
        self.machine = Machine(AnswerUnderWay(request_id, 1, 500, 1000, since_s, 0) if may_leave else None)
        self.told: list[str] = []

    def leave(self, why: str) -> None:
        self.told.append(why)


def test_those_on_the_instance_that_the_rule_chooses_are_told() -> None:
    answers, old, new = EvictableAnswers(), Answer("old", 1.0), Answer("new", 2.0)
    pinned, elsewhere = Answer("pinned", 3.0, may_leave=False), Answer("elsewhere", 4.0)
    for answer in (old, new, pinned):
        answers.enter("a", answer)
    answers.enter("b", elsewhere)

    assert answers.evict(RULE, 0, "a", Shortage(300.0, 0)) == 1

    assert [len(each.told) for each in (old, new, pinned, elsewhere)] == [0, 1, 0, 0]


def test_what_has_left_is_told_nothing() -> None:
    answers, left = EvictableAnswers(), Answer("left", 1.0)
    answers.enter("a", left)
    answers.remove("a", left)
    answers.remove("a", left)

    assert answers.evict(RULE, 0, "a", Shortage(300.0, 0)) == 0
    assert left.told == []
