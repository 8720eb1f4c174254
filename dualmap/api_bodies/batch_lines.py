"""Lines of OpenAI's Batch API: requests of an input file, and those of the files of answers and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from dualmap.scheduling.batches.batch import LineError
from dualmap.scheduling.values import value

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Paths that requests of a batch may have."""
LONGEST_ID: Final = 512
"""Longest ``custom_id``, characters."""


class BadLineError(Exception):
    """A line that cannot be run."""

    def __init__(self, error: LineError) -> None:
        super().__init__(error.message)
        self.error = error


@value
class BatchLine:
    """A request of a batch."""

    custom_id: str
    body: dict[str, Any]


def read_line(text: bytes, endpoint: str, number: int) -> BatchLine:
    """The request of a line.

    Raises:
        BadLineError: it is none, or one for another path.
    """

    def refuse(code: str, message: str, param: str | None = None) -> BadLineError:
        return BadLineError(LineError(code, message, number, param))

    try:
        read = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise refuse("invalid_json_line", "this line is not valid JSON; write one JSON object per line") from None
    if not isinstance(read, dict):
        raise refuse("invalid_json_line", "this line is no JSON object; write one JSON object per line")
    custom_id, method, url, body = (read.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise refuse("missing_required_parameter", "custom_id is missing, or no text", "custom_id")
    if len(custom_id) > LONGEST_ID:
        raise refuse("invalid_custom_id", f"custom_id is longer than {LONGEST_ID} characters", "custom_id")
    if method != "POST":
        raise refuse("invalid_method", "method must be POST", "method")
    if url != endpoint:
        raise refuse("url_mismatch", f"url must be the endpoint of the batch, {endpoint}", "url")
    if not isinstance(body, dict):
        raise refuse("missing_required_parameter", "body is missing, or no JSON object", "body")
    if body.get("stream"):
        raise refuse("invalid_body", "answers of a batch are not streamed: leave stream out", "body.stream")
    if endpoint == "/v1/responses" and body.get("background"):
        raise refuse("invalid_body", "a batch is in the background already: leave background out", "body.background")
    return BatchLine(custom_id, body)


def doubled_id(custom_id: str, number: int) -> LineError:
    return LineError(
        "duplicate_custom_id", f"custom_id {custom_id[:64]!r} is that of another line, too", number, "custom_id"
    )


def answer_line(line_id: str, custom_id: str, status: int, request_id: str, body: Mapping[str, Any] | None) -> bytes:
    """A line of the file of answers; where ``status`` is not 200, of that of errors."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(line_id, custom_id, response, None)


def failed_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """A line of the file of errors, of a request that has no answer at all."""
    return _line(line_id, custom_id, None, {"code": code, "message": message})


def _line(line_id: str, custom_id: str, response: object, error: object) -> bytes:
    return orjson.dumps({"id": line_id, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
