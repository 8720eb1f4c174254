"""A stream that its decoder gives back in the middle, over real sockets: what the client sees, what is asked next."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from dualmap.router.answers.continued_answer import ContinuedAnswer, ending_events
from dualmap.router.answers.head import AnswerHead, Framing
from dualmap.router.answers.rest import CannotContinueError, Rest, rest_of
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.errors import RouterError
from dualmap.router.http.parts import LaterPart
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.request.machine import MAX_CONTINUATIONS
from dualmap.scheduling.request.outcome import Usage
from dualmap.scheduling.settings import SchedulingSettings, SplitSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role

CHAT, COMPLETION, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
WORDS = ["one", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten"]
USAGE_WANTED = {"stream_options": {"include_usage": True}}
GIVEN_BACK = {"finish_reason": "stop", "stop_reason": "recomputed"}


def piece(path: str, text: str, **more: Any) -> dict[str, Any]:
    content = {"delta": {"content": text}} if path == CHAT else {"text": text}
    return {"id": "x", "choices": [{"index": 0, **content, "finish_reason": None, **more}]}


class Fleet:
    """A prefill and two decode instances that answer in words; a decoder gives back what ``stops`` say."""

    def __init__(self, path: str, stops: list[int]) -> None:
        self.path, self.stops = path, stops
        self.prefills: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.cut = ""

    async def prefill(self, talk: Any) -> None:
        if b"/tokenize " in talk.head:
            asked = orjson.loads(talk.body)
            return await talk.answer({} if "messages" in asked else {"count": len(asked["prompt"].split())})
        self.prefills.append(orjson.loads(talk.body))
        return await talk.answer({"choices": [{"text": "x"}], "kv_transfer_params": {"remote_engine_id": "e"}})

    async def decode(self, talk: Any) -> None:
        asked = orjson.loads(talk.body)
        self.asked.append(asked)
        before = asked["messages"][1:] if self.path == CHAT else asked["prompt"].partition("|")[2]
        text = "".join(each["content"] for each in before) if self.path == CHAT else before
        rest = WORDS[WORDS.index(" " + text.split(" ")[-1] if " " in text else text) + 1 :] if text else WORDS
        stop = self.stops.pop(0) if self.stops else None
        await talk.begin_stream()
        if self.path == CHAT:
            await talk.role()
        told = rest if stop is None else rest[:stop]
        for word in told[:-1] if stop is not None and stop > 1 else told:
            await talk.event(piece(self.path, word))
        await asyncio.sleep(0.05)  # what was sent so far reaches the client before the stream is given back
        if stop is not None:  # the last word and the end come in one read, and one chunk
            events = [piece(self.path, told[-1])] if stop > 1 else []
            events.append(piece(self.path, "", **GIVEN_BACK))
            await talk.chunk(b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events))
        elif asked.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 10 + len(WORDS) - len(rest), "completion_tokens": len(rest)}
            await talk.event({"choices": [], "usage": usage})
        await talk.end_stream()


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(split=SplitSettings(mode="always"))


@pytest.fixture
def serve(start_runtime: Any, start_instance: Any, start_router: Any) -> Any:
    async def start(fleet: Fleet, *, connector: str = "mooncake", **settings: Any) -> Any:
        specs = []
        for name, role in (("p", Role.PREFILL), ("q", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE)):
            instance = await start_instance(fleet.prefill if role is Role.PREFILL else fleet.decode)
            specs.append(InstanceSpec(name, instance.url, role, InstanceState.READY))
        runtime = await start_runtime(instances=tuple(specs), pools=(PoolSettings(connector=connector),), **settings)
        router = await start_router(runtime.intake)
        for spec in specs:
            router.plane.usage_requests.saw(spec.url, sends_unrequested=False)
        return router

    return start


def asked(path: str, **more: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi|"}
    return {"model": "default", "stream": True, "max_tokens": 20, **prompt, **more}


def continued(path: str, body: bytes, events: bytes, unsent: bytes = b"") -> Rest:
    """The request for the rest of an answer of which the client has these events, by text."""
    so_far = AnswerSoFar()
    so_far.read(path, events)
    so_far.count_by(path, unsent)
    rest = rest_of(path, orjson.loads(body), so_far, context_tokens=None, text_tokens=None)
    assert isinstance(rest, Rest)
    return rest


def told(path: str, body: bytes) -> tuple[str, list[Any]]:
    """The text of a stream, and its events."""
    events = [orjson.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    choices = [event["choices"][0] for event in events if event.get("choices")]
    texts = [each.get("delta", {}).get("content") if path == CHAT else each["text"] for each in choices]
    return "".join(text or "" for text in texts), events


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stops", [[3], [1], [2, 2]])
async def test_a_stream_that_is_given_back_goes_on_without_a_repeated_or_a_missing_token(
    serve: Any, path: str, stops: list[int]
) -> None:
    fleet = Fleet(path, list(stops))
    client = await (await serve(fleet)).connect()

    client.request(path, asked(path, stream_options={"include_usage": True}))
    answer = await client.answer()

    text, events = told(path, answer.body)
    assert (answer.status, answer.whole, text) == (200, True, "".join(WORDS))
    assert answer.body.count(b"data: [DONE]") == 1
    assert b"recomputed" not in answer.body
    assert sum("role" in choice.get("delta", {}) for event in events for choice in event["choices"]) == (path == CHAT)
    assert [event["usage"] for event in events if event.get("usage")] == [
        {"prompt_tokens": 10, "completion_tokens": len(WORDS)}
    ]
    assert len(fleet.prefills) == len(fleet.asked) == 1 + len(stops)
    assert fleet.asked[-1]["max_tokens"] == 20 - sum(stops)
    if path == CHAT:
        assert fleet.asked[-1]["continue_final_message"] is True
        assert fleet.asked[-1]["add_generation_prompt"] is False
    client.request(path, asked(path))  # the connection is as good as before
    assert told(path, (await client.answer()).body)[0] == "".join(WORDS)


@pytest.mark.parametrize("requests_usage", [False, True])
async def test_usage_stays_hidden_from_a_client_that_did_not_ask(serve: Any, requests_usage: bool) -> None:
    fleet = Fleet(COMPLETION, [3])
    client = await (await serve(fleet)).connect()

    client.request(
        COMPLETION, asked(COMPLETION, **({"stream_options": {"include_usage": True}} if requests_usage else {}))
    )
    answer = await client.answer()

    assert (b'"usage"' in answer.body) is requests_usage
    assert told(COMPLETION, answer.body)[0] == "".join(WORDS)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}),
        (COMPLETION, {"prompt": [1, 2, 3]}),
        (COMPLETION, {"truncate_prompt_tokens": 100}),
        (COMPLETION, {"stop": [" four"], "include_stop_str_in_output": True}),
        (CHAT, {"include_reasoning": False}),
    ],
)
async def test_what_cannot_be_continued_ends_in_an_error_event_that_says_so(
    serve: Any, path: str, more: dict[str, Any]
) -> None:
    fleet = Fleet(path, [2])
    if isinstance(more.get("prompt"), list):
        fleet.path = CHAT  # it finds no text in such a prompt
        more = {**more, "messages": [{"role": "user", "content": "hi"}]}
    client = await (await serve(fleet)).connect()

    client.request(path, asked(path, **more))
    answer = await client.answer()

    assert not answer.whole
    lines = [orjson.loads(line[6:]) for line in answer.body.split(b"\n\n") if line.startswith(b"data: {")]
    (error,) = [line["error"] for line in lines if "error" in line]
    assert "recomputed" in error["message"]
    assert len(fleet.prefills) == 1


async def test_a_stream_that_is_given_back_again_and_again_ends_in_an_error_event(serve: Any) -> None:
    fleet = Fleet(COMPLETION, [1] * (MAX_CONTINUATIONS + 1))
    client = await (await serve(fleet)).connect()

    client.request(COMPLETION, asked(COMPLETION))
    answer = await client.answer()

    text, events = told(COMPLETION, answer.body)
    assert (answer.whole, text) == (False, "".join(WORDS[: MAX_CONTINUATIONS + 1]))
    assert "continued 8 times" in events[-1]["error"]["message"]
    assert len(fleet.asked) == MAX_CONTINUATIONS + 1


async def test_where_no_decoder_gives_streams_back_nothing_is_kept(serve: Any) -> None:
    fleet = Fleet(COMPLETION, [2])
    client = await (await serve(fleet, connector="nixl")).connect()

    client.request(COMPLETION, asked(COMPLETION))
    answer = await client.answer()

    assert not answer.whole
    assert len(fleet.asked) == 1


def test_a_message_of_the_assistant_that_is_to_be_continued_grows() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]
    body = orjson.dumps({"messages": messages, "continue_final_message": True, "min_tokens": 5})
    events = b"".join(b"data: %b\n\n" % orjson.dumps(piece(CHAT, text)) for text in (" am", " here"))

    made = continued(CHAT, body, events)

    assert orjson.loads(made.body)["messages"][-1]["content"] == "I am here"
    assert (orjson.loads(made.body)["min_tokens"], made.tokens) == (3, 2)


def test_reasoning_and_tool_calls_are_not_continued() -> None:
    body = orjson.dumps({"messages": [{"role": "user", "content": "hi"}]})
    for delta in ({"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}):
        with pytest.raises(CannotContinueError):
            continued(CHAT, body, b"data: %b\n\n" % orjson.dumps({"choices": [{"index": 0, "delta": delta}]}))


def test_only_a_text_of_the_assistant_grows() -> None:
    parts = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "I"}]}]
    body = orjson.dumps({"messages": parts, "continue_final_message": True, "add_generation_prompt": False})

    with pytest.raises(CannotContinueError):
        continued(CHAT, body, b"data: %b\n\n" % orjson.dumps(piece(CHAT, " am")))


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_how_an_answer_is_sampled_does_not_change(path: str) -> None:
    how = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "presence_penalty": 0.5,
        "frequency_penalty": 0.4, "repetition_penalty": 1.1, "stop": ["\n"], "stop_token_ids": [9], "ignore_eos": True,
        "logit_bias": {"5": -1.0}, "cache_salt": "s", "priority": 3, "stream": True, "min_tokens": 6, "max_tokens": 9,
        "stream_options": {"include_usage": True},
    }  # fmt: skip

    made = continued(path, orjson.dumps(asked(path, **how)), b"data: %b\n\n" % orjson.dumps(piece(path, "one")))

    sent = orjson.loads(made.body)
    assert {name: sent[name] for name in how} == {**how, "min_tokens": 5, "max_tokens": 8}


def test_a_completion_without_a_limit_has_that_of_the_engine() -> None:
    event = b"data: %b\n\n" % orjson.dumps(piece(COMPLETION, " one"))

    made = continued(COMPLETION, b'{"prompt":"p"}', event * 3)

    assert orjson.loads(made.body)["max_tokens"] == 16 - 3


@pytest.mark.parametrize(("text", "left"), [("", 10 - 5), (" d", 10 - 1)])
def test_the_usage_behind_the_end_counts_the_tokens_unless_the_client_lacks_some(text: str, left: int) -> None:
    sent = b"data: %b\n\n" % orjson.dumps(piece(COMPLETION, "a b c"))
    end = [piece(COMPLETION, text, **GIVEN_BACK), {"choices": [], "usage": {"completion_tokens": 5}}]

    made = continued(
        COMPLETION,
        b'{"prompt":"p","max_tokens":10}',
        sent,
        b"".join(b"data: %b\n\n" % orjson.dumps(each) for each in end),
    )

    assert orjson.loads(made.body) == {"prompt": "pa b c", "max_tokens": left, **USAGE_WANTED}


def test_a_stream_that_is_given_back_twice_is_counted_as_a_whole() -> None:
    body = {"prompt": "p", "max_tokens": 10}
    so_far, sent = AnswerSoFar(), b"data: %b\n\n" % orjson.dumps(piece(COMPLETION, " a"))
    rests = []
    for tokens in (5, 3):
        usage = {"prompt_tokens": 7 + so_far.tokens, "completion_tokens": tokens}
        end = [piece(COMPLETION, "", **GIVEN_BACK), {"choices": [], "usage": usage}]
        so_far.read(COMPLETION, sent)
        so_far.count_by(COMPLETION, b"".join(b"data: %b\n\n" % orjson.dumps(each) for each in end))
        rest = rest_of(COMPLETION, body, so_far, context_tokens=None, text_tokens=None)
        assert isinstance(rest, Rest)
        so_far.by_text(rest.tokens)
        rests.append(rest)

    assert [(rest.tokens, orjson.loads(rest.body)["max_tokens"]) for rest in rests] == [(5, 5), (8, 2)]


def test_the_counts_of_a_rest_are_those_of_the_whole() -> None:
    so_far = AnswerSoFar()
    so_far.by_text(5)

    usage = {"prompt_tokens": 12, "completion_tokens": 3}
    so_far.read(COMPLETION, b"data: %b\n\n" % orjson.dumps({"choices": [], "usage": usage}))

    assert (so_far.prompt_tokens, so_far.tokens) == (7, 8)


@pytest.mark.parametrize("second", [" tw", " two"])
def test_ids_and_log_probabilities_that_the_client_wants_do_not_come_twice(second: str) -> None:
    so_far = AnswerSoFar()
    so_far.prompt_ids = b"1,2,3"
    for text, ids in (("one", [7]), (second, [8])):
        so_far.read(COMPLETION, b"data: %b\n\n" % orjson.dumps(piece(COMPLETION, text, token_ids=ids)))
    body = {"prompt": "p", "max_tokens": 10, "stop": ["four"]}

    rest = rest_of(COMPLETION, body, so_far, context_tokens=None, text_tokens=None)
    assert isinstance(rest, Rest)
    assert (rest.tokens, rest.chars, rest.by_tokens) == (1, 6, True)
    for more, why in (({"return_token_ids": True}, "the ids of its tokens"), ({"logprobs": 1}, "log probabilities")):
        with pytest.raises(CannotContinueError, match=why):
            rest_of(COMPLETION, body | more, so_far, context_tokens=None, text_tokens=None)


def test_a_message_of_which_its_end_alone_is_missing_gets_all_of_that() -> None:
    so_far = AnswerSoFar()
    so_far.begin_block()
    so_far.by_text(4)

    ended = ending_events(MESSAGE, so_far, "length", shows_usage=False)

    told = [orjson.loads(event.split(b"data: ")[1]) for event in ended.split(b"\n\n") if event]
    assert told == [
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": {"output_tokens": 4},
        },
        {"type": "message_stop"},
    ]


class Client:
    """Takes what a stream's client is sent."""

    path, http_10, received_s = MESSAGE, True, 0.0

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.last_words = b""

    def write(self, data: bytes) -> None:
        self.got.append(data)

    def break_off(self, last_words: bytes) -> None:
        self.last_words += last_words

    def set_source(self, source: object) -> None: ...


class NoSource:
    """Is never paused."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def probe(self) -> None: ...

    def give_up(self, error: RouterError) -> None: ...


def continued_answer() -> ContinuedAnswer:
    rest = Rest(CHAT, b"", 4, 10)
    return ContinuedAnswer(MESSAGE, AnswerSoFar(), rest, overlap="", shows_usage=True, shows_ids=False)


def test_an_error_for_the_rest_ends_the_stream_once_in_the_form_of_the_api() -> None:
    client: Any = Client()
    part, source = LaterPart(client, continued_answer()), NoSource()
    body = b'{"error": {"message": "no", "type": "bad_request", "code": 400}}'

    part.send(AnswerHead(400, [], Framing.LENGTH, {}), list, body, is_bare=True, source=source)
    part.finish()

    error = {"type": "error", "error": {"type": "bad_request", "message": "no"}}
    assert orjson.loads(client.last_words.split(b"data: ")[1]) == error
    assert client.got == []


def test_no_more_of_a_prompt_is_cached_than_it_has() -> None:
    client: Any = Client()
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 11}}
    answer = continued_answer()

    counted = LaterPart(client, answer).count(Usage(12, 11, 3))

    assert (counted.prompt_tokens, counted.cached_tokens, counted.output_tokens) == (8, 8, 7)
    assert answer._counted(usage) == {
        "prompt_tokens": 8,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_a_stream_that_counts_its_tokens_is_believed() -> None:
    events = b"data: %b\n\n" % orjson.dumps({**piece(COMPLETION, "a b c"), "usage": {"completion_tokens": 3}})

    made = continued(COMPLETION, b'{"prompt":"p","max_tokens":10}', events)

    assert orjson.loads(made.body) == {"prompt": "pa b c", "max_tokens": 7, **USAGE_WANTED}
