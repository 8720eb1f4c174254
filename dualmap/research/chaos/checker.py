"""Judges what became of a request: its answer beside the right one, text, ends and usage, to the character.

The emulator's answers follow from the request alone, its prompt, its limits and the emulator's seed. All instances of a
fleet give the same answer, and it is known before the request is sent: the emulator's own readers give it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dualmap.research.chaos.answers import Answer, Api, Choice, MalformedError, StreamReader, read_whole
from dualmap.simulation.emulator.endpoints import limits_of
from dualmap.simulation.emulator.generation_request import GenerationRequest, Limits
from dualmap.simulation.emulator.messages_api import read_message
from dualmap.simulation.emulator.openai_api import read_chat, read_completion
from dualmap.simulation.emulator.replies import Ended, Reply, Stamp, Usage
from dualmap.simulation.emulator.responses_api import read_response
from dualmap.simulation.emulator.served_names import ServedNames
from dualmap.simulation.emulator.settings import EmulatorSettings

_READERS: Mapping[Api, Callable[[Mapping[str, Any], Limits, Stamp], tuple[GenerationRequest, Reply]]] = {
    Api.CHAT: read_chat,
    Api.COMPLETIONS: read_completion,
    Api.MESSAGES: read_message,
    Api.RESPONSES: read_response,
}
_SHOWN_CHARS = 60
_NOT_CONTINUED = {"tools", "response_format"}


class Outcome(StrEnum):
    """The end that one request came to."""

    RIGHT = "right"
    """The whole answer, and the right one."""
    WRONG = "wrong"
    """An answer that is not the right one, or that no client could read."""
    REFUSED = "refused"
    """An error instead of an answer, in the form of the API."""
    CUT = "cut"
    """The right beginning of a stream, and then an error event, or behind a gateway the engine's own abort; no other
    instance could have gone on with it."""
    BROKEN = "broken"
    """The stream was cut in the same way, and another instance could have gone on with it."""
    LOST = "lost"
    """The connection ended before the answer was complete, and no error said so."""
    STUCK = "stuck"
    """No end within the time that a client waits."""
    LEFT = "left"
    """The client itself went away; nothing is expected of such a request."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome, and what is to be said about it."""

    outcome: Outcome
    why: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """One request, and its right answer."""

    number: int
    api: Api
    body: Mapping[str, Any]
    right: Answer = field(repr=False)

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def can_go_on(self) -> bool:
        """Whether another instance could go on with its stream: there is no grammar and no tool."""
        return not self.body.keys() & _NOT_CONTINUED


class RightAnswers:
    """The answers that emulated instances with these settings give."""

    def __init__(self, settings: EmulatorSettings) -> None:
        self._limits = limits_of(settings, ServedNames(settings.served_model, settings.aliases, settings.loras))

    def question(self, number: int, api: Api, body: Mapping[str, Any]) -> Question:
        """A request with its answer. Raises ApiError: the emulator refuses it."""
        gen_request, reply = _READERS[api](body, self._limits, Stamp("right", self._limits.model, 0, ""))
        scripts = [choice.script for choice in gen_request.choices]
        ends = [Ended(script.tokens, script.finish_reason) for script in scripts]
        usage = Usage(gen_request.prompt_tokens, sum(ended.tokens for ended in ends), 0)
        return Question(number, api, body, read_whole(api, reply.whole(ends, usage)))


def judge(question: Question, status: int | None, body: bytes) -> Verdict:
    """The verdict on a request.

    Args:
        status: of a response that came to its end; None where the connection ended before.
        body: as far as it has come.
    """
    try:
        if status is None:
            return _judge_lost(question, body)
        if status != 200:
            return _judge_error(status, body)
        if question.streams:
            answer = StreamReader(question.api).read(body, ended=True)
        else:
            answer = read_whole(question.api, body)
        return _judge_answer(question, answer)
    except MalformedError as error:
        return Verdict(Outcome.WRONG, str(error))
    except (KeyError, TypeError, AttributeError) as error:
        return Verdict(Outcome.WRONG, f"an answer of another form ({error!r}): {body[:200]!r}")


def _judge_lost(question: Question, body: bytes) -> Verdict:
    if not question.streams or not body:
        return Verdict(Outcome.LOST, f"the connection ended after {len(body)} bytes of the answer")
    answer = StreamReader(question.api).read(body, ended=False)
    if (wrong := _beginning_problem(question.right, answer)) is not None:
        return Verdict(Outcome.WRONG, wrong)
    if answer.error is not None:
        return _cut(question, answer.error)
    if answer.complete:
        return Verdict(Outcome.WRONG, "the stream is complete, and the response has no end")
    return Verdict(Outcome.LOST, f"the connection ended after {len(body)} bytes of a stream, without an error event")


def _cut(question: Question, why: str) -> Verdict:
    return Verdict(Outcome.BROKEN if question.streams and question.can_go_on else Outcome.CUT, why)


def _judge_error(status: int, body: bytes) -> Verdict:
    try:
        error = json.loads(body)["error"]
        return Verdict(Outcome.REFUSED, f"{status} {error.get('code') or error['type']}: {error['message']}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Verdict(Outcome.WRONG, f"status {status} without an error of the API: {body[:200]!r}")


def _judge_answer(question: Question, answer: Answer) -> Verdict:
    right = question.right
    if answer.error is not None:
        wrong = _beginning_problem(right, answer)
        return _cut(question, answer.error) if wrong is None else Verdict(Outcome.WRONG, wrong)
    if not answer.complete:
        return Verdict(Outcome.WRONG, "the stream ends without the end of its API, and without an error")
    if (wrong := _problem(right, answer)) is not None:
        if _is_aborted_response(question, answer):
            return Verdict(Outcome.CUT, "an engine aborted the response and calls it complete, as vLLM 0.32 does")
        return Verdict(Outcome.WRONG, wrong)
    if answer.completion_tokens is None and (
        not question.streams or (question.body.get("stream_options") or {}).get("include_usage")
    ):
        return Verdict(Outcome.WRONG, "the usage is missing")
    return Verdict(Outcome.RIGHT)


def _is_aborted_response(question: Question, answer: Answer) -> bool:
    """Whether it ends where its engine was ended: nothing but its length tells it from one that is over, no router can
    either."""
    if question.api is not Api.RESPONSES or answer.choices.keys() != question.right.choices.keys():
        return False
    got, expected = answer.choices[0], question.right.choices[0]
    return got.finish_reason == "stop" and len(got.text) < len(expected.text) and got.begins(expected)


def _problem(right: Answer, answer: Answer) -> str | None:
    if answer.choices.keys() != right.choices.keys():
        return f"choices {sorted(answer.choices)} instead of {sorted(right.choices)}"
    for index in right.choices:
        got = answer.choices[index]
        expected = _expected(right, index, got)
        if got.text != expected.text:
            return f"choice {index}: {_difference(expected.text, got.text)}"
        if not _same_arguments(expected.arguments, got.arguments):
            return f"choice {index}, arguments: {_difference(expected.arguments, got.arguments)}"
        for name in ("tool", "tokens", "finish_reason", "stop_reason"):
            if getattr(got, name) != getattr(expected, name):
                return f"choice {index}: {name} {getattr(got, name)!r} instead of {getattr(expected, name)!r}"
    for name in ("prompt_tokens", "completion_tokens"):
        if getattr(answer, name) not in (None, getattr(right, name)):
            return f"{name} {getattr(answer, name)} instead of {getattr(right, name)}"
    return None


def _expected(right: Answer, index: int, got: Choice) -> Choice:
    """The right choice. One of several, of which nothing had come when its instance failed, is asked for as the only
    answer to its prompt, and then has the text of the first choice: a model draws any of them."""
    expected, first = right.choices.get(index, Choice()), right.choices.get(0, Choice())
    return first if index and got.text and not got.begins(expected) and got.begins(first) else expected


def _same_arguments(expected: str, got: str) -> bool:
    """A whole message has them as an object, a stream as the text that the model wrote."""
    if expected == got:
        return True
    try:
        return bool(json.loads(expected) == json.loads(got))
    except ValueError:
        return False


def _beginning_problem(right: Answer, answer: Answer) -> str | None:
    for index, got in answer.choices.items():
        expected = _expected(right, index, got)
        if got.arguments:  # of a whole message their spaces are not known
            got.arguments, expected = "", Choice(expected.text, "", expected.tool, expected.tokens)
        if not got.begins(expected):
            return f"choice {index} was cut, and is no beginning: {_difference(expected.text, got.text)}"
    return None


def _difference(expected: str, got: str) -> str:
    at = next((at for at, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        at = min(len(expected), len(got))
    start = max(0, at - 20)
    return (
        f"differs at character {at} of {len(expected)} ({len(got)} came): {got[start : at + _SHOWN_CHARS]!r} instead of"
        f" {expected[start : at + _SHOWN_CHARS]!r}"
    )
