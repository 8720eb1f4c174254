"""A failure becomes an error for the client, and an outcome."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from dualmap.router.errors import (
    HoldTimeoutError,
    QueueFullError,
    UpstreamError,
    UpstreamTimeoutError,
)
from dualmap.router.requests.refusals import exhausted, outcome_of
from dualmap.scheduling.request.machine import Refusal
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.statestore.errors import StoreUnavailableError


def test_time_outs_are_told_from_other_failures() -> None:
    assert isinstance(exhausted(InstanceFailure(FailureKind.TIMEOUT), "x", 1), UpstreamTimeoutError)
    error = exhausted(InstanceFailure(FailureKind.STATUS, "overloaded", 503), "3 instances failed", 3)
    assert isinstance(error, UpstreamError)
    assert "3 instances failed" in error.message
    assert "503" in error.message


@pytest.mark.parametrize(
    ("kind", "tries", "unreached"),
    [(FailureKind.CONNECT, 1, True), (FailureKind.CONNECT, 2, False), (FailureKind.CLOSED, 1, False)],
)
def test_a_request_is_unreached_where_its_only_try_found_no_connection(
    kind: FailureKind, tries: int, unreached: bool
) -> None:
    error = exhausted(InstanceFailure(kind), "x", tries)
    assert isinstance(error, UpstreamError) and error.is_unreached is unreached
    assert (error.status, error.code, outcome_of(error)) == (502, "upstream_failed", Outcome.UPSTREAM_FAILED)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError(), Outcome.CLIENT_GONE),
        (asyncio.CancelledError("cut_off"), Outcome.CUT_OFF),
        (HoldTimeoutError("x"), Outcome.TIMED_OUT),
        (UpstreamTimeoutError("x"), Outcome.TIMED_OUT),
        (UpstreamError("x"), Outcome.UPSTREAM_FAILED),
        (QueueFullError("x"), Outcome.REFUSED),
        (StoreUnavailableError("x"), Outcome.REFUSED),  # its client gets 503, and it reached no instance
        (ValueError("x"), Outcome.INTERNAL_ERROR),
    ],
    ids=repr,
)
def test_every_exception_is_an_outcome(error: BaseException, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome


def test_the_reference_says_of_every_refusal_where_it_is_decided() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "errors.md").read_text("utf-8")
    _, _, table = page.partition("| refusal | code | decided in |")

    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*Refusal]
