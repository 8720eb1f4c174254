"""What an instance's counts should be, added up from its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduling.request import Request, RequestState


@dataclass(frozen=True, slots=True)
class Sums:
    sums: Mapping[str, int]
    stray_queued: Sequence[str]
    """Entries of the queue whose request is gone, elsewhere, or not as listed."""
    stray_running: Sequence[str]

    def is_right(self, kept: Mapping[str, Any]) -> bool:
        strays = self.stray_queued or self.stray_running
        return not strays and all(kept[name] == total for name, total in self.sums.items())


def add_up(instance_id: str, queued: Sequence[str], running: Sequence[str], records: Mapping[str, Request]) -> Sums:
    """``queued`` are entries as the queue lists them ('REQUEST_ID UNCACHED_TOKENS'), ``running`` are request ids."""
    sums = dict.fromkeys(
        ("pending_tokens", "dispatched_tokens", "deferred_tokens", "context_tokens", "queued_requests"), 0
    ) | {"running_requests": 0}
    stray_queued, stray_running = [], []
    for entry in queued:
        request_id, _, tokens = entry.rpartition(" ")
        request = records.get(request_id)
        if (
            request is None
            or request.instance_id != instance_id
            or request.state is not RequestState.HELD
            or request.uncached_tokens != int(tokens)
        ):
            stray_queued.append(entry)
            continue
        sums["queued_requests"] += 1
        sums["pending_tokens"] += request.uncached_tokens
        sums["deferred_tokens"] += request.uncached_tokens if request.deferred else 0
    for request_id in running:
        request = records.get(request_id)
        if request is None or request.instance_id != instance_id or request.state is RequestState.HELD:
            stray_running.append(request_id)
            continue
        sums["running_requests"] += 1
        sums["context_tokens"] += request.context_tokens
        if request.state is RequestState.DISPATCHED:
            sums["pending_tokens"] += request.uncached_tokens
            sums["dispatched_tokens"] += request.uncached_tokens
    return Sums(sums, stray_queued, stray_running)
