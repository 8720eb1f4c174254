"""Answers that a gateway passes on, as the machine reads them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dualmap.router.answers.checks import ABORTED
from dualmap.router.answers.head import AnswerHead, Framing
from dualmap.router.answers.machine import AnswerMachine, AnswerSpec, Finish, Head, Settle, Use
from dualmap.router.answers.result import AnswerResult
from dualmap.scheduling.request.charge import Counted
from dualmap.scheduling.request.outcome import Usage

JSON = b"application/json"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def event(value: Any, name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(value) + b"\n\n"


def observed(path: str, *pieces: bytes, kind: bytes = b"text/event-stream") -> AnswerMachine:
    machine = AnswerMachine(AnswerSpec(path, Use.OBSERVED), 0.0)
    machine.on(Head(AnswerHead(200, [], Framing.UNTIL_CLOSE, {b"content-type": kind})), 0.0)
    for piece in pieces:
        machine.take(piece, [piece])
    return machine


def end(machine: AnswerMachine) -> AnswerResult:
    machine.take(b"", [], complete=True)
    (result,) = [effect.result for effect in machine.effects if isinstance(effect, Finish | Settle)]
    return result


def test_events_with_output_are_counted_from_the_first_one_on() -> None:
    role = {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}
    token = {"choices": [{"delta": {"content": 'x finish_reason":null'}, "finish_reason": None}]}
    made = observed(CHAT, event(role), *[event(token)] * 5, event(token) * 2, b"data: [DONE]\n\n")

    assert made.counted() == Counted(7)


@pytest.mark.parametrize("cut", [1000, 16_384, 10**9])
def test_the_usage_of_a_last_event_that_repeats_a_long_request_is_found(cut: int) -> None:
    usage = {"input_tokens": 9000, "output_tokens": 50}
    response = {"object": "response", "instructions": "x" * 300_000, "usage": usage, "user": "usage" * 20_000}
    delta = event({"type": "response.output_text.delta", "delta": "x"}, "response.output_text.delta")
    wire = delta * 3000 + event({"type": "response.completed", "response": response}, "response.completed")
    made = observed(RESPONSES, *[wire[at : at + cut] for at in range(0, len(wire), cut)])
    assert made.shows_end

    result = end(made)

    assert result.fault is None
    assert result.usage == Usage(9000, None, 50)
    assert made.counted() == Counted(3000)


def test_the_usage_of_a_long_whole_answer_is_found() -> None:
    body = orjson.dumps(
        {"choices": ["x" * 600_000], "usage": {"prompt_tokens": 9}, "prompt_logprobs": ["usage"] * 9000}
    )
    made = observed(CHAT, *[body[at : at + 60_000] for at in range(0, len(body), 60_000)], kind=JSON)

    result = end(made)

    assert (result.usage, result.fault, made.counted()) == (Usage(9), None, Counted(0, len(body)))


def test_a_whole_message_without_a_reason_was_aborted() -> None:
    message = {"type": "message", "content": [], "usage": {"input_tokens": 3, "output_tokens": 1}}

    assert end(observed(MESSAGES, orjson.dumps(message), kind=JSON)).fault is ABORTED
    whole = {**message, "stop_reason": "end_turn"}
    assert end(observed(MESSAGES, orjson.dumps(whole), kind=JSON)).fault is None


def test_what_a_response_repeats_shows_no_end() -> None:
    response = {"tools": [{"parameters": {"type": "response.completed"}}], "status": "in_progress"}
    made = observed(RESPONSES, event({"type": "response.created", "response": response}, "response.created"))

    assert not made.shows_end
