"""What an instance's counts should be, added up from its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduling.request import Counts, Request, RequestState


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
    held, sent, stray_queued, stray_running = [], [], [], []
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
        else:
            held.append(request)
    for request_id in running:
        request = records.get(request_id)
        if request is None or request.instance_id != instance_id or request.state is RequestState.HELD:
            stray_running.append(request_id)
        else:
            sent.append(request)
    sums = Counts.sum([*held, *sent])._asdict() | {"queued_requests": len(held), "running_requests": len(sent)}
    return Sums(sums, stray_queued, stray_running)
