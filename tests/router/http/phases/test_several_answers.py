"""Answering: an instance that fails in the middle of a stream of several answers, and each of them goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from dualmap.router.http import forward
from dualmap.scheduling.request.outcome import Outcome
from tests.router.http.kit import Client, Talk, eventually
from tests.router.http.phases.answers import StartFleet, events

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ON = {"continue_streams": "tokens"}
LETTERS = "abcdefgh"
TOKENS = 6
USAGE = {"stream_options": {"include_usage": True}}


def token_id(letter: str, number: int) -> int:
    return 100 * (1 + LETTERS.index(letter)) + number


class Engine:
    """Answer number i says ``a0 a1 a2 …`` with the i-th letter; of its first answers it breaks after as many tokens as
    ``stops`` say, and each later request once it has told so many tokens of ``later``."""

    def __init__(self, stops: list[int], later: dict[str, int] | None = None, *, tells_ids: bool = True) -> None:
        self.stops, self.later, self.tells_ids = stops, dict(later or {}), tells_ids
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.at_once = self.most_at_once = 0
        self.refuses: str | None = None
        self.all_asked = asyncio.Event()
        self.counted: list[str] = []
        self.holds_counts = 0
        self.all_counting = asyncio.Event()

    async def __call__(self, talk: Talk) -> None:
        path, asked = talk.head.split(b" ")[1].decode(), orjson.loads(talk.body)
        if path == "/tokenize" and "messages" in asked:
            return await talk.answer({})
        if path == "/tokenize":
            return await self.count(talk, asked["prompt"])
        self.asked.append((path, asked))
        if len(self.asked) == 1:
            return await self.answer_all(talk, path, asked)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.answer_one(talk, path, asked)
        finally:
            self.at_once -= 1

    async def count(self, talk: Talk, text: str) -> None:
        """Nothing is counted before it is asked for as many texts as it is to hold, each on a connection of its own."""
        self.counted.append(text)
        if len(self.counted) >= self.holds_counts:
            self.all_counting.set()
        await self.all_counting.wait()
        await talk.answer({"count": len(text.split()), "max_model_len": 4096})

    async def answer_all(self, talk: Talk, path: str, asked: dict[str, Any]) -> None:
        await talk.begin_stream()
        prompts = asked["prompt"] if isinstance(asked.get("prompt"), list) else ["only"]
        each = len(self.stops) // len(prompts)
        for index in range(len(self.stops)):
            if path == CHAT:
                await self.role(talk, index, asked)
        for number in range(TOKENS):
            for index, stop in enumerate(self.stops):
                if number < stop:
                    await self.token(talk, path, asked, index, LETTERS[index], number, prompt=index // each)
        await asyncio.sleep(0.02)
        talk.reset()

    async def answer_one(self, talk: Talk, path: str, asked: dict[str, Any]) -> None:
        letter, said = self.said(path, asked)
        if letter == self.refuses:
            return await talk.answer({"error": {"message": "no such thing", "code": 400}}, 400)
        await talk.begin_stream()
        if path == CHAT:
            await self.role(talk, 0, asked)
        if self.at_once == len([stop for stop in self.stops if stop < TOKENS]) or self.later:
            self.all_asked.set()
        await self.all_asked.wait()  # all of them are there before any goes on
        for number in range(said, TOKENS):
            if self.later.get(letter) == number:
                del self.later[letter]
                await asyncio.sleep(0.02)
                return talk.reset()
            await self.token(talk, path, asked, 0, letter, number, begins=number == said)
        usage = {"prompt_tokens": 3 + said, "completion_tokens": TOKENS - said}
        await talk.event({"id": "y", "created": 2, "choices": [], "usage": usage})
        return await talk.end_stream()

    def said(self, path: str, asked: dict[str, Any]) -> tuple[str, int]:
        """The letter of the answer that is to go on, and how many tokens it has."""
        if path == CHAT:
            last = asked["messages"][-1]
            words = last["content"].split() if last["role"] == "assistant" else []
            return (words[0][0], len(words)) if words else ("h", 0)
        prompt = asked["prompt"]
        if isinstance(prompt, str):
            words = prompt.partition("|")[2].split()
            return words[0][0], len(words)
        return LETTERS[prompt[3] // 100 - 1], len(prompt) - 3

    async def role(self, talk: Talk, index: int, asked: dict[str, Any]) -> None:
        role = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await self.tell(talk, role, prompt_token_ids=[1, 2, 3] if self.with_ids(asked) else None)

    def with_ids(self, asked: dict[str, Any]) -> bool:
        return self.tells_ids and bool(asked.get("return_token_ids"))

    async def token(
        self,
        talk: Talk,
        path: str,
        asked: dict[str, Any],
        index: int,
        letter: str,
        number: int,
        *,
        prompt: int = 0,
        begins: bool = False,
    ) -> None:
        text, ends = f" {letter}{number}", number + 1 == TOKENS
        choice: dict[str, Any] = {"index": index, "finish_reason": "length" if ends else None, "logprobs": None}
        choice |= {"delta": {"content": text}} if path == CHAT else {"text": text}
        choice["token_ids"] = [token_id(letter, number)] if self.with_ids(asked) else None
        if path == COMPLETION:
            first = (begins or number == 0) and self.with_ids(asked)
            choice["prompt_token_ids"] = [1 + prompt, 2, 3] if first else None
        await self.tell(talk, choice)

    async def tell(self, talk: Talk, choice: dict[str, Any], **more: Any) -> None:
        number = len(self.asked)
        await talk.event({"id": f"id-{number}", "created": number, "model": "m", "choices": [choice], **more})


def ask(client: Client, path: str, **more: Any) -> None:
    prompt = {"prompt": "hi|"} if path == COMPLETION else {"messages": [{"role": "user", "content": "hi"}]}
    client.request(path, {"model": "m", "stream": True, "max_tokens": TOKENS, **prompt, **more})


def texts(body: bytes) -> dict[int, str]:
    """The text of each choice."""
    told: dict[int, str] = {}
    for choice in (choice for event in events(body) for choice in event.get("choices", ())):
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        told[choice["index"]] = told.get(choice["index"], "") + text
    return told


def whole(letter: str) -> str:
    return "".join(f" {letter}{number}" for number in range(TOKENS))


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("tells_ids", [True, False])
async def test_each_answer_that_is_not_over_goes_on_under_its_index(
    fleet: StartFleet, path: str, tells_ids: bool
) -> None:
    engine = Engine([2, TOKENS, 3], tells_ids=tells_ids)
    intake, _, client = await fleet(engine, engine, settings=ON)

    ask(client, path, n=3, seed=5, **USAGE)
    answer = await client.answer()

    assert (answer.whole, texts(answer.body)) == (True, {index: whole(LETTERS[index]) for index in range(3)})
    told = events(answer.body)
    assert {(event["id"], event["created"]) for event in told} == {("id-1", 1)}
    choices = [choice for event in told for choice in event["choices"]]
    assert sum("role" in choice.get("delta", {}) for choice in choices) == (3 if path == CHAT else 0)
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2]
    assert not any(choice.get("token_ids") or choice.get("prompt_token_ids") for choice in choices)
    assert not any(event.get("prompt_token_ids") for event in told)
    assert [event["usage"] for event in told if event.get("usage")] == [
        {"prompt_tokens": 3, "total_tokens": 3 + 3 * TOKENS, "completion_tokens": 3 * TOKENS}
    ]
    assert answer.body.endswith(b"data: [DONE]\n\n")
    (_, first), *rests = engine.asked
    assert (first["n"], len(rests), engine.most_at_once) == (3, 2, 2)
    assert sorted((rest["seed"], rest["max_tokens"]) for _, rest in rests) == [(5, TOKENS - 2), (7, TOKENS - 3)]
    assert all("n" not in rest and way == (COMPLETION if tells_ids else path) for way, rest in rests)
    placed = intake.placed_request
    assert (placed.sent_tokens, placed.first_tokens) == ([5 + TOKENS], 2)
    (outcome, usage), *_ = placed.finished
    assert (outcome, usage and usage.output_tokens) == (Outcome.COMPLETED, 3 * TOKENS)


async def test_answers_to_several_prompts_go_on_with_their_own(fleet: StartFleet) -> None:
    engine = Engine([2, 3, 1, 2])
    _, _, client = await fleet(engine, engine, settings=ON)

    ask(client, COMPLETION, prompt=["one|", "two|"], n=2, **USAGE)
    answer = await client.answer()

    assert texts(answer.body) == {index: whole(LETTERS[index]) for index in range(4)}
    assert sorted(rest["prompt"][:4] for _, rest in engine.asked[1:]) == [
        [1, 2, 3, token_id("a", 0)],
        [1, 2, 3, token_id("b", 0)],
        [2, 2, 3, token_id("c", 0)],
        [2, 2, 3, token_id("d", 0)],
    ]
    assert events(answer.body)[-1]["usage"]["prompt_tokens"] == 6


async def test_an_answer_that_breaks_again_goes_on_alone(fleet: StartFleet) -> None:
    engine = Engine([2, 3], {"b": 4})
    intake, _, client = await fleet(engine, engine, engine, settings=ON)

    ask(client, COMPLETION, n=2)
    answer = await client.answer()

    assert (answer.whole, texts(answer.body)) == (True, {0: whole("a"), 1: whole("b")})
    assert not any(event.get("usage") for event in events(answer.body))
    assert len(engine.asked) == 4
    assert (len(engine.asked[-1][1]["prompt"]), engine.asked[-1][1]["max_tokens"]) == (3 + 4, TOKENS - 4)
    assert intake.placed_request.sent_tokens == [5, TOKENS + 4]


async def test_an_error_for_one_of_them_ends_the_stream_once(fleet: StartFleet) -> None:
    engine = Engine([2, 3])
    engine.refuses = "b"
    intake, _, client = await fleet(engine, engine, settings=ON)

    ask(client, COMPLETION, n=2)
    answer = await client.answer()

    assert not answer.whole
    assert [event["error"]["message"] for event in events(answer.body) if "error" in event] == ["no such thing"]
    assert intake.placed_request.outcome is Outcome.CLIENT_ERROR


async def test_what_no_instance_is_left_for_ends_with_an_error_event(fleet: StartFleet) -> None:
    engine = Engine([2, 3])
    intake, _, client = await fleet(engine, settings=ON)

    ask(client, CHAT, n=2)
    answer = await client.answer()

    assert "no instance is left" in events(answer.body)[-1]["error"]["message"]
    assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED


async def test_answers_that_are_all_over_lack_their_end_alone(fleet: StartFleet) -> None:
    engine = Engine([TOKENS, TOKENS])
    _, _, client = await fleet(engine, engine, settings=ON)

    ask(client, CHAT, n=2, **USAGE)
    answer = await client.answer()

    assert (answer.whole, texts(answer.body)) == (True, {0: whole("a"), 1: whole("b")})
    assert events(answer.body)[-1]["usage"]["completion_tokens"] == 2 * TOKENS
    assert len(engine.asked) == 1


async def test_the_texts_of_all_answers_are_counted_at_once(fleet: StartFleet) -> None:
    # given an engine that counts none of them before it was asked for all
    engine = Engine([2, 1, 4, 3], tells_ids=False)
    engine.holds_counts = 4
    _, _, client = await fleet(engine, engine, settings=ON)

    ask(client, CHAT, n=4)
    answer = await client.answer()

    assert (answer.whole, texts(answer.body)) == (True, {index: whole(LETTERS[index]) for index in range(4)})
    assert sorted(engine.counted) == [" a0 a1", " b0", " c0 c1 c2 c3", " d0 d1 d2"]
    assert sorted(rest["max_tokens"] for _, rest in engine.asked[1:]) == [2, 3, 4, 5]


async def test_one_text_that_is_not_counted_in_time_delays_the_others_by_that_time_alone(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "MEASURED_WITHIN_S", 0.5)

    class CountsOne(Engine):
        async def count(self, talk: Talk, text: str) -> None:
            self.counted.append(text)
            if len(self.counted) == 3:
                self.all_counting.set()
            if text != " a0 a1":
                return await talk.until_closed()
            await self.all_counting.wait()
            return await talk.answer({"count": 3, "max_model_len": 4096})

    engine = CountsOne([2, 1, 4], tells_ids=False)
    _, _, client = await fleet(engine, engine, settings=ON)

    ask(client, CHAT, n=3)
    answer = await client.answer()

    assert (answer.whole, texts(answer.body)) == (True, {index: whole(LETTERS[index]) for index in range(3)})
    limits = {rest["messages"][-1]["content"]: rest["max_tokens"] for _, rest in engine.asked[1:]}
    assert limits == {" a0 a1": TOKENS - 3, " b0": TOKENS - 1, " c0 c1 c2 c3": TOKENS - 4}, "the others by their events"


async def test_the_longest_context_is_asked_for_once(fleet: StartFleet) -> None:
    engine = Engine([2, 1, 3])
    _, _, client = await fleet(engine, engine, settings=ON)

    ask(client, CHAT, n=3, max_tokens=None)
    answer = await client.answer()

    assert (answer.whole, engine.counted) == (True, [""])
    assert sorted(rest["max_tokens"] for _, rest in engine.asked[1:]) == [4096 - 3 - said for said in (3, 2, 1)]


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_a_client_that_leaves_while_texts_are_counted_leaves_no_connection_open(
    fleet: StartFleet, leave: str
) -> None:
    engine = Engine([2, 1, 3], tells_ids=False)
    engine.holds_counts = 99
    intake, [_, second], client = await fleet(engine, engine, settings=ON)
    ask(client, CHAT, n=3)
    await eventually(lambda: len(engine.counted) == 3)

    getattr(client, leave)()

    await eventually(lambda: intake.placed_request.finished)
    assert intake.placed_request.outcome is Outcome.CLIENT_GONE
    engine.all_counting.set()  # it answers calls that have no waiter, and sees that its connections are closed
    await eventually(lambda: second.open == 0)
    assert len(engine.asked) == 1


async def test_a_client_that_leaves_between_two_instances_is_noticed_again_at_the_second_failure(
    fleet: StartFleet,
) -> None:
    class CountsOnce(Engine):
        async def count(self, talk: Talk, text: str) -> None:
            self.counted.append(text)
            if len(self.counted) <= 2:
                return await talk.answer({"count": len(text.split()), "max_model_len": 4096})
            return await talk.until_closed()

    engine = CountsOnce([2, 3], {"a": 4, "b": 5}, tells_ids=False)
    intake, _, client = await fleet(engine, engine, engine, settings=ON)
    ask(client, COMPLETION, n=2)
    await eventually(lambda: len(engine.counted) > 2)

    client.close()

    await eventually(lambda: intake.placed_request.finished)
    assert intake.placed_request.outcome is Outcome.CLIENT_GONE
