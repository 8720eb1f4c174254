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
