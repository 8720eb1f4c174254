"""The live requests of a replica."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dualmap.router.errors import ReplicaFullError
from dualmap.router.requests.context import LiveRequests
from dualmap.scheduling.request.outcome import Outcome


@dataclass(eq=False)
class Request:
    request_id: str

    def record(self, now_ms: int) -> None: ...

    def explain(self) -> None: ...

    def finish(self, outcome: Outcome) -> None: ...


def test_the_limit_is_kept_and_leaving_makes_room() -> None:
    live, first = LiveRequests(limit=1), Request("a")
    live.enter(first)
    with pytest.raises(ReplicaFullError):
        live.enter(Request("b"))

    live.leave(first)
    live.leave(first)

    live.enter(Request("b"))
    assert list(live) != []
    assert "b" in live


def test_leaving_never_removes_a_namesake() -> None:
    live, mine = LiveRequests(limit=5), Request("same")
    live.enter(mine)
    live.leave(Request("same"))
    assert "same" in live


def test_a_renamed_request_is_known_by_its_new_name_alone() -> None:
    live, request = LiveRequests(limit=5), Request("old")
    live.enter(request)

    live.rename(request, "new")

    assert ("old" in live, "new" in live) == (False, True)

    request.request_id = "new"
    live.leave(request)
    assert "new" not in live


def test_it_can_be_walked_while_requests_leave() -> None:
    live = LiveRequests(limit=5)
    for name in "abc":
        live.enter(Request(name))

    for request in live:
        live.leave(request)

    assert len(live) == 0
