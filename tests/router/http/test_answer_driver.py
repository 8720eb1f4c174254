"""Legs without a client: which bytes are held back, and which answers are failures."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from dualmap.router.answers.head import AnswerHead, Framing
from dualmap.router.answers.machine import MAX_HELD_BYTES, AnswerSpec, Use
from dualmap.router.answers.result import AnswerResult
from dualmap.router.http.answer_driver import AnswerDriver, Receiver
from dualmap.router.http.parts import FirstPart
from dualmap.scheduling.request.outcome import FailureKind


class Connection:
    """The connection of an instance whose answer a test makes up."""

    url, reusable, between_chunks, paused, lent_to = "http://x", True, True, False, None

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Client:
    """Keeps what it is sent."""

    path, http_10, bodiless, gone, file = "", False, False, False, -1

    def __init__(self) -> None:
        self.committed = False
        self.body = b""

    def write_head(self, head: bytes) -> None:
        self.committed = True
        self.body = head

    def write(self, data: bytes) -> None:
        self.body += data

    def keeps_alive(self) -> bool:
        return True

    def set_source(self, source: object) -> None: ...

    def break_off(self, last_words: bytes) -> None: ...


def event(text: str = "", **fields: Any) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "text": text, **fields}]}) + b"\n\n"


def decoded(kind: bytes) -> tuple[AnswerDriver, Client, Connection]:
    """The answer of a decode leg, whose head has come."""
    connection, client = Connection(), Client()
    made = AnswerDriver(connection, AnswerSpec("", Use.DECODED), Receiver(FirstPart(client)))
    made.head_received(AnswerHead(200, [(b"content-type", kind)], Framing.CHUNKED, {b"content-type": kind}))
    return made, client, connection


def receive(made: AnswerDriver, *events: bytes, complete: bool = False) -> AnswerResult | None:
    for data in events:
        made.body_received(b"%x\r\n%b\r\n" % (len(data), data), [data], False)
    if complete and not made.done.done():
        made.body_received(b"0\r\n\r\n", [], True)
    return made.done.result() if made.done.done() else None


async def test_nothing_of_a_stream_is_sent_before_its_first_token() -> None:
    made, answer, _ = decoded(b"text/event-stream")

    receive(made, b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n')
    assert not answer.committed
    receive(made, event("word"))

    assert answer.committed
    assert b"assistant" in answer.body
    assert b"word" in answer.body


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([b"data: [DONE]\n\n"], FailureKind.PROTOCOL),
        ([event(stop_reason="recomputed")], FailureKind.RECOMPUTED),
        ([event(), b'data: {"error":{"code":500}}\n\n'], FailureKind.STATUS),
    ],
)
async def test_a_stream_without_a_token_can_be_answered_by_another(events: list[bytes], kind: FailureKind) -> None:
    made, answer, _ = decoded(b"text/event-stream")

    result = receive(made, *events, complete=True)

    assert result is not None
    assert result.failure is not None
    assert result.failure.kind is kind
    assert not answer.committed


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", FailureKind.PROTOCOL),
        (b'{"error":{}}', FailureKind.PROTOCOL),
        (b'{"choices":[{"text":"so far","stop_reason": "recomputed"}]}', FailureKind.RECOMPUTED),
    ],
)
async def test_a_plain_answer_that_is_none_can_be_answered_by_another(body: bytes, kind: FailureKind) -> None:
    made, answer, _ = decoded(b"application/json")

    result = receive(made, *([body] if body else []), complete=True)

    assert result is not None
    assert result.failure is not None
    assert result.failure.kind is kind
    assert not answer.committed


async def test_an_answer_that_is_given_back_in_mid_stream_does_not_end_as_if_it_were_whole() -> None:
    made, answer, connection = decoded(b"text/event-stream")

    result = receive(made, event("word"), event("", finish_reason="stop", stop_reason="recomputed"), complete=True)

    assert result is not None
    assert result.failure is not None
    assert result.failure.kind is FailureKind.RECOMPUTED
    assert connection.aborted
    assert b"recomputed" not in answer.body


async def test_what_is_given_back_is_seen_where_two_reads_divide_its_words() -> None:
    made, _, connection = decoded(b"text/event-stream")
    receive(made, event("word"))
    end = event("", finish_reason="stop", stop_reason="recomputed")
    cut = end.index(b"recomputed") + 4

    for wire in (b"%x\r\n%b" % (len(end), end[:cut]), b"%b\r\n" % end[cut:]):
        made.body_received(wire, [wire], False)

    assert made.done.result().failure is not None
    assert connection.aborted


@pytest.mark.parametrize("before", [True, False])
async def test_a_plain_answer_that_is_too_long_to_be_held_is_given_back_too(before: bool) -> None:
    made, answer, connection = decoded(b"application/json")
    told, long = b'{"choices":[{"stop_reason":"recomputed"},', b'"' + b"x" * (MAX_HELD_BYTES + 1) + b'"'

    result = receive(made, *((told, long) if before else (long, told)), complete=True)

    assert result is not None and result.failure is not None
    assert result.failure.kind is FailureKind.RECOMPUTED
    assert connection.aborted
    assert answer.committed is not before


def prefill(status: int = 200, kind: bytes = b"application/json") -> AnswerDriver:
    made = AnswerDriver(Connection(), AnswerSpec("", Use.PREFILL))
    made.head_received(AnswerHead(status, [(b"content-type", kind)], Framing.CHUNKED, {b"content-type": kind}))
    return made


async def test_the_answer_of_a_prefill_leg_is_its_result_once_it_is_whole() -> None:
    made = prefill()

    assert receive(made, b'{"choices":[],') is None
    assert made.machine.held_body == b'{"choices":[],'
    result = receive(made, b'"kv_transfer_params":{}}', complete=True)

    assert result == AnswerResult(200, body=b'{"choices":[],"kv_transfer_params":{}}')


async def test_what_refuses_a_prefill_leg_is_its_result_and_an_error_for_the_client() -> None:
    result = receive(prefill(400), b'{"error":{"code":400}}', complete=True)

    assert result is not None and result.failure is None
    assert (result.as_error().status, result.as_error().body) == (400, b'{"error":{"code":400}}')


@pytest.mark.parametrize(
    ("status", "kind", "body", "failure"),
    [
        (200, b"application/json", b"", FailureKind.PROTOCOL),
        (200, b"application/json", b'{"error":{}}', FailureKind.PROTOCOL),
        (200, b"text/event-stream", b'data: {"error":{"code":500}}\n\n', FailureKind.PROTOCOL),
        (503, b"application/json", b'{"error":{}}', FailureKind.STATUS),
    ],
)
async def test_a_prefill_leg_that_has_failed_can_be_tried_elsewhere(
    status: int, kind: bytes, body: bytes, failure: FailureKind
) -> None:
    result = receive(prefill(status, kind), *([body] if body else []), complete=True)

    assert result is not None and result.failure is not None
    assert result.failure.kind is failure
