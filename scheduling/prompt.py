"""The prompt of an OpenAI request body, rendered canonically.

Not the chat template of the model: a rendering of our own that changes where the template's output changes.
What must hold is the prefix property: bodies with the same leading messages render to the same leading bytes.
So whatever chat templates put before the messages (tools, documents, template arguments) comes first, keys in
sorted order; then the messages one after the other, each opened by ``_MESSAGE`` and closed by nothing.

The separators never occur in UTF-8, so no content can pretend to be structure.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import orjson
import xxhash

from scheduling.blocks import Prompt, TextPrompt, TokenPrompt
from scheduling.errors import PromptError

_MESSAGE = b"\xff"
_FIELD = b"\xfe"
_TOKEN_SEPARATOR = 0xFFFFFFFF
_EMBEDDING_BYTES = 8 << 10
"""Base64 of one token's embedding, roughly: 3072 values of 16 bits. Nothing in a request tells the model's width."""

_LEADING_KEYS = frozenset(
    {
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "functions",
        "mm_processor_kwargs",
        "reasoning_effort",
        "tools",
        "truncate_prompt_tokens",
    }
)
"""Parts of a body, besides the messages, that change what an engine computes from the first token on."""


def chat_prompt(body: Mapping[str, Any]) -> TextPrompt:
    """The prompt of a chat completions body.

    Raises:
        PromptError: ``messages`` or a part of it is missing or has the wrong shape.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PromptError("'messages' must be a non-empty array of messages", "messages")
    pieces = [_leading(body)]
    has_media = False
    for index, message in enumerate(messages):
        has_media |= _render_message(message, index, pieces)
    return TextPrompt(b"".join(pieces), has_media)


def completion_prompt(body: Mapping[str, Any]) -> Prompt:
    """The prompt of a completions body: a string, token ids, or an array of either (rendered one after the other).

    Without one, ``prompt_embeds``, a string in base64 or an array of such, stands in for it.

    Raises:
        PromptError: ``prompt`` is missing, empty or has the wrong shape, and so are embeddings.
    """
    prompt = body.get("prompt")
    if not prompt and body.get("prompt_embeds"):
        return _embeddings(body["prompt_embeds"])
    if isinstance(prompt, str):
        return TextPrompt(_leading(body) + _text(prompt))
    if not isinstance(prompt, list) or not prompt:
        raise PromptError("'prompt' must be a string, an array of token ids, or an array of either", "prompt")
    if isinstance(prompt[0], str):
        return TextPrompt(_leading(body) + _joined_texts(prompt, "prompt"))
    if isinstance(prompt[0], list):
        return TokenPrompt(_joined_token_ids(prompt))
    return TokenPrompt(_token_ids(prompt, "prompt"))


def _leading(body: Mapping[str, Any]) -> bytes:
    """What comes before the messages; empty for most bodies."""
    if _LEADING_KEYS.isdisjoint(body):
        return b""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise PromptError("'tools' must be an array", "tools")
    present = {key: body[key] for key in _LEADING_KEYS if body.get(key) is not None}
    return _json(present, "tools") if present else b""


def _render_message(message: Any, index: int, pieces: list[bytes]) -> bool:
    """Append the message to ``pieces``; whether parts of it are media."""
    if not isinstance(message, dict):
        raise PromptError(f"messages[{index}] must be an object", f"messages[{index}]")
    role = message.get("role")
    if not isinstance(role, str):
        raise PromptError(f"messages[{index}].role must be a string", f"messages[{index}].role")
    content = message.get("content")
    pieces += (_MESSAGE, _text(role), _FIELD)
    has_media = False
    if isinstance(content, str):
        pieces.append(_text(content))
    elif content is not None:
        has_media = _render_parts(content, f"messages[{index}].content", pieces)
    if len(message) > 2:
        _render_extras(message, f"messages[{index}]", pieces)
    return has_media


def _render_extras(message: dict[str, Any], param: str, pieces: list[bytes]) -> None:
    """Name, tool calls, reasoning and whatever else a message carries. Clients send absent parts as null."""
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise PromptError(f"{param}.tool_calls must be an array", f"{param}.tool_calls")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise PromptError(f"{param}.name must be a string", f"{param}.name")
    extras = {key: value for key, value in message.items() if value is not None and key not in ("role", "content")}
    if extras:
        pieces += (_FIELD, _json(extras, param))


def _render_parts(content: Any, param: str, pieces: list[bytes]) -> bool:
    """Content parts: text as it is (one text part renders like a plain string), media by their hash. Whether there are
    any media."""
    if not isinstance(content, list):
        raise PromptError(f"{param} must be a string or an array of content parts", param)
    has_media = False
    for index, part in enumerate(content):
        if index:
            pieces.append(b"\n")
        if isinstance(part, str):
            pieces.append(_text(part))
            continue
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise PromptError(f"{param}[{index}] must be an object with a string 'type'", f"{param}[{index}]")
        text = _part_text(part, f"{param}[{index}]")
        pieces.append(_media(part, f"{param}[{index}]") if text is None else _text(text))
        has_media |= text is None
    return has_media


def _part_text(part: dict[str, Any], param: str) -> str | None:
    text = part.get("text")
    if isinstance(text, str):
        return text
    if part["type"].endswith("text"):
        raise PromptError(f"{param}.text must be a string", f"{param}.text")
    return None


def _media(part: dict[str, Any], param: str) -> bytes:
    # Base64 media would drown the chain in megabytes; the hash tells media apart just as well.
    digest = xxhash.xxh3_128_hexdigest(_json(part, param))
    return b"".join((_FIELD, _text(part["type"]), _FIELD, digest.encode()))


def _joined_texts(prompts: list[Any], param: str) -> bytes:
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise PromptError(f"{param}[{index}] must be a string like the others", f"{param}[{index}]")
    return _MESSAGE.join(_text(prompt) for prompt in prompts)


def _embeddings(embeds: Any) -> TokenPrompt:
    """As token ids, about one for each embedding; as text they would count as a thousand times as many."""
    encoded = _joined_texts(embeds, "prompt_embeds") if isinstance(embeds, list) else embeds
    if isinstance(encoded, str):
        encoded = _text(encoded)
    if not isinstance(encoded, bytes):
        raise PromptError("'prompt_embeds' must be a base64 string or an array of such", "prompt_embeds")
    starts = range(0, len(encoded), _EMBEDDING_BYTES)
    return TokenPrompt(array("I", [xxhash.xxh32_intdigest(encoded[at : at + _EMBEDDING_BYTES]) for at in starts]))


def _joined_token_ids(prompts: list[Any]) -> array[int]:
    joined = array("I")
    for index, prompt in enumerate(prompts):
        if index:
            joined.append(_TOKEN_SEPARATOR)
        joined += _token_ids(prompt, f"prompt[{index}]")
    return joined


def _token_ids(ids: Any, param: str) -> array[int]:
    if not isinstance(ids, list) or not ids:
        raise PromptError(f"{param} must be a non-empty array of token ids", param)
    try:
        return array("I", ids)
    except (TypeError, OverflowError) as error:
        raise PromptError(f"{param} holds something that is not a token id", param) from error


def _text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate: legal in JSON, not in UTF-8
        return text.encode("utf-8", "surrogatepass")


def _json(value: Any, param: str) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise PromptError(f"{param} cannot be read as JSON: {error}", param) from error
