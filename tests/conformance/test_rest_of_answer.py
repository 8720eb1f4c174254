"""What the rest of a broken answer is asked for by: token ids in streams, prompts of token ids, a message to continue.

Each of these streams is cut in the middle by hand, and its rest asked for as a router does it: a greedy one goes on as
if it had not been cut.
"""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.answers.continued_response import ContinuedResponse
from dualmap.router.answers.kept_stream import KeptBudget, KeptStream
from dualmap.router.answers.rest import Rest, begin_rest, rest_of
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.answers.sse import event_object
from dualmap.router.http.continued_chat import measure_rest
from dualmap.router.http.reading import read_so_far
from tests.conformance.server import Server

CHAT, COMPLETION, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSE = "/v1/responses"
TOKENS = 24
MOST_ASKED = 20


def asked(server: Server, path: str, **more: Any) -> dict[str, Any]:
    words = "def answer(question): return the value of each word in the list " * 8
    prompt = {"prompt": words} if path == COMPLETION else {"messages": [{"role": "user", "content": words}]}
    if path == RESPONSE:
        prompt = {"input": words}
    limit = "max_output_tokens" if path == RESPONSE else "max_tokens"
    how = {"model": server.model, "stream": True, "temperature": 0, limit: TOKENS}
    return prompt | how | ({} if path == MESSAGE else {"ignore_eos": True}) | more


async def events_of(server: Server, path: str, body: dict[str, Any]) -> list[bytes]:
    answer = await server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [event + b"\n\n" for event in answer.content.split(b"\n\n") if event]


async def read(path: str, events: list[bytes], *, so_far: AnswerSoFar | None = None) -> AnswerSoFar:
    kept = KeptStream(path, KeptBudget(1 << 24), 0, hides_ids=True, so_far=so_far)
    for event in events:
        kept.feed(event)
    return await read_so_far(kept)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_stream_that_is_asked_for_ids_is_the_same_without_them(server: Server, path: str) -> None:
    body = asked(server, path)
    unasked = await events_of(server, path, body)
    kept = KeptStream(path, KeptBudget(1 << 24), 0, hides_ids=True)

    passed = [kept.feed(event) for event in await events_of(server, path, body | {"return_token_ids": True})]

    so_far = await read_so_far(kept)
    assert (so_far.tokens, so_far.finished, so_far.has_ids) == (TOKENS, True, True)
    assert so_far.text == (await read(path, unasked)).text
    assert not any(b'token_ids":[' in event for event in passed)
    names = [event.count(b"token_ids") for event in unasked if b"usage" not in event]
    assert set(names) == {event.count(b"token_ids") for event in passed if b"usage" not in event}


@pytest.mark.parametrize("path", [CHAT, COMPLETION, MESSAGE, RESPONSE])
@pytest.mark.parametrize("stop", [False, True])
async def test_a_greedy_answer_goes_on_as_if_it_had_not_been_cut(server: Server, path: str, stop: bool) -> None:
    if stop and path in (MESSAGE, RESPONSE):
        pytest.skip("these go on by their text alone, which a stop string may hold back")
    ids = {} if path in (MESSAGE, RESPONSE) else {"return_token_ids": True}
    body = asked(server, path, **({"stop": ["@@@@@@"]} if stop else {}))
    whole, cut = await cut_before_two_thirds(server, path, body | ids)
    uncut = (await read(path, whole)).text
    so_far = await read(path, whole[:cut])
    client = so_far.text
    counted = await server.post("/tokenize", prompt=client, add_special_tokens=False)

    rest = rest_of(path, body, so_far, context_tokens=server.max_model_len, text_tokens=counted["count"])

    assert isinstance(rest, Rest)
    assert rest.by_tokens is (path in (CHAT, COMPLETION))
    overlap = begin_rest(so_far, rest)
    answer = await server.http.post(rest.path, content=rest.body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    events = [event + b"\n\n" for event in answer.content.split(b"\n\n") if event]
    if path == RESPONSE:
        assert_one_response(so_far, rest, whole, events)
        return
    more = await read(rest.path, events)
    assert more.text.startswith(overlap)
    assert client + more.text[len(overlap) :] == uncut
    assert more.counted is not None
    assert rest.tokens + more.counted == TOKENS


async def cut_before_two_thirds(server: Server, path: str, body: dict[str, Any]) -> tuple[list[bytes], int]:
    """All events of an answer, and how many of them have a part of its text, two thirds at most.

    It is asked for again where so many tokens came in one event, on a busy machine, that there is no such part.
    """
    for _ in range(MOST_ASKED):
        whole = await events_of(server, path, body)
        texts = [len((await read(path, whole[:at])).text) for at in range(len(whole) + 1)]
        cuts = [at for at in range(len(whole)) if 0 < texts[at] < texts[-1] * 2 // 3]
        if cuts:
            return whole, cuts[-1]
    raise AssertionError(f"{MOST_ASKED} answers came in one piece each")


def assert_one_response(so_far: AnswerSoFar, rest: Rest, uncut: list[bytes], events: list[bytes]) -> None:
    """The events of the rest make one response of the first part: as it would have been, but for what was cached."""
    continued = ContinuedResponse(so_far, rest)
    made = [each for event in events for each in continued.event(event).split(b"\n\n") if each]

    ends = [event_object(each) or {} for each in (made[-1], uncut[-1])]
    assert [end["type"] for end in ends] == ["response.completed"] * 2
    numbers = [(event_object(each) or {})["sequence_number"] for each in made]
    assert numbers == list(range(numbers[0], numbers[0] + len(made)))
    got, wanted = (end["response"] for end in ends)
    assert [each["content"][0]["text"] for each in got["output"]] == [
        each["content"][0]["text"] for each in wanted["output"]
    ]
    for response in (got, wanted):
        response["usage"]["input_tokens_details"] = None
    first = (event_object(uncut[0]) or {})["response"]
    assert (got["id"], got["output"][0]["id"]) == (first["id"], wanted["output"][0]["id"])
    assert {**got, "output": None} == {**wanted, "output": None}


@pytest.mark.parametrize("path", [CHAT, MESSAGE, RESPONSE])
@pytest.mark.parametrize("text", ["and so on", "and so on \n\n", "\n and"])
async def test_a_chat_that_goes_on_is_rendered_as_its_prompt_and_the_text(server: Server, path: str, text: str) -> None:
    """The suite's chat template keeps white space; what the router asks shows it, whatever tokens join."""

    async def ask(path: str, body: bytes) -> bytes:
        answer = await server.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        return answer.content

    body, so_far = asked(server, path), AnswerSoFar()
    so_far.texts, so_far.chars, so_far.has_ids = [text], len(text), False
    rest = rest_of(path, body, so_far, context_tokens=None, text_tokens=None)
    assert isinstance(rest, Rest)

    measured = await measure_rest(ask, server.model, path, body, so_far, rest)

    counted = await server.post("/tokenize", prompt=text, add_special_tokens=False)
    assert (measured.trims, measured.text_tokens) == (False, counted["count"])
