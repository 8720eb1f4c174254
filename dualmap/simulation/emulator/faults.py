"""Faults on demand, for tests and drills: the paths under ``/emulator/``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from dualmap.simulation.emulator.connection import HttpRequest, Responder
from dualmap.simulation.emulator.errors import ApiError, bad_request, engine_dead, plain
from dualmap.simulation.emulator.fields import read_json, whole_number
from dualmap.simulation.emulator.generation_request import GenerationRequest
from dualmap.simulation.emulator.generator import Generator
from dualmap.simulation.emulator.lies import Lie, LyingResponder, last_words, lie_at_once
from dualmap.simulation.emulator.replies import StreamReply
from dualmap.simulation.emulator.routes import Route, Routes, send


class EmptyAnswerError(ApiError):
    """An answer of status 200 that is none."""

    def body(self) -> bytes:
        return b""


class GivenBackError(ApiError):
    """A request that a decoder gives back, once its memory has run out."""

    def body(self) -> bytes:
        return b'{"choices":[{"index":0,"text":"","stop_reason":"recomputed"}]}'


_ANSWERS = {
    "empty": EmptyAnswerError(200, "", ""),
    "recomputed": GivenBackError(200, "", ""),
}
"""Answers of failed decoders of vLLM-Ascend."""


class Faults:
    """The orders to one emulated server.

    Args:
        die: close the port, at once or with the error events of a dying engine, and open it again after a time
            (None: never).
    """

    def __init__(self, generator: Generator, die: Callable[[bool, float | None], None]) -> None:
        self.draining = False
        """Whether the server is shutting down: new requests get 500, running ones continue."""
        self._generator = generator
        self._die = die
        self._fail_next = 0
        self._fail_status = 500
        self._answer = "error"
        self._after_tokens = 0
        self._lie: Lie | None = None
        self._retry_after: str | None = None
        self._lies_every = 1
        self._requests = 0

    def routes(self) -> Routes:
        generator = self._generator
        return {
            "/emulator/statistics": {"GET": Route(self._statistics)},
            "/emulator/pause": {"POST": Route(lambda _, responder: self._switch(responder, generator.pause))},
            "/emulator/resume": {"POST": Route(lambda _, responder: self._switch(responder, generator.resume))},
            "/emulator/fail": {"POST": Route(self._take_failures)},
            "/emulator/lie": {"POST": Route(self._take_lie)},
            "/emulator/die": {"POST": Route(self._take_death)},
        }

    def order_failures(self, count: int, status: int) -> None:
        """Let the next ``count`` requests for inference fail."""
        self._fail_next, self._fail_status = count, status

    def fail_if_ordered(self) -> None:
        """Raises ApiError: this request for inference is to fail."""
        if self.draining:
            raise engine_dead()
        if self._fail_next > 0 and not self._after_tokens:
            self._fail_next -= 1
            raise _ANSWERS.get(self._answer) or plain(self._fail_status)

    def lie_to(
        self, responder: Responder, gen_request: GenerationRequest, stream: StreamReply | None = None
    ) -> Responder | None:
        """The responder that the answer to a request for inference goes through; None if it was lied to already."""
        lie = self._lie
        if lie is None:
            return responder
        self._requests += 1
        if self._requests % self._lies_every:
            return responder
        if lie_at_once(lie, responder, retry_after=self._retry_after):
            return None
        return LyingResponder(responder, lie, b"" if stream is None else last_words(lie, gen_request, stream))

    def gives_back_after(self) -> int | None:
        """Tokens after which this request is to be given back; None: it is not."""
        if self._fail_next == 0 or not self._after_tokens:
            return None
        self._fail_next -= 1
        return self._after_tokens

    def _statistics(self, _request: HttpRequest, responder: Responder) -> None:
        send(responder, asdict(self._generator.engine.statistics()))

    def _switch(self, responder: Responder, switch: Callable[[], None]) -> None:
        switch()
        send(responder, {"paused": self._generator.clock.paused})

    def _take_failures(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body or b"{}")
        count, status = whole_number(payload, "count", 1), whole_number(payload, "status", 500)
        answer = payload.get("answer", "error")
        if answer not in ("error", *_ANSWERS):
            raise bad_request("answer must be error, empty or recomputed.", "answer")
        after_tokens = whole_number(payload, "after_tokens", 0)
        if after_tokens and answer != "recomputed":
            raise bad_request("after_tokens is of answers that are recomputed.", "after_tokens")
        self._answer, self._after_tokens = answer, after_tokens
        if not 400 <= status <= 599:
            raise bad_request("status must be an error status.", "status")
        self.order_failures(count, status)
        send(responder, {"fail_next": count})

    def _take_lie(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body or b"{}")
        lie, retry_after = payload.get("lie"), payload.get("retry_after")
        if lie is not None and lie not in list(Lie):
            raise bad_request(f"lie must be null or one of {', '.join(Lie)}.", "lie")
        self._lie, self._lies_every = (None if lie is None else Lie(lie)), max(1, whole_number(payload, "every", 1))
        self._retry_after = None if retry_after is None else str(retry_after)
        self._requests = 0
        send(responder, {"lie": lie})

    def _take_death(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body or b"{}")
        revive = payload.get("revive_after_s")
        if revive is not None and not (type(revive) in (int, float) and revive >= 0):
            raise bad_request("revive_after_s must be a number of seconds.", "revive_after_s")
        send(responder, {"dying": True})
        self._die(bool(payload.get("abruptly")), revive)
