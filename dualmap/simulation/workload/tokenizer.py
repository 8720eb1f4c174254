"""The emulator's tokenizer: four bytes of UTF-8 are one token.

It preserves what scheduling depends on. Text with the same start has the same first tokens, a prompt has as many tokens
as an average tokenizer would find, and the model's input is rendered from the request as chat templates do it: turn
after turn, so that a longer conversation starts with the shorter one.

An image is a run of equal placeholder tokens, one for each patch of 28 by 28 pixels, and an identifier that follows
from its content: as in an engine, the tokens alone do not tell two images of one size apart.
"""

from __future__ import annotations

from array import array
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from dualmap.api_bodies.json_body import write_json
from dualmap.api_bodies.prompt import without_billing_line

TOKEN_BYTES = 4
_PARTIAL_SHIFT = 32
"""A token of fewer bytes (only a text's last can be) carries its length above its value."""
_IMAGE_TOKEN: Final = b"\xfdimg"
_PATCH_PIXELS: Final = 28
_USUAL_PATCHES: Final = 256
"""Patches of an image whose size is not known here: one that is no PNG, or that lies behind a URL."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class ImageRun:
    """The tokens of one image in a prompt."""

    identifier: str
    offset: int
    """Tokens before it."""
    length: int
    """Its tokens."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """The model's input."""

    data: bytes
    images: tuple[ImageRun, ...] = ()


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


def image_keys(images: Sequence[ImageRun], block_tokens: int, place: int) -> list[tuple[str, int]]:
    """The images in a block, each with the place of its first token as seen from the block's."""
    start = place * block_tokens
    return [
        (each.identifier, each.offset - start)
        for each in images
        if each.offset < start + block_tokens and start < each.offset + each.length
    ]


def block_hashes(text: bytes, block_tokens: int, salt: str = "", images: Sequence[ImageRun] = ()) -> tuple[int, ...]:
    """Prefix hashes of the text's full blocks: hash k covers blocks ``0..k``, the images in them and the salt."""
    hasher = xxhash.xxh3_64(salt.encode())
    view = memoryview(text)
    size = block_tokens * TOKEN_BYTES
    hashes: list[int] = []
    for at in range(0, len(text) - size + 1, size):
        hasher.update(view[at : at + size])
        if images and (keys := image_keys(images, block_tokens, at // size)):
            hasher.update(write_json(keys))
        hashes.append(hasher.intdigest())
    return tuple(hashes)


def render_chat(messages: Sequence[Mapping[str, Any]], tools: object = None) -> PromptText:
    """The model's input for a chat request, up to where its answer begins (the ChatML form).

    Raises:
        ValueError: a message has no role, or content that is neither text nor a list of parts.
    """
    rendering = _Rendering()
    if tools:
        rendering.add(b"<|im_start|>system\n" + write_json(tools) + b"<|im_end|>\n")
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role:
            raise ValueError("every message needs a role")
        rendering.add(b"<|im_start|>" + role.encode() + b"\n")
        rendering.add_content(message, role)
        rendering.add(b"<|im_end|>\n")
    rendering.add(b"<|im_start|>assistant\n")
    return PromptText(bytes(rendering.data), tuple(rendering.images))


_TEXTS: Final = ("text", "input_text", "output_text")
_IMAGES: Final = ("image_url", "input_image")


class _Rendering:
    """A prompt in the making."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.images: list[ImageRun] = []

    def add(self, text: bytes) -> None:
        self.data += text

    def add_content(self, message: Mapping[str, Any], role: str) -> None:
        content, calls = message.get("content"), message.get("tool_calls")
        start, images = len(self.data), len(self.images)
        if isinstance(content, str):
            self.add(content.encode("utf-8", "surrogatepass"))
        elif isinstance(content, list):
            for part in content:
                self._add_part(part)
        elif content is not None:
            raise ValueError("a message's content must be text or a list of parts")
        if calls:
            self.add(write_json(calls))
        if role == "system" and len(self.images) == images:
            shown = without_billing_line(bytes(self.data[start:]))
            assert isinstance(shown, bytes)
            self.data[start:] = shown

    def _add_part(self, part: object) -> None:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind in _TEXTS and isinstance(part.get("text"), str):
            self.add(str(part["text"]).encode("utf-8", "surrogatepass"))
        elif isinstance(part, Mapping) and kind in _IMAGES:
            self._add_image(part)
        else:
            self.add(write_json(part))

    def _add_image(self, part: Mapping[str, Any]) -> None:
        """Add its tokens behind the text before it, whose last token is filled up."""
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        content = url.rpartition(";base64,")[2] if isinstance(url, str) else ""
        identifier = str(part.get("uuid") or xxhash.xxh3_128_hexdigest(content.encode("utf-8", "surrogatepass")))
        self.data += b" " * (-len(self.data) % TOKEN_BYTES)
        self.images.append(ImageRun(identifier, len(self.data) // TOKEN_BYTES, _patches(content)))
        self.data += _IMAGE_TOKEN * self.images[-1].length


def _patches(content: str) -> int:
    """Patches of an image in base64: by the size that a PNG begins with."""
    try:
        head = a2b_base64(content[:32])
    except (Base64Error, ValueError):
        head = b""
    if not head.startswith(_PNG) or len(head) < 24:
        return _USUAL_PATCHES
    width, height = (int.from_bytes(head[at : at + 4], "big") for at in (16, 20))
    return max(1, -(-width // _PATCH_PIXELS) * -(-height // _PATCH_PIXELS))
