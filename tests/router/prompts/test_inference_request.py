"""Ids of responses."""

from __future__ import annotations

import re

import pytest

from dualmap.router.prompts.inference_request import (
    is_response_of,
    request_of_response,
    response_id,
    storing_instance,
)
from dualmap.scheduling.tenants.tenant import Caller, Tenant

IDS = ["a", "a/b", "a~2Fb", "a%2Fb", "a?b#c", "a@b", "a b", "a+b", "ä", "../..", "a\udc80"]


@pytest.mark.parametrize("request_id", IDS)
def test_an_id_of_a_response_is_one_part_of_a_path_and_names_its_instance(request_id: str) -> None:
    made = response_id(request_id, "npu-0:8000")
    assert re.fullmatch(r"resp_[A-Za-z0-9_.~-]+@npu-0:8000", made)
    assert storing_instance(made) == "npu-0:8000"
    assert request_of_response(made) == request_id


@pytest.mark.parametrize("request_id", IDS)
def test_an_id_of_a_tenants_response_is_that_tenants_alone(request_id: str) -> None:
    acme, other = (Caller(Tenant(name), "ci") for name in ("acme", "other"))
    made = response_id(request_id, "npu-0:8000", "acme")
    assert (storing_instance(made), request_of_response(made)) == ("npu-0:8000", request_id)
    assert re.fullmatch(r"resp_[A-Za-z0-9_.~-]+@npu-0:8000", made)
    assert [is_response_of(made, caller) for caller in (acme, other, None)] == [True, False, False]
    without_tenant = response_id(request_id, "npu-0:8000")
    assert [is_response_of(without_tenant, caller) for caller in (acme, None)] == [False, True]


def test_requests_with_different_ids_have_responses_with_different_ids() -> None:
    assert len({response_id(each, "i") for each in IDS}) == len(IDS)


def test_an_id_of_a_uuid_or_a_number_is_left_as_it_is() -> None:
    assert response_id("0af7651916cd43dd8448eb211c80319c", "i") == "resp_0af7651916cd43dd8448eb211c80319c@i"
