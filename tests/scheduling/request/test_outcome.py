"""Who is to blame for how a request ended."""

from __future__ import annotations

import pytest

from dualmap.scheduling.request.answers import Verdict
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure


@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (InstanceFailure(FailureKind.CONNECT), Verdict.FAULT),
        (InstanceFailure(FailureKind.TIMEOUT), Verdict.FAULT),
        (InstanceFailure(FailureKind.TRUNCATED), Verdict.FAULT),
        (InstanceFailure(FailureKind.ABORTED), Verdict.FAULT),
        (InstanceFailure(FailureKind.STATUS, status=500), Verdict.FAULT),
        (InstanceFailure(FailureKind.STATUS, status=503), Verdict.FAULT),
        (InstanceFailure(FailureKind.STATUS, status=503, pause_s=3.0), Verdict.BUSY),
        (InstanceFailure(FailureKind.STATUS, status=429), Verdict.BUSY),
        (InstanceFailure(FailureKind.STATUS, status=401), Verdict.DISPUTED),
        (InstanceFailure(FailureKind.NO_ANSWER), Verdict.DISPUTED),
        (InstanceFailure(FailureKind.RECOMPUTED), Verdict.BLAMELESS),
    ],
    ids=str,
)
def test_a_failure_is_a_fault_a_sign_of_load_or_for_the_peers_to_decide(
    failure: InstanceFailure, verdict: Verdict
) -> None:
    assert failure.verdict is verdict
    # An instance that refuses has not worked on the request: another try repeats nothing.
    refused = failure.kind is FailureKind.CONNECT or verdict in (Verdict.BUSY, Verdict.DISPUTED)
    assert failure.wasted_work is not refused


@pytest.mark.parametrize(
    ("failure", "died"),
    [
        (InstanceFailure(FailureKind.CLOSED), True),
        (InstanceFailure(FailureKind.CLOSED, still_accepts=True), False),
        (InstanceFailure(FailureKind.DOWN), True),
        (InstanceFailure(FailureKind.STATUS, '{"error":{"message":"EngineCore encountered an issue."}}', 500), True),
        (InstanceFailure(FailureKind.STATUS, "a bug", 500), False),
        (InstanceFailure(FailureKind.TIMEOUT), False),
        (InstanceFailure(FailureKind.CONNECT), False),
    ],
    ids=str,
)
def test_an_engine_that_died_with_the_request_is_told_from_one_that_failed_it(
    failure: InstanceFailure, died: bool
) -> None:
    assert failure.engine_died is died
