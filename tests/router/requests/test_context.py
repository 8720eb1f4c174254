"""The live requests of a replica."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dualmap.router.errors import ReplicaFullError
from dualmap.router.requests.context import LiveRequests
from dualmap.scheduling.request.outcome import Outcome


@dataclass(frozen=True)
class Sent:
    tenant: str


@dataclass(eq=False)
class Request:
    request_id: str
    inference_request: Sent = Sent("")

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


def test_a_tenant_fills_no_more_than_half_of_the_room_that_others_have_left() -> None:
    live = LiveRequests(limit=64)

    def entered(tenant: str) -> int:
        """The requests of the tenant that enter before one is refused."""
        count = 0
        with pytest.raises(ReplicaFullError):
            while True:
                live.enter(Request(f"{tenant} {count}", Sent(tenant)))
                count += 1
        return count

    assert [entered(tenant) for tenant in ("greedy", "second", "third", "fourth", "fifth")] == [32, 16, 8, 4, 4]
    assert len(live) == 64, "its own part is left to each while there is room"

    for each in [each for each in live if each.request_id.startswith("greedy")]:
        live.rename(each, f"renamed {each.request_id}")
        each.request_id = f"renamed {each.request_id}"
        live.leave(each)
    assert entered("greedy") == 16
    assert entered("") == 16, "who is no tenant may have all that is left"


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
