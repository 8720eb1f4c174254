"""Answers that go on by their text, at instances whose chat templates write an answer that is continued otherwise than
one that is begun: the client reads the answer that one instance alone would have given, or an error at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.api_bodies.responses_api import chat_of_response
from dualmap.router.answers.rest import CannotContinueError, Measured, Rest
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.http.continued_chat import measure_rest
from dualmap.router.tokens.chat_template import ChatTemplate
from tests.router.http.kit import Client, Talk
from tests.router.http.phases.answers import StartFleet

CHAT, MESSAGE, RESPONSE = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ON = {"continue_streams": "text"}

KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS_ALL = (  # as Llama 3.x
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TRIMS_AND_RENAMES = (  # as Gemma 3
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
THINKS = (  # as Qwen3
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set content = m.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = ["Two", " lines", ":", "\n", "\n", "one", " ", " two", ".", "  ", "\n\n", "The", "\tend", "."]
THOUGHT = ["<think>", "\n", "Hm", ".", "\n", "</think>", "\n\n", "It", " is", " ", "so", "."]


class Engine:
    """Goes on with one answer wherever its prompt ends, as a model with temperature 0 does; where its prompt is another
    one, it says so. Tokens are bytes to its tokenizer, and the pieces of ``said`` in its answers."""

    def __init__(self, template: str, said: list[str], breaks_after: list[int]) -> None:
        self.template = ChatTemplate(template, {}, {})
        self.said, self.breaks_after = said, list(breaks_after)
        self.begun = ""
        self.tokenizes = True

    async def __call__(self, talk: Talk) -> None:
        path, asked = talk.head.split(b" ")[1].decode(), orjson.loads(talk.body)
        if path == "/tokenize":
            text = self.rendered(CHAT, asked) if "messages" in asked else asked["prompt"]
            ids = list(text.encode())
            return await talk.answer(
                {"count": len(ids), "max_model_len": 4096, "tokens": ids} if self.tokenizes else {}
            )
        if path == "/detokenize":
            return await talk.answer({"prompt": bytes(asked["tokens"]).decode()})
        prompt = self.rendered(path, asked)
        self.begun = self.begun or prompt
        rest = self.rest(prompt)
        stops = self.breaks_after.pop(0) if self.breaks_after else None
        await talk.begin_stream()
        for event in _BEGINS.get(path, ()):
            await _tell(talk, event)
        for text in rest[:stops]:
            await _tell(talk, _piece(path, text))
        if stops is not None:
            await asyncio.sleep(0.02)  # let the tokens out: a reset overtakes them
            return talk.reset()
        for event in _ENDS[path]:
            await _tell(talk, event)
        await talk.end_stream()
        return None

    def rendered(self, path: str, asked: Mapping[str, Any]) -> str:
        if path == MESSAGE:
            asked = chat_of_message(asked)
        return self.template.render(chat_of_response(asked) if path == RESPONSE else asked)

    def rest(self, prompt: str) -> list[str]:
        """The pieces of the answer behind a prompt that ends at any character of it."""
        whole, had = "".join(self.said), prompt.removeprefix(self.begun)
        if not prompt.startswith(self.begun) or not whole.startswith(had):
            return ["(another prompt)"]
        rest, at = [], 0
        for piece in self.said:
            at += len(piece)
            if at > len(had):
                rest.append(piece[max(0, len(had) - (at - len(piece))) :])
        return rest


_MESSAGE_ITEM = {"type": "message", "id": "msg", "role": "assistant", "status": "in_progress", "content": []}
_BEGINS: dict[str, list[dict[str, Any]]] = {
    MESSAGE: [
        {"type": "message_start", "message": {"id": "m", "content": [], "usage": {"input_tokens": 9}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ],
    RESPONSE: [
        {"type": "response.created", "response": {"id": "r", "status": "in_progress"}},
        {"type": "response.output_item.added", "item": _MESSAGE_ITEM, "output_index": 0},
        {
            "type": "response.content_part.added",
            "item_id": "msg",
            "output_index": 0,
            "content_index": 0,
            "part": {"type": "output_text", "text": "", "annotations": []},
        },
    ],
}
_USAGE = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
_ENDS: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"id": "c", "choices": [], "usage": _USAGE},
    ],
    MESSAGE: [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ],
    RESPONSE: [
        {"type": "response.output_text.done", "item_id": "msg", "output_index": 0, "content_index": 0, "text": "?"},
        {"type": "response.content_part.done", "item_id": "msg", "output_index": 0, "content_index": 0, "part": {}},
        {"type": "response.output_item.done", "output_index": 0, "item": {**_MESSAGE_ITEM, "status": "completed"}},
        {
            "type": "response.completed",
            "response": {"id": "r", "status": "completed", "usage": {"input_tokens": 9, "output_tokens": 9}},
        },
    ],
}


def _piece(path: str, text: str) -> dict[str, Any]:
    if path == MESSAGE:
        return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    if path == RESPONSE:
        return {
            "type": "response.output_text.delta",
            "item_id": "msg",
            "output_index": 0,
            "content_index": 0,
            "delta": text,
        }
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


async def _tell(talk: Talk, event: dict[str, Any]) -> None:
    name = b"event: %b\n" % event["type"].encode() if "type" in event else b""
    await talk.chunk(b"%bdata: %b\n\n" % (name, orjson.dumps(event)))


def ask(client: Client, path: str, **more: Any) -> None:
    prompt = {"input": "hi"} if path == RESPONSE else {"messages": [{"role": "user", "content": "hi"}]}
    client.request(path, {"model": "m", "stream": True, "max_tokens": 999, **prompt, **more})


def told(body: bytes) -> list[Any]:
    """The events of an answer."""
    return [orjson.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


def read(path: str, body: bytes) -> tuple[str, list[Any]]:
    """The text that a client reads, and the errors."""
    found = told(body)
    if path == MESSAGE:
        text = "".join(event["delta"].get("text", "") for event in found if event["type"] == "content_block_delta")
    elif path == RESPONSE:
        text = "".join(event["delta"] for event in found if event.get("type") == "response.output_text.delta")
    else:
        choices = [choice for event in found for choice in event.get("choices", ())]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [event for event in found if "error" in event or event.get("type") in ("error", "response.failed")]


@pytest.mark.parametrize("template", [KEEPS, TRIMS_ALL, TRIMS_AND_RENAMES], ids=["keeps", "Llama 3", "Gemma 3"])
@pytest.mark.parametrize("path", [CHAT, MESSAGE, RESPONSE])
async def test_an_answer_goes_on_from_every_token_with_nothing_twice(
    fleet: StartFleet, path: str, template: str
) -> None:
    for after in range(1, len(SAID)):
        engine = Engine(template, SAID, [after])
        _, _, client = await fleet(engine, engine, settings=ON)
        ask(client, path)
        text, errors = read(path, (await client.answer()).body)
        assert (text, errors) == ("".join(SAID), []), f"cut after {SAID[:after]}"
        client.close()


@pytest.mark.parametrize("path", [CHAT, MESSAGE, RESPONSE])
async def test_one_that_breaks_again_before_its_white_space_has_come_again_has_nothing_twice(
    fleet: StartFleet, path: str
) -> None:
    for again in (0, 1, 2):
        engine = Engine(TRIMS_ALL, SAID, [5, again])
        _, _, client = await fleet(engine, engine, engine, settings=ON)
        ask(client, path)
        text, errors = read(path, (await client.answer()).body)
        assert (text, errors) == ("".join(SAID), [])
        client.close()


async def test_a_response_that_goes_on_ends_with_its_whole_text(fleet: StartFleet) -> None:
    engine = Engine(TRIMS_ALL, SAID, [5])
    _, _, client = await fleet(engine, engine, settings=ON)
    ask(client, RESPONSE)
    found = {event["type"]: event for event in told((await client.answer()).body)}
    assert found["response.output_text.done"]["text"] == "".join(SAID)


@pytest.mark.parametrize("path", [CHAT, MESSAGE, RESPONSE])
async def test_one_in_its_thinking_does_not_go_on_behind_an_empty_thought(fleet: StartFleet, path: str) -> None:
    ends = THOUGHT.index("</think>")
    for after in range(1, len(THOUGHT)):
        engine = Engine(THINKS, THOUGHT, [after])
        _, _, client = await fleet(engine, engine, settings=ON)
        ask(client, path)
        text, errors = read(path, (await client.answer()).body)
        if after > ends + 1:
            assert (text, errors) == ("".join(THOUGHT), []), f"cut after {THOUGHT[:after]}"
        else:
            assert text in ("".join(THOUGHT[:after]), "".join(THOUGHT)), "nothing else than what the model said"
            assert bool(errors) is (text != "".join(THOUGHT))
            if after <= ends:
                assert "chat template" in str(errors)
        client.close()


async def test_an_instance_that_does_not_say_how_it_renders_goes_on_with_no_white_space_at_an_end(
    fleet: StartFleet,
) -> None:
    for after, goes_on in ((2, True), (4, False)):
        engine = Engine(KEEPS, SAID, [after])
        engine.tokenizes = False
        _, _, client = await fleet(engine, engine, settings=ON)
        ask(client, CHAT)
        text, errors = read(CHAT, (await client.answer()).body)
        assert text == "".join(SAID if goes_on else SAID[:after])
        assert ("white space" in str(errors)) is not goes_on
        client.close()


@pytest.mark.parametrize("more", [{"logprobs": True}, {"return_token_ids": True}])
async def test_what_is_told_of_each_token_does_not_come_twice(fleet: StartFleet, more: dict[str, Any]) -> None:
    engine = Engine(TRIMS_ALL, SAID, [5])
    _, _, client = await fleet(engine, engine, settings=ON)
    ask(client, CHAT, **more)
    text, errors = read(CHAT, (await client.answer()).body)
    assert text == "".join(SAID[:5])
    assert "comes again" in str(errors)


async def test_a_prompt_that_its_tokens_join_is_told_from_another_one_by_its_text() -> None:
    """A tokenizer that makes one token of the prompt's end and the text's begin."""
    answers = {"hi": [1, 2], "hi there": [1, 7], " there": [3]}
    words = {(1, 2): "hi|", (1, 7): "hi| there"}

    async def asks(path: str, body: bytes) -> bytes:
        asked = orjson.loads(body)
        if path == "/detokenize":
            return orjson.dumps({"prompt": words[tuple(asked["tokens"])]})
        said = asked.get("prompt") or "".join(message["content"] for message in asked["messages"])
        return orjson.dumps({"count": 5, "tokens": answers[said]})

    so_far = AnswerSoFar()
    so_far.read(CHAT, b"data: %b\n\n" % orjson.dumps(_piece(CHAT, " there")))
    request = {"messages": [{"role": "user", "content": "hi"}]}
    body = {"messages": [*request["messages"], {"role": "assistant", "content": " there"}]}
    rest = Rest(CHAT, orjson.dumps(body), 1, 6)
    assert await measure_rest(asks, "m", CHAT, request, so_far, rest) == Measured(text_tokens=5)
    words[1, 7] = "hi| <think></think> there"
    with pytest.raises(CannotContinueError, match="chat template"):
        await measure_rest(asks, "m", CHAT, request, so_far, rest)
