"""Ids of responses."""

from __future__ import annotations

import re

import pytest

from dualmap.router.prompts.inference_request import request_of_response, response_id, storing_instance

IDS = ["a", "a/b", "a~2Fb", "a%2Fb", "a?b#c", "a@b", "a b", "a+b", "ä", "../..", "a\udc80"]


@pytest.mark.parametrize("request_id", IDS)
def test_an_id_of_a_response_is_one_part_of_a_path_and_names_its_instance(request_id: str) -> None:
    made = response_id(request_id, "npu-0:8000")
    assert re.fullmatch(r"resp_[A-Za-z0-9_.~-]+@npu-0:8000", made)
    assert storing_instance(made) == "npu-0:8000"
    assert request_of_response(made) == request_id


def test_requests_with_different_ids_have_responses_with_different_ids() -> None:
    assert len({response_id(each, "i") for each in IDS}) == len(IDS)


def test_an_id_of_a_uuid_or_a_number_is_left_as_it_is() -> None:
    assert response_id("0af7651916cd43dd8448eb211c80319c", "i") == "resp_0af7651916cd43dd8448eb211c80319c@i"
