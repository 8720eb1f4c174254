"""Answers under way on this replica that may leave their instances for requests of a higher class."""

from __future__ import annotations

from typing import Protocol

from dualmap.scheduling.request.eviction import AnswerUnderWay, EvictionRule, Shortage
from dualmap.scheduling.request.machine import RequestMachine


class EvictableAnswer(Protocol):
    """One answer, or a request that was sent for it."""

    machine: RequestMachine

    def leave(self, why: str) -> None:
        """Have it leave its instance, if another one could go on with it. Never waits."""


class EvictableAnswers:
    """The evictable answers of one pool on this replica, by instance. There are none where no class is evictable."""

    def __init__(self) -> None:
        self._answers: dict[str, set[EvictableAnswer]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._answers

    def enter(self, instance_id: str, answer: EvictableAnswer) -> None:
        """The answer is due on this instance. The caller must call ``remove``."""
        self._answers.setdefault(instance_id, set()).add(answer)

    def remove(self, instance_id: str, answer: EvictableAnswer) -> None:
        answers = self._answers.get(instance_id)
        if answers is not None:
            answers.discard(answer)
            if not answers:
                del self._answers[instance_id]

    def evict(self, rule: EvictionRule, class_rank: int, instance_id: str, shortage: Shortage) -> int:
        """Have answers leave the instance for a request of this class; returns how many were to."""
        answers = self._under_way(instance_id)
        leaving = rule.evicted(class_rank, shortage, [under_way for _, under_way in answers.values()])
        for request_id in leaving:
            answers[request_id][0].leave(f"a request of a higher class needs instance {instance_id}")
        return len(leaving)

    def evict_cheapest(self, rule: EvictionRule, instance_id: str, count: int) -> int:
        """Have so many answers leave the instance, those first that lose least; returns how many were to."""
        answers = self._under_way(instance_id)
        leaving = rule.cheapest([under_way for _, under_way in answers.values()], count)
        for request_id in leaving:
            answers[request_id][0].leave(f"requests of higher classes need instance {instance_id}")
        return len(leaving)

    def _under_way(self, instance_id: str) -> dict[str, tuple[EvictableAnswer, AnswerUnderWay]]:
        found = [(answer, answer.machine.under_way()) for answer in self._answers.get(instance_id, ())]
        return {under_way.request_id: (answer, under_way) for answer, under_way in found if under_way is not None}
