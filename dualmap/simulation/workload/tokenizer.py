"""The emulator's tokenizer: four bytes of UTF-8 are one token.

It preserves what scheduling depends on. Text with the same start has the same first tokens, a prompt has as many tokens
as an average tokenizer would find, and the model's input is rendered from the request as chat templates do it: turn
after turn, so that a longer conversation starts with the shorter one.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
import xxhash

from dualmap.api_bodies.prompt import without_billing_line

TOKEN_BYTES = 4
_PARTIAL_SHIFT = 32
"""A token of fewer bytes (only a text's last can be) carries its length above its value."""


def count_tokens(text: bytes) -> int:
    return -(-len(text) // TOKEN_BYTES)


def encode(text: bytes) -> list[int]:
    """Token ids of a text; below 2^32 except for a partial last one."""
    whole = len(text) // TOKEN_BYTES * TOKEN_BYTES
    ids = [int.from_bytes(text[at : at + TOKEN_BYTES], "little") for at in range(0, whole, TOKEN_BYTES)]
    if whole < len(text):
        rest = text[whole:]
        ids.append(len(rest) << _PARTIAL_SHIFT | int.from_bytes(rest, "little"))
    return ids


def decode(ids: Sequence[int]) -> bytes:
    """The bytes of token ids; ids that this tokenizer never gives are read modulo 2^32.

    Raises:
        ValueError: an id is negative or not an integer.
    """
    try:
        return array("I", ids).tobytes()  # four bytes each, as on every platform CPython runs on
    except OverflowError:
        return b"".join(_token_bytes(token) for token in ids)
    except TypeError:
        raise ValueError("token ids must be integers") from None


def _token_bytes(token: int) -> bytes:
    if token < 0:
        raise ValueError("token ids must not be negative")
    length = token >> _PARTIAL_SHIFT
    return (token & 0xFFFFFFFF).to_bytes(TOKEN_BYTES, "little")[: length if 1 <= length < TOKEN_BYTES else TOKEN_BYTES]


def block_hashes(text: bytes, block_tokens: int, salt: str = "") -> tuple[int, ...]:
    """Prefix hashes of the text's full blocks: hash k covers blocks ``0..k`` and the salt."""
    hasher = xxhash.xxh3_64(salt.encode())
    view = memoryview(text)
    size = block_tokens * TOKEN_BYTES
    hashes: list[int] = []
    for at in range(0, len(text) - size + 1, size):
        hasher.update(view[at : at + size])
        hashes.append(hasher.intdigest())
    return tuple(hashes)


def render_chat(messages: Sequence[Mapping[str, Any]], tools: object = None) -> bytes:
    """The model's input for a chat request, up to where its answer begins (the ChatML form).

    Raises:
        ValueError: a message has no role, or content that is neither text nor a list of parts.
    """
    parts: list[bytes] = []
    if tools:
        parts.append(b"<|im_start|>system\n" + orjson.dumps(tools) + b"<|im_end|>\n")
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role:
            raise ValueError("every message needs a role")
        content = _render_content(message)
        if role == "system":
            shown = without_billing_line(content)
            assert isinstance(shown, bytes)
            content = shown
        parts += [b"<|im_start|>", role.encode(), b"\n", content, b"<|im_end|>\n"]
    parts.append(b"<|im_start|>assistant\n")
    return b"".join(parts)


def _render_content(message: Mapping[str, Any]) -> bytes:
    content = message.get("content")
    calls = message.get("tool_calls")
    rendered = orjson.dumps(calls) if calls else b""
    if content is None:
        return rendered
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass") + rendered
    if isinstance(content, list):
        return b"".join(_render_part(part) for part in content) + rendered
    raise ValueError("a message's content must be text or a list of parts")


_TEXTS: Final = ("text", "input_text", "output_text")


def _render_part(part: object) -> bytes:
    if isinstance(part, Mapping) and part.get("type") in _TEXTS and isinstance(part.get("text"), str):
        return str(part["text"]).encode("utf-8", "surrogatepass")
    return orjson.dumps(part)
