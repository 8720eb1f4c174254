"""Responses whose rest another instance gives: what the client sees of its events, and what is asked for."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dualmap.router.answers.continued_answer import ending_events
from dualmap.router.answers.continued_response import ContinuedResponse
from dualmap.router.answers.failures import failure_in
from dualmap.router.answers.rest import CannotContinueError, Over, Rest, rest_of, why_not_continued
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.errors import UpstreamError
from dualmap.scheduling.request.outcome import FailureKind

RESPONSE = "/v1/responses"
CALL = {"type": "function_call", "id": "fc_b", "call_id": "c", "name": "f", "arguments": "", "status": "in_progress"}


def message(item_id: str, text: str | None, status: str = "in_progress") -> dict[str, Any]:
    content: list[Any] = (
        [] if text is None else [{"type": "output_text", "text": text, "annotations": [], "logprobs": None}]
    )
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def stream(mark: str, texts: list[str], *, ends: bool = True, prompt_tokens: int = 10) -> list[dict[str, Any]]:
    """The events of a response with one message."""
    begun = {"id": f"resp_{mark}", "created_at": ord(mark), "model": "m", "max_output_tokens": 100 + ord(mark)}
    place, item = {"output_index": 0}, {"item_id": f"msg_{mark}", "output_index": 0, "content_index": 0}
    whole = "".join(texts)
    part = message("", whole)["content"][0]
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**begun, "status": "in_progress", "output": []}},
        {"type": "response.in_progress", "response": {**begun, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", **place, "item": message(f"msg_{mark}", None)},
        {"type": "response.content_part.added", **item, "part": {**part, "text": ""}},
        *({"type": "response.output_text.delta", **item, "delta": text, "logprobs": []} for text in texts),
    ]
    if ends:
        usage = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": prompt_tokens - 1, "input_tokens_per_turn": [prompt_tokens]},
            "output_tokens": len(texts),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + len(texts),
        }
        done = message(f"msg_{mark}", whole, "completed")
        events += [
            {"type": "response.output_text.done", **item, "text": whole, "logprobs": []},
            {"type": "response.content_part.done", **item, "part": part},
            {"type": "response.output_item.done", **place, "item": done},
            {
                "type": "response.completed",
                "response": {**begun, "status": "completed", "output": [done], "usage": usage},
            },
        ]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def wire(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


def had(events: list[dict[str, Any]]) -> AnswerSoFar:
    so_far = AnswerSoFar()
    so_far.read(RESPONSE, b"".join(map(wire, events)))
    return so_far


def go_on(so_far: AnswerSoFar, rest: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """The events that the client gets for those of another response."""
    answer = ContinuedResponse(so_far, Rest(RESPONSE, b"", tokens, so_far.chars))
    so_far.by_text(tokens)
    made = b"".join(answer.event(wire(event)) for event in rest)
    return [orjson.loads(each.split(b"\ndata: ")[1]) for each in made.split(b"\n\n") if each]


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", "stream": True, **more}


@pytest.mark.parametrize("cut", range(2, 8))
def test_wherever_a_response_is_cut_its_client_reads_one_response(cut: int) -> None:
    before = stream("a", ["one", " two", " three", " four"], ends=False)[:cut]
    told = [event["delta"] for event in before if "delta" in event]
    so_far = had(before)

    got = before + go_on(so_far, stream("b", [" five", " six"], prompt_tokens=10 + len(told)), len(told))

    whole = "".join([*told, " five", " six"])
    uncut = stream("a", [*told, " five", " six"])
    item_id = "msg_a" if cut > 2 else "msg_b"  # of the first item that the client was told of
    for event in uncut:
        if "item_id" in event:
            event["item_id"] = item_id
        for item in [event.get("item"), *event.get("response", {}).get("output", ())]:
            if item:
                item["id"] = item_id
    if told:  # more than the prompt may be cached of the other one
        uncut[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] = 10
    assert got == uncut
    assert so_far.text == whole


def test_a_response_that_is_cut_twice_is_one_response() -> None:
    so_far = had(stream("a", ["one", " two"], ends=False))
    first = go_on(so_far, stream("b", [" three"], ends=False), 2)
    so_far.read(RESPONSE, b"".join(map(wire, stream("b", [" three"], ends=False))))  # as they were kept

    got = go_on(so_far, stream("c", [" four"], prompt_tokens=13), 3)

    assert (
        stream("a", ["one", " two"], ends=False) + first + got
        == stream("a", ["one", " two", " three", " four"], prompt_tokens=10)[:-1] + got[-1:]
    )
    end = got[-1]["response"]
    assert (end["id"], end["output"][0]["content"][0]["text"]) == ("resp_a", "one two three four")
    assert (end["usage"]["input_tokens"], end["usage"]["output_tokens"]) == (10, 4)


def test_a_rest_that_calls_a_tool_ends_the_message_and_is_the_next_item() -> None:
    so_far = had(stream("a", ["one"], ends=False))
    arguments = {"item_id": "fc_b", "output_index": 0, "delta": "{}"}
    begun = stream("b", [], ends=False)[:2]
    rest = [
        *begun,
        {"type": "response.output_item.added", "output_index": 0, "item": CALL, "sequence_number": 2},
        {"type": "response.function_call_arguments.delta", **arguments, "sequence_number": 3},
        {"type": "response.output_item.done", "output_index": 0, "item": CALL, "sequence_number": 4},
        {"type": "response.completed", "response": begun[0]["response"], "sequence_number": 5},
    ]

    got = go_on(so_far, rest, 1)

    assert [event["type"].removeprefix("response.") for event in got] == [
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in got] == [*range(5, 12)]
    assert [event["output_index"] for event in got[:-1]] == [0, 0, 0, 1, 1, 1]
    assert got[0]["text"] == "one"
    assert [item["type"] for item in got[-1]["response"]["output"]] == ["message", "function_call"]
    assert so_far.unfit


def test_a_rest_without_text_ends_the_message_as_it_is() -> None:
    begun = stream("b", [], ends=False)[:2]
    end = {"type": "response.completed", "sequence_number": 2, "response": {**begun[0]["response"], "usage": None}}

    got = go_on(had(stream("a", ["one"], ends=False)), [*begun, end], 1)

    assert [event["type"] for event in got][-1] == "response.completed"
    assert got[-1]["response"]["output"] == [message("msg_a", "one", "completed")]


def test_a_rest_that_is_taken_for_reasoning_is_no_rest() -> None:
    added = {"type": "response.output_item.added", "item": {"type": "reasoning", "id": "rs"}, "output_index": 0}

    with pytest.raises(UpstreamError, match="reasoning"):
        go_on(had(stream("a", ["one"], ends=False)), [added], 1)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("hi", {"role": "user", "content": "hi"}),
        ([{"role": "user", "content": "hi"}], {"role": "user", "content": "hi"}),
    ],
)
def test_the_rest_is_asked_for_behind_the_text_so_far(given: Any, sent: dict[str, Any]) -> None:
    so_far = had(stream("a", ["one", " two"], ends=False))

    rest = rest_of(RESPONSE, asked(input=given, max_output_tokens=9), so_far, context_tokens=None, text_tokens=3)

    assert isinstance(rest, Rest)
    body = orjson.loads(rest.body)
    assert (rest.path, rest.tokens, body["max_output_tokens"], body["store"]) == (RESPONSE, 3, 6, False)
    assert body["input"][0] == sent
    assert {name: body["input"][1][name] for name in ("role", "status")} == {
        "role": "assistant",
        "status": "in_progress",
    }
    assert body["input"][1]["content"][0]["text"] == "one two"


@pytest.mark.parametrize("content", ["I", [{"type": "output_text", "text": "I", "annotations": []}]])
def test_a_message_of_the_input_that_is_continued_grows(content: Any) -> None:
    partial = {"type": "message", "role": "assistant", "status": "incomplete", "content": content}
    given = [{"role": "user", "content": "hi"}, partial]

    rest = rest_of(
        RESPONSE, asked(input=given), had(stream("a", [" am"], ends=False)), context_tokens=None, text_tokens=1
    )

    assert isinstance(rest, Rest)
    (_, last) = orjson.loads(rest.body)["input"]
    assert last["content"] == "I am" if isinstance(content, str) else last["content"][0]["text"] == "I am"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "log probabilities"),
        ({"previous_response_id": "resp_x@a"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "no message"),
        ({"input": []}, "no input"),
    ],
)
def test_responses_that_do_not_go_on_say_why(more: dict[str, Any], why: str) -> None:
    assert why in why_not_continued(RESPONSE, asked(**more), 1)
    assert why_not_continued(RESPONSE, asked(), 1) == ""


def test_a_response_with_all_tokens_that_it_may_have_lacks_its_end_alone() -> None:
    so_far, request = had(stream("a", ["one", " two"], ends=False)), asked(max_output_tokens=2)

    over = rest_of(RESPONSE, request, so_far, context_tokens=None, text_tokens=2)

    assert over == Over("length")
    ended = ending_events(RESPONSE, so_far, "length", shows_usage=False)
    end = orjson.loads(ended.split(b"\ndata: ")[-1])
    assert (end["type"], end["response"]["id"], end["response"]["status"]) == (
        "response.completed",
        "resp_a",
        "incomplete",
    )
    assert end["response"]["output"][0]["content"][0]["text"] == "one two"


@pytest.mark.parametrize("more", [{}, {"max_output_tokens": 2}, {"tools": [{"type": "function"}]}])
def test_a_response_whose_message_has_ended_does_not_go_on_as_it_may_have_been_aborted(more: dict[str, Any]) -> None:
    so_far = had(stream("a", ["one", " two"])[:-1])

    with pytest.raises(CannotContinueError, match="between two items"):
        rest_of(RESPONSE, asked(**more), so_far, context_tokens=None, text_tokens=None)


def test_an_open_message_is_ended_where_nothing_else_is_missing() -> None:
    ended = ending_events(RESPONSE, had(stream("a", ["one"], ends=False)), "length", shows_usage=False)

    events = [orjson.loads(each.split(b"\ndata: ")[1]) for each in ended.split(b"\n\n") if each]
    assert [event["sequence_number"] for event in events] == [5, 6, 7, 8]
    assert events[-1]["response"]["output"] == [message("msg_a", "one", "completed")]


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        ({"status": "cancelled"}, FailureKind.ABORTED),
        ({"status": "failed", "error": {"code": "server_error"}}, FailureKind.STATUS),
        ({"status": "failed", "error": {"code": "invalid_prompt"}}, None),
        ({"status": "in_progress", "error": None}, None),
    ],
)
def test_the_end_of_a_response_shows_whether_its_instance_failed_it(
    response: dict[str, Any], kind: FailureKind | None
) -> None:
    failure = failure_in(b"event: x\n", {"type": "response.completed", "response": response})

    assert (None if failure is None else failure.kind) == kind
