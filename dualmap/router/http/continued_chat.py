"""How the instance that goes on with a chat by its text renders that chat, compared with what its client has.

A chat template writes an answer that is continued otherwise than one that is begun: some trim its text, so that white
space at its end would come twice; some put reasoning before it that is not the model's. The instance's own
``/tokenize`` shows it: the chat that is continued must be its prompt and the text, or both without the white space at
the end, which then comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson

from dualmap.api_bodies.json_body import read_json, write_json
from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.api_bodies.responses_api import chat_of_response
from dualmap.router.answers.rest import CannotContinueError, Measured, Rest, needs_context, needs_count
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.prompts.inference_request import COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH
from dualmap.router.tokens.instance_tokenizer import chat_fields

Ask = Callable[[str, bytes], Awaitable[bytes | None]]
"""Sends the instance another request: a path and a body. Returns the body of its answer; None where it gives none."""

_OTHERWISE: Final = "the chat template writes an answer that is continued otherwise than one that is begun"
_UNTOLD: Final = (
    "its text ends with white space, and the instance does not say in time whether its chat template keeps that"
)


async def measure_rest(
    ask: Ask, model: str, path: str, request: Mapping[str, Any], so_far: AnswerSoFar, rest: Rest
) -> Measured:
    """What has to be known of the text so far before its rest is asked for, by the instance that goes on with it.

    Args:
        model: its name at the instance.
        path: of the client's request.
        request: the client's body.

    Raises:
        CannotContinueError: its model would go on from something else than what the client has.
    """
    counts, is_chat = needs_count(path, so_far), path != COMPLETIONS_PATH
    compares = is_chat and not rest.by_tokens and bool(so_far.chars)
    if not (counts or compares or needs_context(path, request, so_far)):
        return Measured()
    text = so_far.text if counts or compares else ""
    asked = [_text_question(model, text)]
    if compares:
        asked += [_chat_question(model, path, request), _chat_question(model, rest.path, read_json(rest.body))]
        if text != text.rstrip():
            asked.append(_text_question(model, text.rstrip()))
    plain, *others = await asyncio.gather(*(_answer(ask, "/tokenize", question) for question in asked))
    count = _number(plain, "count") if counts else None
    measured = Measured(context_tokens=_number(plain, "max_model_len"), text_tokens=count)
    if not compares:
        if rest.by_tokens and is_chat and measured.context_tokens is None:  # it would go on by its text
            _require_no_space(so_far.text)
        return measured
    begun, continued, *without_space = others
    trims = await _trims(ask, model, text, _ids(begun), _ids(continued), _ids(plain))
    if trims is None:
        _require_no_space(text)
    if not trims:
        return measured
    return Measured(measured.context_tokens, _number(without_space[0], "count"), trims=True)


async def _trims(
    ask: Ask,
    model: str,
    text: str,
    begun: list[int] | None,
    continued: list[int] | None,
    alone: list[int] | None,
) -> bool | None:
    """Whether the continued chat lacks the white space with which the text ends; None where the instance does not say.
    ``begun`` and ``continued`` are the tokens of the two chats, ``alone`` those of the text."""
    if begun is None or continued is None:
        return None
    if alone is not None and continued == begun + alone:
        return False
    asked = (_ids_question(model, begun), _ids_question(model, continued))
    prompt, whole = await asyncio.gather(*(_answer(ask, "/detokenize", question) for question in asked))
    before, after = prompt.get("prompt"), whole.get("prompt")
    if not isinstance(before, str) or not isinstance(after, str):
        return None
    if after == before + text:
        return False
    if after == before + text.rstrip():
        return True
    raise CannotContinueError(_OTHERWISE)


def _require_no_space(text: str) -> None:
    """The instance does not say how its template writes the text."""
    if text != text.rstrip():
        raise CannotContinueError(_UNTOLD)


async def _answer(ask: Ask, path: str, question: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(await ask(path, question) or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _text_question(model: str, text: str) -> bytes:
    return write_json({"model": model, "prompt": text, "add_special_tokens": False})


def _ids_question(model: str, ids: list[int]) -> bytes:
    return write_json({"model": model, "tokens": ids})


def _chat_question(model: str, path: str, request: Mapping[str, Any]) -> bytes:
    """The question for the tokens of a chat, however its API writes it."""
    if path == MESSAGES_PATH:
        chat: Mapping[str, Any] = chat_of_message(request)
    else:
        chat = chat_of_response(request) if path == RESPONSES_PATH else request
    fields = chat_fields(chat)
    fields["messages"] = [_without_media(message) for message in fields["messages"]]
    if chat.get("chat_template") is not None:
        fields["chat_template"] = chat["chat_template"]
    return write_json({"model": model, "add_special_tokens": False, **fields})


def _without_media(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without parts that are no text: they are large, and change nothing about how it ends."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [part if _is_text(part) else {"type": "text", "text": ""} for part in content]}


def _is_text(part: Any) -> bool:
    return not isinstance(part, dict) or isinstance(part.get("text"), str)


def _ids(found: Mapping[str, Any]) -> list[int] | None:
    ids = found.get("tokens")
    return ids if isinstance(ids, list) else None


def _number(found: Mapping[str, Any], name: str) -> int | None:
    number = found.get(name)
    return number if isinstance(number, int) else None
