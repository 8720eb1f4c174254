"""The events by which a stream that cannot go on tells its client so, in the form of the client's API.

Clients of ``/v1/responses`` know events by their ``type``, and skip those without: OpenAI's API ends such a stream with
``error``, and then ``response.failed``. Some clients (Codex) read the latter alone. OpenAI's libraries raise for the
``error`` object that is in the former, as it is in streams of OpenAI's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from dualmap.router.answers.response_so_far import ResponseSoFar, named_event
from dualmap.router.answers.sse import error_event
from dualmap.router.errors import RouterError, error_body
from dualmap.router.prompts.inference_request import RESPONSES_PATH

_NUMBER: Final = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')
_LIMITED: Final = frozenset({"rate_limit_error", "rate_limit_exceeded", "insufficient_quota", "requests", "tokens"})


def last_words(path: str, error: RouterError, sent: bytes = b"") -> bytes:
    """The last events of a stream of this path. ``sent``: the last bytes of what its client has got."""
    body = error_body(error, path)
    if path != RESPONSES_PATH:
        return error_event(body)
    numbers = _NUMBER.findall(sent)
    return failed_response(body["error"], int(numbers[-1]) + 1 if numbers else 0)


def failed_response(
    error: Mapping[str, Any],
    number: int,
    envelope: Mapping[str, Any] | None = None,
    so_far: ResponseSoFar | None = None,
) -> bytes:
    """The last events of a response that fails by ``error``, an object as OpenAI's errors have it.

    ``number``: of the first of them. ``envelope``: the response as it began, where that is known.
    """
    message, code = str(error.get("message")), error.get("code") or error.get("type")
    limited = error.get("type") in _LIMITED or code in _LIMITED
    failed = {
        "object": "response",
        **(envelope or {}),
        "status": "failed",
        "error": {"code": "rate_limit_exceeded" if limited else "server_error", "message": message},
        "output": [] if so_far is None else so_far.items,
    }
    first = {
        "type": "error",
        "sequence_number": number,
        "code": None if code is None else str(code),
        "message": message,
        "param": error.get("param"),
        "error": dict(error),
    }
    last = {"type": "response.failed", "sequence_number": number + 1, "response": failed}
    return named_event(first) + named_event(last)
