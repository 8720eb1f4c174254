"""What a request says of its priority, and the fields that the gateway adds to its body."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dualmap.router.http.added_fields import field_edit, priority_field
from dualmap.router.http.long_bodies import read_at_once
from dualmap.router.http.model_field import edited
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import InferenceRequest


def read(body: dict[str, Any], *fields: tuple[bytes, bytes]) -> InferenceRequest:
    request = ClientRequest(
        "POST", "/v1/completions", b"", [*fields], http_10=False, keep_alive=True, body=orjson.dumps(body)
    )
    found = read_at_once(request, "id")
    assert found is not None
    return found


def test_what_a_request_says_of_its_priority_is_read() -> None:
    found = read({"prompt": "hi", "service_tier": "flex", "priority": 3}, (b"x-dualmap-priority", b" batch "))
    assert (found.asked_class, found.service_tier, found.sent_priority) == ("batch", "flex", 3)


@pytest.mark.parametrize("body", [{}, {"service_tier": 7, "priority": True}, {"priority": "high"}, {"priority": 1.5}])
def test_what_cannot_be_a_priority_counts_as_not_said(body: dict[str, Any]) -> None:
    found = read({"prompt": "hi", **body})
    assert (found.asked_class, found.service_tier, found.sent_priority) == (None, None, None)


@pytest.mark.parametrize("body", [b"{}", b'{"priority": 5, "prompt": "a }"} \n', b'{"prompt":""}'])
def test_an_added_field_is_the_last_word_of_the_body(body: bytes) -> None:
    made = orjson.loads(b"".join(edited(body, [field_edit(body, priority_field(-7))])))
    assert made == {**orjson.loads(body), "priority": -7}
