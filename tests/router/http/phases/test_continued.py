"""Answering: an instance that fails in the middle of a stream, and another one that goes on with it."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from typing import Any

import orjson
import pytest

from dualmap.router.http.plane import KEPT_PART
from dualmap.scheduling.request.outcome import FailureKind, Outcome
from tests.router.http.kit import Client, Machine, Talk, eventually
from tests.router.http.phases.answers import StartFleet, events

CHAT, COMPLETION, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
WORDS = ["one", " two", " three", " four", " five", " six"]
ON = {"continue_streams": "tokens"}
PROMPT = [1, 2, 3]


class Engine:
    """Answers in words, each of them a token; the first answer fails as ``fails`` does, after so many."""

    def __init__(self, fails: Any, after: int = 3, *, held_chars: int = 0, tells_ids: bool = True) -> None:
        self.fails, self.after, self.held_chars, self.tells_ids = fails, after, held_chars, tells_ids
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.goes_on_wrong = False
        self.counts = True
        self.counts_after_s = 0.0

    async def __call__(self, talk: Talk) -> None:
        path, asked = talk.head.split(b" ")[1].decode(), orjson.loads(talk.body)
        if path == "/tokenize" and (not self.counts or "messages" in asked):
            return await talk.answer({})
        if path == "/tokenize":
            await asyncio.sleep(self.counts_after_s)
            return await talk.answer({"count": len(asked["prompt"].split()), "max_model_len": 4096})
        self.asked.append((path, asked))
        said, is_first = self.said(path, asked), len(self.asked) == 1
        ids = bool(asked.get("return_token_ids")) and self.tells_ids
        await talk.begin_stream()
        if path == CHAT:
            delta = {"role": "assistant", "content": ""}
            role = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            await self.tell(talk, role, asked, prompt_token_ids=PROMPT if ids else None)
        last = min(len(WORDS), said + asked.get("max_tokens", 99))
        told = 0
        for token in range(said, last):
            text = "".join(WORDS[said : token + 1])
            if is_first and token == self.after:
                await asyncio.sleep(0.02)  # let the tokens out: a reset overtakes them
                return await self.fails(talk)
            ends = token + 1 == last
            shown = len(text) if ends else max(0, len(text) - self.held_chars)
            text, told = text[told:shown], shown
            if self.goes_on_wrong and not is_first:
                text = "?" + text
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if ends else None, "logprobs": None}
            choice |= {"delta": {"content": text}} if path == CHAT else {"text": text}
            choice["token_ids"] = [100 + token] if ids else None
            if path == COMPLETION:
                choice["prompt_token_ids"] = PROMPT if ids and token == said else None
            await self.tell(talk, choice, asked)
        if is_first and self.after == last:
            await asyncio.sleep(0.02)
            return await self.fails(talk)
        if asked.get("stream_options"):
            usage = {"prompt_tokens": len(PROMPT) + said, "completion_tokens": last - said}
            await talk.event({"id": "y", "created": 2, "choices": [], "usage": usage})
        await talk.end_stream()
        return None

    def said(self, path: str, asked: dict[str, Any]) -> int:
        """Tokens of the answer with which the prompt ends."""
        if path == CHAT:
            last = asked["messages"][-1]
            return len(last["content"].split()) if last["role"] == "assistant" else 0
        prompt = asked["prompt"]
        return len(prompt) - len(PROMPT) if isinstance(prompt, list) else len(prompt.partition("|")[2].split())

    async def tell(self, talk: Talk, choice: dict[str, Any], asked: dict[str, Any], **more: Any) -> None:
        number = len(self.asked)
        await talk.event({"id": f"id-{number}", "created": number, "model": "m", "choices": [choice], **more})


async def breaks(talk: Talk) -> None:
    talk.reset()


async def ends_early(talk: Talk) -> None:
    await talk.send(b"0\r\n\r\n")


async def ends_in_an_event(talk: Talk) -> None:
    await talk.send(b'd\r\ndata: {"choic\r\n0\r\n\r\n')


async def breaks_in_an_event(talk: Talk) -> None:
    await talk.send(b'40\r\ndata: {"choi')
    await asyncio.sleep(0.02)
    talk.reset()


async def tells_an_error(talk: Talk) -> None:
    await talk.event({"error": {"message": "EngineCore encountered an issue", "code": 500}})
    await talk.end_stream()


async def aborts(talk: Talk) -> None:
    choice = {"index": 0, "text": "", "delta": {}, "finish_reason": "abort"}
    await talk.event({"id": "id-1", "created": 1, "model": "m", "choices": [choice]})
    await talk.end_stream()


async def hangs(talk: Talk) -> None:
    await talk.until_closed()


def ask(client: Client, path: str, **more: Any) -> None:
    prompt = {"prompt": "hi|"} if path == COMPLETION else {"messages": [{"role": "user", "content": "hi"}]}
    client.request(path, {"model": "m", "stream": True, **prompt, **more})


def named_events(body: bytes) -> list[Any]:
    """The events of a message."""
    return [orjson.loads(event.split(b"data: ")[1]) for event in body.split(b"\n\n") if event]


async def begins_message(talk: Talk, **more: Any) -> None:
    """Tells the begin of a message, and breaks."""
    await talk.begin_stream()
    for event in (
        {"type": "message_start", "message": {"id": "msg", "type": "message", **more}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I look"}},
    ):
        await talk.chunk(b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), orjson.dumps(event)))
    await asyncio.sleep(0.02)
    talk.reset()


def text_of(body: bytes) -> str:
    choices = [choice for event in events(body) for choice in event.get("choices", ())]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    "fails", [breaks, ends_early, ends_in_an_event, breaks_in_an_event, tells_an_error, aborts, hangs]
)
async def test_a_stream_goes_on_by_its_tokens_whatever_failed_its_instance(
    fleet: StartFleet, path: str, fails: Any
) -> None:
    engine = Engine(fails)
    settings = {**ON, "client_timeout_s": 0.4, "chunk_timeout_s": 0.2 if fails is hangs else 120.0}
    intake, _, client = await fleet(engine, engine, settings=settings)

    ask(
        client,
        path,
        stream_options={"include_usage": True},
        seed=5,
        **({"max_tokens": 20} if path == COMPLETION else {}),
    )
    answer = await client.answer()

    assert (answer.whole, text_of(answer.body)) == (True, "".join(WORDS)), answer.body
    told = events(answer.body)
    assert {(event["id"], event["created"]) for event in told if event["choices"]} == {("id-1", 1)}
    assert not any(choice.get("token_ids") for event in told for choice in event["choices"])
    assert told[-1]["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": len(WORDS)}
    assert sum("role" in choice.get("delta", {}) for event in told for choice in event["choices"]) == (path == CHAT)
    assert answer.body.endswith(b"data: [DONE]\n\n")
    (_, first), (way, rest) = engine.asked
    assert first["return_token_ids"] is True
    assert (way, rest["prompt"], rest["seed"]) == (COMPLETION, [*PROMPT, 100, 101, 102], 5)
    assert rest["max_tokens"] == (4096 - len(PROMPT) if path == CHAT else 20) - 3
    assert "messages" not in rest
    assert intake.placed_request.sent_tokens == [3]
    (outcome, usage), *_ = intake.placed_request.finished
    assert (outcome, usage and usage.prompt_tokens, usage and usage.output_tokens) == (Outcome.COMPLETED, 3, 6)


async def test_an_engine_without_ids_goes_on_by_text(fleet: StartFleet) -> None:
    engine = Engine(breaks, tells_ids=False)
    _, _, client = await fleet(engine, engine, settings=ON)

    ask(client, CHAT, max_tokens=20)
    answer = await client.answer()

    assert text_of(answer.body) == "".join(WORDS)
    way, rest = engine.asked[1]
    assert (way, rest["messages"][-1]) == (CHAT, {"role": "assistant", "content": "one two three"})
    assert (rest["max_tokens"], rest["continue_final_message"], rest["add_generation_prompt"]) == (17, True, False)


async def test_a_busy_instance_has_time_to_count_the_tokens_so_that_the_limit_holds(fleet: StartFleet) -> None:
    async def several_tokens_an_event(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.event({"id": "id-1", "created": 1, "choices": [{"index": 0, "delta": {"content": "one two three"}}]})
        await asyncio.sleep(0.02)
        talk.reset()

    engine = Engine(breaks, after=99, tells_ids=False)
    engine.counts_after_s = 1.2
    _, _, client = await fleet(several_tokens_an_event, engine, settings=ON)

    ask(client, CHAT, max_tokens=5)
    answer = await client.answer()

    assert (text_of(answer.body), engine.asked[0][1]["max_tokens"]) == ("one two three four five", 2)


async def test_what_an_engine_holds_back_for_a_stop_string_comes_once(fleet: StartFleet) -> None:
    engine = Engine(breaks, after=4, held_chars=3)
    _, _, client = await fleet(engine, engine, settings=ON)

    ask(client, COMPLETION, max_tokens=20, stop=["sixs"], temperature=0)
    answer = await client.answer()

    assert text_of(answer.body) == "".join(WORDS)
    assert engine.asked[1][1]["prompt"] == [*PROMPT, 100, 101, 102], "the client has a part of the fourth token"


async def test_a_rest_that_does_not_fit_in_the_middle_of_a_token_ends_the_stream(fleet: StartFleet) -> None:
    engine = Engine(breaks, after=4, held_chars=3)
    engine.goes_on_wrong = True
    intake, _, client = await fleet(engine, engine, settings=ON)

    ask(client, COMPLETION, max_tokens=20, stop=["sixs"])
    answer = await client.answer()

    assert not answer.whole
    assert "does not go on" in events(answer.body)[-1]["error"]["message"]
    assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED


async def test_what_goes_on_by_its_text_does_not_where_an_engine_holds_characters_back(fleet: StartFleet) -> None:
    engine = Engine(breaks, after=4, held_chars=3, tells_ids=False)
    intake, _, client = await fleet(engine, engine, settings=ON)

    ask(client, COMPLETION, max_tokens=20, stop=["sixs"])
    answer = await client.answer()

    assert "stop strings hold its text back" in events(answer.body)[-1]["error"]["message"]
    assert (len(engine.asked), intake.placed_request.outcome) == (1, Outcome.UPSTREAM_FAILED)


async def test_an_instance_that_only_counted_is_not_blamed_for_a_rest_that_there_is_not(fleet: StartFleet) -> None:
    engine = Engine(breaks, after=4, held_chars=3)
    engine.counts = False
    intake, _, client = await fleet(engine, engine, settings=ON)

    ask(client, CHAT, stop=["sixs"])
    answer = await client.answer()

    assert "stop strings hold its text back" in events(answer.body)[-1]["error"]["message"]
    placed = intake.placed_request
    assert (len(engine.asked), placed.outcome) == (1, Outcome.UPSTREAM_FAILED)
    assert (len(placed.failures), placed.faults) == (1, [])


@pytest.mark.parametrize("comment", [b"", b": wait\n\n"])
async def test_a_failure_that_comes_with_the_first_event_is_not_passed_on(fleet: StartFleet, comment: bytes) -> None:
    engine = Engine(breaks, after=len(WORDS) + 1)
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    abort = {"index": 0, "delta": {}, "finish_reason": "abort"}

    async def aborts_at_once(talk: Talk) -> None:
        await talk.begin_stream()
        told = [orjson.dumps({"id": "id-0", "created": 0, "model": "m", "choices": [each]}) for each in (role, abort)]
        await talk.chunk(comment + b"".join(b"data: %b\n\n" % event for event in told) + b"data: [DONE]\n\n")
        await talk.chunk(b"")

    _, _, client = await fleet(aborts_at_once, engine, settings=ON)
    ask(client, CHAT)
    answer = await client.answer()

    assert (answer.whole, text_of(answer.body)) == (True, "".join(WORDS))
    told = [choice for event in events(answer.body) for choice in event["choices"]]
    assert [choice["finish_reason"] for choice in told if choice["finish_reason"]] == ["length"]
    assert sum("role" in choice["delta"] for choice in told) == 1


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"n": 17}, "more than 16 answers"),
        (COMPLETION, {"best_of": 2}, "best_of"),
        (CHAT, {"n": 2, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        (COMPLETION, {"structured_outputs": {"json": {}}}, "structured_outputs"),
        (COMPLETION, {"stop": "x", "include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ],
)
async def test_what_is_not_continued_ends_in_an_error_event(
    fleet: StartFleet, path: str, more: dict[str, Any], why: str
) -> None:
    engine = Engine(breaks)
    intake, _, client = await fleet(engine, engine, settings=ON)

    ask(client, path, **more)
    answer = await client.answer()

    assert not answer.whole
    assert "broke off" in events(answer.body)[-1]["error"]["message"]
    assert "return_token_ids" not in engine.asked[0][1]
    assert len(engine.asked) == len(intake.placed_request.faults) == 1


async def test_an_answer_in_its_reasoning_is_not_continued_and_says_so(fleet: StartFleet) -> None:
    async def reasons(talk: Talk) -> None:
        await talk.begin_stream()
        delta = {"reasoning": "hm"}
        await talk.event({"id": "x", "choices": [{"index": 0, "delta": delta, "token_ids": [4]}]})
        await asyncio.sleep(0.02)
        talk.reset()

    _, _, client = await fleet(reasons, reasons, settings=ON)
    ask(client, CHAT)

    answer = await client.answer()

    assert "it was in its reasoning" in events(answer.body)[-1]["error"]["message"]


async def test_an_answer_that_lacks_its_end_alone_is_ended_without_another_instance(fleet: StartFleet) -> None:
    engine = Engine(breaks, after=len(WORDS))
    intake, _, client = await fleet(engine, settings=ON)

    ask(client, COMPLETION, max_tokens=6, stream_options={"include_usage": True})
    answer = await client.answer()

    assert (answer.whole, text_of(answer.body)) == (True, "".join(WORDS))
    assert events(answer.body)[-1]["usage"] == {"prompt_tokens": 3, "total_tokens": 9, "completion_tokens": 6}
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert (len(engine.asked), intake.placed_request.outcome) == (1, Outcome.COMPLETED)


async def test_a_client_that_left_is_not_continued(fleet: StartFleet) -> None:
    failing = asyncio.Event()

    async def fails_later(talk: Talk) -> None:
        await failing.wait()
        talk.reset()

    engine = Engine(fails_later)
    intake, _, client = await fleet(engine, engine, settings=ON)
    ask(client, COMPLETION)
    await client.head()
    client.writer.transport.abort()
    await eventually(lambda: intake.placed_request.finished)
    failing.set()

    assert intake.placed_request.outcome is Outcome.CLIENT_GONE
    assert len(engine.asked) == 1


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_nothing_is_asked_on_for_a_client_that_leaves_between_two_instances(
    fleet: StartFleet, leave: str
) -> None:
    counting = asyncio.Event()

    async def counts_never(talk: Talk) -> None:
        counting.set()
        await talk.until_closed()

    engine = Engine(breaks, tells_ids=False)
    intake, [_, second], client = await fleet(engine, counts_never, settings=ON)
    ask(client, COMPLETION, max_tokens=20)
    await counting.wait()

    getattr(client, leave)()

    await eventually(lambda: intake.placed_request.finished)
    assert intake.placed_request.outcome is Outcome.CLIENT_GONE
    await eventually(lambda: second.open == 0)
    assert [talk.head.split(b" ")[1] for talk in second.talks] == [b"/tokenize"]


async def test_a_client_that_has_comments_alone_and_leaves_before_the_next_instance_is_noticed(
    fleet: StartFleet,
) -> None:
    async def comments_alone(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.chunk(b": wait\n\n")
        talk.reset()

    second = Engine(breaks)
    intake, _, client = await fleet(comments_alone, second, settings=ON)
    intake.gate_of_retries = asyncio.Event()
    ask(client, COMPLETION, max_tokens=20)
    await eventually(lambda: intake.placed_requests and intake.placed_request.failures)

    client.close()

    await eventually(lambda: intake.placed_request.finished)
    assert intake.placed_request.outcome is Outcome.CLIENT_GONE
    assert second.asked == []


async def test_a_client_that_closed_its_half_between_two_instances_gets_the_rest(fleet: StartFleet) -> None:
    counting, counted = asyncio.Event(), asyncio.Event()
    engine = Engine(breaks, tells_ids=False)

    async def counts_late(talk: Talk) -> None:
        if b"/tokenize " not in talk.head:
            return await engine(talk)
        counting.set()
        await counted.wait()
        return await talk.answer({"count": 3, "max_model_len": 4096})

    _, _, client = await fleet(engine, counts_late, settings=ON)
    ask(client, COMPLETION, max_tokens=20)
    await counting.wait()

    client.writer.write_eof()
    await asyncio.sleep(0.3)  # until it was asked more than once whether it is there
    counted.set()

    assert text_of((await client.answer()).body) == "".join(WORDS)


@pytest.mark.parametrize(("tells_ids", "by"), [(True, b"tokens"), (False, b"text")])
async def test_a_client_is_told_where_it_goes_on_and_by_what_if_the_router_is_to_say_so(
    fleet: StartFleet, tells_ids: bool, by: bytes
) -> None:
    engine = Engine(breaks, tells_ids=tells_ids)
    _, _, client = await fleet(engine, engine, settings={**ON, "tell_continuations": True})

    ask(client, COMPLETION, max_tokens=20)
    answer = await client.answer()

    assert b": dualmap: goes on at i1 after 3 tokens, by %b\n\n" % by in answer.body
    assert text_of(answer.body) == "".join(WORDS)


async def test_a_message_goes_on_as_a_chat_that_may_call_a_tool(fleet: StartFleet) -> None:
    async def answers(talk: Talk) -> None:
        await begins_message(talk, content=[], usage={"input_tokens": 9, "output_tokens": 0})

    rests: list[dict[str, Any]] = []

    async def goes_on(talk: Talk) -> None:
        asked = orjson.loads(talk.body)
        if b"/tokenize " in talk.head:
            return await talk.answer({"count": 2, "max_model_len": 4096})
        rests.append(asked)
        await talk.begin_stream()
        await talk.role()
        call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at":'}}
        more = {"index": 0, "function": {"arguments": "1}"}}
        for delta, reason in (
            ({"content": " there"}, None),
            ({"tool_calls": [call]}, None),
            ({"tool_calls": [more]}, None),
            ({}, "tool_calls"),
        ):
            await talk.event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
        await talk.event({"id": "x", "choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 8}})
        await talk.end_stream()
        return None

    _, _, client = await fleet(answers, goes_on, settings=ON)
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    ask(client, MESSAGE, max_tokens=50, tools=tools, system="be brief")
    answer = await client.answer()

    told = named_events(answer.body)
    kinds = [(event["type"], event.get("index")) for event in told]
    assert kinds == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert told[5]["content_block"] == {"type": "tool_use", "id": "call-1", "name": "look", "input": {}}
    assert "".join(event["delta"]["partial_json"] for event in told[6:8]) == '{"at":1}'
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    assert (told[-2]["usage"]["input_tokens"], told[-2]["usage"]["output_tokens"]) == (9, 10)
    (rest,) = rests
    assert rest["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look"},
    ]
    assert (rest["max_tokens"], rest["tools"][0]["function"]["name"]) == (48, "look")


async def test_a_message_whose_rest_lacks_its_end_alone_is_told_why_it_stopped(fleet: StartFleet) -> None:
    async def goes_on(talk: Talk) -> None:
        if b"/tokenize " in talk.head:
            return await talk.answer({"count": 2, "max_model_len": 4096})
        await talk.begin_stream()
        for delta, reason in (({"content": " there"}, None), ({}, "stop")):
            await talk.event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
        await asyncio.sleep(0.02)
        talk.reset()
        return None

    intake, _, client = await fleet(begins_message, goes_on, settings=ON)
    ask(client, MESSAGE, max_tokens=50)
    answer = await client.answer()

    told = named_events(answer.body)
    assert [event["type"] for event in told[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert told[-2]["delta"]["stop_reason"] == "end_turn"
    assert told[-2]["usage"]["output_tokens"] == 3
    assert (answer.whole, intake.placed_request.outcome) == (True, Outcome.COMPLETED)


async def test_a_silent_stream_goes_on_soon_where_the_port_of_its_instance_refuses(fleet: StartFleet) -> None:
    engine = Engine(hangs)
    intake, [first, _], client = await fleet(engine, engine, settings={**ON, "client_timeout_s": 0.4})
    ask(client, COMPLETION, max_tokens=20)
    await client.head()
    await eventually(lambda: first.talks)
    first.close_port()

    answer = b""
    while chunk := await client.chunk():
        answer += chunk

    assert text_of(answer) == "".join(WORDS)
    assert "closed its port" in intake.placed_request.failures[0].detail


@pytest.mark.parametrize("after", [0, 3])
async def test_an_answer_that_is_evicted_goes_on_elsewhere_from_where_it_was(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(Machine, "is_evictable", True)
    engine = Engine(hangs, after=after)
    intake, _, client = await fleet(engine, engine, settings=ON)

    ask(client, COMPLETION, max_tokens=20)
    await eventually(lambda: engine.asked and (not after or intake.placed_request.first_tokens))
    await asyncio.sleep(0.05)  # the tokens before the silence have come
    placed = intake.placed_request
    assert placed.on_evict is not None
    placed.on_evict("a request of a higher class needs it")
    answer = await client.answer()

    assert (answer.whole, text_of(answer.body)) == (True, "".join(WORDS))
    assert [failure.kind for failure in placed.failures] == [FailureKind.EVICTED]
    assert placed.sent_tokens == [after or None]


async def test_an_answer_in_its_reasoning_stays_where_it_is_to_leave(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "is_evictable", True)
    going_on = asyncio.Event()

    async def reasons(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.event({"id": "x", "choices": [{"index": 0, "delta": {"reasoning": "hm"}, "token_ids": [4]}]})
        await going_on.wait()
        await talk.event({"id": "x", "choices": [{"index": 0, "delta": {"content": "so"}, "finish_reason": "stop"}]})
        await talk.end_stream()

    intake, _, client = await fleet(reasons, reasons, settings=ON)
    ask(client, CHAT)
    await eventually(lambda: intake.placed_requests and intake.placed_request.first_tokens)
    placed = intake.placed_request
    assert placed.on_evict is not None
    placed.on_evict("a request of a higher class needs it")
    await asyncio.sleep(0.05)
    going_on.set()

    answer = await client.answer()

    assert (answer.whole, text_of(answer.body), placed.failures) == (True, "so", [])


async def test_the_request_of_a_stream_that_became_too_long_to_be_kept_leaves_the_memory(fleet: StartFleet) -> None:
    prompt_bytes, going_on, ending = 3 << 20, asyncio.Event(), asyncio.Event()

    async def script(talk: Talk) -> None:
        talk.body = b""
        await talk.begin_stream()
        await talk.token("a")
        await going_on.wait()
        for number in range(4):  # what does not compress
            await talk.token(random.Random(number).randbytes(100_000).hex())
        await talk.token("b")
        await ending.wait()
        await talk.end_stream()

    _, _, client = await fleet(
        script,
        settings={**ON, "max_body_bytes": 2 * prompt_bytes, "memory_bytes": KEPT_PART * (prompt_bytes + (200 << 10))},
    )
    tracemalloc.start()
    try:
        messages = [{"role": "user", "content": "x" * prompt_bytes}]
        client.request(CHAT, {"model": "m", "stream": True, "messages": messages})
        del messages
        await client.head()
        await client.chunk()
        assert tracemalloc.get_traced_memory()[0] > prompt_bytes, "it could go on"
        going_on.set()
        while b'"b"' not in await client.chunk():
            pass
        assert tracemalloc.get_traced_memory()[0] < prompt_bytes / 2
    finally:
        tracemalloc.stop()
    ending.set()
    assert (await client.chunk()) == b"data: [DONE]\n\n"
