"""Virtual time: events in a deterministic order."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush

Action = Callable[[float], None]


class Priority(IntEnum):
    """The order of events at the same moment.

    Changes of the cluster come before decisions on it, and decisions before engines start their next step: requests
    that arrive together share the first step of an idle engine.
    """

    MEMBERSHIP = 0
    LEADER = 1
    ARRIVAL = 2
    ENGINE = 3
    SAMPLE = 4


class EventQueue:
    """A heap with the key (time_s, priority, sequence); events of equal time and priority keep their order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Action]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, time_s: float, priority: Priority, action: Action) -> None:
        self._sequence += 1
        heappush(self._heap, (time_s, priority, self._sequence, action))

    def pop(self) -> tuple[float, Action]:
        time_s, _, _, action = heappop(self._heap)
        return time_s, action
