"""Who is to blame for how a request ended."""

from __future__ import annotations

import pytest

from router.outcome import FailureKind, InstanceFailure


@pytest.mark.parametrize(
    ("failure", "at_fault"),
    [
        (InstanceFailure(FailureKind.CONNECT), True),
        (InstanceFailure(FailureKind.TIMEOUT), True),
        (InstanceFailure(FailureKind.STATUS, status=503), True),
        (InstanceFailure(FailureKind.STATUS, status=429), False),
        (InstanceFailure(FailureKind.STATUS, status=408), False),
    ],
    ids=str,
)
def test_only_server_faults_are_held_against_an_instance(failure: InstanceFailure, at_fault: bool) -> None:
    assert failure.server_fault is at_fault


@pytest.mark.parametrize(
    ("failure", "died"),
    [
        (InstanceFailure(FailureKind.CLOSED), True),
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
