"""Statuses and what they show."""

from __future__ import annotations

import math

import pytest

from dualmap.scheduling.request.answers import (
    LONGEST_PAUSE_S,
    SHORTEST_PAUSE_S,
    Verdict,
    is_server_fault,
    judge_status,
    pause_s,
)


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ((200, 204, 206), Verdict.BLAMELESS),
        ((400, 409, 413, 415, 422, 431, 501, 505), Verdict.BLAMELESS),
        ((500, 502, 503, 504, 520), Verdict.FAULT),
        ((429,), Verdict.BUSY),
        ((301, 302, 304, 307, 308, 401, 402, 403, 404, 405, 407, 408, 410, 451, 499), Verdict.DISPUTED),
    ],
)
def test_every_status_is_judged(statuses: tuple[int, ...], verdict: Verdict) -> None:
    assert {judge_status(status) for status in statuses} == {verdict}


def test_unavailable_with_a_time_to_come_back_is_busy() -> None:
    assert judge_status(503, names_pause=True) is Verdict.BUSY
    assert judge_status(500, names_pause=True) is Verdict.FAULT


def test_only_errors_that_not_every_server_would_give_are_a_servers_fault() -> None:
    assert [status for status in (200, 404, 429, 500, 501, 503, 505) if is_server_fault(status)] == [500, 503]


@pytest.mark.parametrize(
    ("named_s", "expected_s"),
    [
        (None, SHORTEST_PAUSE_S),
        (math.nan, SHORTEST_PAUSE_S),
        (0.0, SHORTEST_PAUSE_S),
        (7.5, 7.5),
        (86_400.0, LONGEST_PAUSE_S),
        (math.inf, LONGEST_PAUSE_S),
    ],
)
def test_a_pause_is_as_named_within_bounds(named_s: float | None, expected_s: float) -> None:
    assert pause_s(named_s) == expected_s
