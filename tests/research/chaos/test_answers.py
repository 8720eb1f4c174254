"""Streams as the checker reads them."""

from __future__ import annotations

import pytest

from dualmap.research.chaos.answers import Api, MalformedError, StreamReader
from dualmap.router.answers.last_words import failed_response

FAILED = failed_response({"message": "no instance is ready", "type": "api_error"}, 3)
"""The two last events of a response that a router ends."""


def test_a_response_may_end_by_its_error_and_the_event_that_it_has_failed() -> None:
    assert FAILED.count(b"event: ") == 2

    answer = StreamReader(Api.RESPONSES).read(FAILED, ended=True)

    assert answer.error == "no instance is ready"


@pytest.mark.parametrize("api", Api)
def test_nothing_else_may_follow_an_error(api: Api) -> None:
    error, last = FAILED.split(b"\n\n")[:2]
    behind = [b'data: {"type": "response.completed"}', b'data: {"choices": []}', last]
    for events in ([error, behind[0]], [error, behind[1]], [error, last, last]):
        with pytest.raises(MalformedError, match="follows the error"):
            StreamReader(api).read(b"\n\n".join(events) + b"\n\n", ended=True)
