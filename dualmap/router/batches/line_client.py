"""The client of a line, which keeps the answer.

A line may be answered by a stream, so that its answer can leave an instance and continue elsewhere. It is kept as the
whole answer that a client would have got at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httptools

from dualmap.api_bodies.whole_answer import whole_answer
from dualmap.router.answers.sse import EVENT_END, event_data, json_object
from dualmap.router.errors import RouterError, UpstreamError, error_body
from dualmap.router.http.downstream import ByteSource
from dualmap.router.http.plain_heads import Header
from dualmap.router.prompts.inference_request import CHAT_PATH

if TYPE_CHECKING:
    from dualmap.router.http.answer_driver import AnswerDriver


class LineClient:
    """A ``Downstream`` for one answer, read back from its bytes."""

    page_fields: Sequence[Header] = ()
    http_10 = False
    bodiless = False
    committed = False
    gone = False
    between_events = False
    file = -1

    def __init__(self, path: str) -> None:
        self.path = path
        self.received_s = asyncio.get_running_loop().time()
        self.status = 0
        """The status of the answer; 0: there is none."""
        self.retry_after_s: float | None = None
        """When the router would take the request, where it refused it for now."""
        self.is_unreached = False
        """No instance has seen the request."""
        self.is_whole = False
        self._parser = httptools.HttpResponseParser(self)
        self._bytes = bytearray()
        self.body: Mapping[str, Any] | None = None
        """The JSON object of the answer, once it is whole."""
        self._request_id = b""
        self._streams = False
        self._cached_tokens = 0
        """As they were expected when it was placed."""

    @property
    def request_id(self) -> str:
        return self._request_id.decode("latin-1")

    def _read(self) -> Mapping[str, Any] | None:
        """The JSON object of the bytes; None where they are none, or a stream that has failed."""
        if not self._streams:
            return json_object(bytes(self._bytes))
        events = [json_object(data) for event in EVENT_END.split(bytes(self._bytes)) if (data := event_data(event))]
        return whole_answer([each for each in events if each is not None], chat=self.path == CHAT_PATH)

    def used_tokens(self) -> tuple[int, int] | None:
        """The tokens of prompt and answer, and those of the prompt that were computed, as far as its instance reported
        them; None where it has no answer."""
        usage = (self.body or {}).get("usage") if self.status == 200 else None
        if not isinstance(usage, dict):
            return None
        prompt, total = (usage.get(name) for name in ("prompt_tokens", "total_tokens"))
        if not isinstance(prompt, int) or not isinstance(total, int):
            return None
        return total, max(0, prompt - self._cached_tokens)

    # callbacks of the parser ---------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value
        elif name.lower() == b"x-dualmap-cached-tokens" and value.isdigit():
            self._cached_tokens = int(value)
        elif name.lower() == b"content-type":
            self._streams = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self._bytes += piece

    def on_message_complete(self) -> None:
        self.body = self._read()
        self.is_whole = not self._streams or self.body is not None

    # Downstream ----------------------------------------------------------------------------------------------
    def keeps_alive(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def write_head(self, head: bytes) -> None:
        self.committed = True
        self.write(head)

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None:
        if self.committed:
            return self.abort()
        self.committed = self.is_whole = True
        self.status, self.retry_after_s = error.status, error.retry_after_s
        self.is_unreached = isinstance(error, UpstreamError) and error.is_unreached
        self._request_id = dict(fields).get(b"x-request-id", b"")
        self.body = error_body(error, self.path)
        return None

    def set_source(self, source: ByteSource | None) -> None: ...

    def close_after(self) -> None: ...

    def abort(self) -> None:
        self.is_whole, self.body = False, None

    def cut_off(self, error: RouterError) -> bool:
        return False

    def break_off(self, last_words: bytes) -> None:
        self.abort()

    def may_lend(self) -> bool:
        return False

    def lend(self, to: AnswerDriver) -> None:
        raise AssertionError("it has no file")

    def end_loan(self) -> None: ...
