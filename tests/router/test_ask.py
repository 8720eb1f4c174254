"""Reading what a client asks for from its headers."""

from __future__ import annotations

import pytest

from router.ask import FailureKind, InstanceFailure, mint_request_id, read_request_id, read_slo_s
from router.errors import InvalidRequestError


def test_a_clients_request_id_is_kept_and_a_missing_one_minted() -> None:
    assert read_request_id("my-id.1") == "my-id.1"
    assert read_request_id(None) != read_request_id(None)
    assert len(mint_request_id()) == 32


@pytest.mark.parametrize("sent", ["a b", "x" * 129, "é", "a\nb", '{"a"}'])
def test_a_request_id_that_would_not_be_safe_to_pass_on_is_refused(sent: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-request-id"):
        read_request_id(sent)


def test_an_slo_is_read_in_milliseconds() -> None:
    assert read_slo_s("2500") == 2.5
    assert read_slo_s("0.5") == 0.0005
    assert read_slo_s(None) is None


@pytest.mark.parametrize("sent", ["", "0", "-5", "soon", "nan", "inf", "3600001"])
def test_an_slo_that_is_no_time_is_refused(sent: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-slo-ttft-ms"):
        read_slo_s(sent)


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
