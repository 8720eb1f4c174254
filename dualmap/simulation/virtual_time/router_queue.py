"""Queues of other projects' routers: requests are parked while all instances are busy, and routed when one has room.

Sources (documents, 2026): NVIDIA Dynamo's router queue holds while every worker has more than ``threshold`` batches of
prefill, and releases in order of arrival (``fcfs``) or shortest first (``wspt``). llm-d's flow control holds while the
mean of ``max(waiting / 5, KV use / 0.8)`` is at least 1, and releases in order of arrival, by deadline, or those of the
program first that has attained the least service (``program``: tokens of its prompts and answers). Both choose an
instance when they release, by the figures of that moment, and let no newcomer overtake a queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

DYNAMO_THRESHOLD_BATCHES = 16
LLM_D_WAITING_REQUESTS = 5
LLM_D_KV_USE = 0.8


class RouterQueueRule(StrEnum):
    DYNAMO_FCFS = "dynamo-fcfs"
    DYNAMO_WSPT = "dynamo-wspt"
    LLM_D_FCFS = "llm-d-fcfs"
    LLM_D_DEADLINE = "llm-d-deadline"
    LLM_D_PROGRAM = "llm-d-program"


@dataclass(frozen=True, slots=True)
class Pressure:
    """An instance as a router sees it."""

    pending_tokens: int
    waiting_requests: int
    """Requests in the engine's own queue."""
    kv_use: float
    """0..1, as the engine's gauge has it."""


class RouterQueue:
    """The parked requests, by number."""

    def __init__(self, rule: RouterQueueRule, batch_tokens: int) -> None:
        self._rule = rule
        self._batch_tokens = batch_tokens
        self._parked: list[tuple[float, int]] = []
        self._service: Counter[str] = Counter()
        """Tokens of the prompts and answers of each run so far."""

    def __bool__(self) -> bool:
        return bool(self._parked)

    def park(self, number: int, arrival_s: float, prompt_tokens: int, slo_s: float, run: str = "") -> None:
        heappush(self._parked, (self._key(arrival_s, prompt_tokens, slo_s, run), number))

    def ended(self, run: str, tokens: int) -> None:
        """A turn of a run is over, which had so many tokens."""
        self._service[run] += tokens

    def take(self) -> int:
        """The next one, by number."""
        return heappop(self._parked)[1]

    def holds(self, instances: Iterable[Pressure]) -> bool:
        """Whether requests wait in the router at this moment."""
        if self._rule in (RouterQueueRule.DYNAMO_FCFS, RouterQueueRule.DYNAMO_WSPT):
            limit = DYNAMO_THRESHOLD_BATCHES * self._batch_tokens
            return all(one.pending_tokens > limit for one in instances)
        scores = [max(one.waiting_requests / LLM_D_WAITING_REQUESTS, one.kv_use / LLM_D_KV_USE) for one in instances]
        return bool(scores) and sum(scores) >= len(scores)

    def _key(self, arrival_s: float, prompt_tokens: int, slo_s: float, run: str) -> float:
        match self._rule:
            case RouterQueueRule.LLM_D_PROGRAM:
                return float(self._service[run])
            case RouterQueueRule.DYNAMO_WSPT:
                return float(prompt_tokens)
            case RouterQueueRule.LLM_D_DEADLINE:
                return arrival_s + slo_s
            case _:
                return arrival_s
