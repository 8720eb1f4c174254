"""The rows of requests that a replica reports."""

from __future__ import annotations

from typing import Any

from dualmap.router.ui.figures import KeptRows
from dualmap.router.ui.own_requests import FIRST_REQUESTS, OwnRequests
from dualmap.scheduling.request.outcome import Outcome
from tests.router import tools


async def test_a_new_reader_gets_what_is_remembered_and_then_what_is_new(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    for number in range(30):
        request = tools.request("x" * 40, request_id=f"r-{number}")
        (await runtime.intake.place(request)).finish(Outcome.COMPLETED)
    own = OwnRequests(runtime)

    first, keys = own.read()
    again, _ = own.read()
    (await runtime.intake.place(tools.request("x" * 40, request_id="new"))).finish(Outcome.REFUSED)
    new, _ = own.read()

    assert FIRST_REQUESTS >= 30
    assert [row[0] for row in first] == [f"r-{number}" for number in range(30)]
    assert sum(count for _, count in keys["default"].values()) == 30
    assert (again, [row[0] for row in new]) == ([], ["new"])


def test_kept_rows_are_bounded_and_keep_the_latest_state_of_each() -> None:
    kept = KeptRows(latest=3, notable=2)
    kept.add([["live", 1, False], ["bad-1", 1, True], ["bad-2", 1, True], ["bad-3", 1, True]])
    kept.add([[f"good-{number}", 1, False] for number in range(50)])
    kept.add([["good-49", 2, False]])

    assert kept.rows() == [
        *(["bad-2", 1, True], ["bad-3", 1, True]),
        *(["good-47", 1, False], ["good-48", 1, False], ["good-49", 2, False]),
    ]
