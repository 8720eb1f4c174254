"""Pauses after failures in a row, and which of them are told."""

from __future__ import annotations

from dualmap.scheduling.backoff import backoff_s, worth_logging


def test_backoff_doubles_and_is_bounded() -> None:
    pauses_s = [backoff_s(failures, first_s=0.1, longest_s=1.0) for failures in (1, 2, 3, 4, 5, 10_000)]

    assert pauses_s == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_long_outage_is_logged_ever_more_rarely() -> None:
    assert [failures for failures in range(1, 70) if worth_logging(failures)] == [1, 2, 4, 8, 16, 32, 64]
