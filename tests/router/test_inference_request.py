"""Reading what a client asks for from its headers."""

from __future__ import annotations

import pytest

from router.errors import InvalidRequestError
from router.inference_request import mint_request_id, read_request_id, read_slo_s


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
    assert read_slo_s("1500.6") == 1.501
    assert read_slo_s("0.4") == 0.001
    assert read_slo_s(None) is None


@pytest.mark.parametrize("sent", ["", "0", "-5", "soon", "nan", "inf", "3600001"])
def test_an_slo_that_is_no_time_is_refused(sent: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-slo-ttft-ms"):
        read_slo_s(sent)
