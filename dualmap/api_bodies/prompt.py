"""The prompt of an OpenAI request body, rendered canonically.

Not the chat template of the model: a rendering that changes where the template's output changes.
What must hold is the prefix property: bodies with the same leading messages render to the same leading bytes.
So everything that chat templates put before the messages (tools, documents, template arguments) comes first, keys in
sorted order; then the messages one after the other, each opened by ``_MESSAGE`` and closed by nothing.

The separators never occur in UTF-8, so no content can pretend to be structure.

An image is a mark with a hash of what identifies it: its ``uuid``, by which vLLM then knows it, or else its URL, which
may be the image itself. How many tokens it has is not known here, see ``scheduling.prompts.blocks.with_images``.

The reader of a long body may have cut out its long strings: ``LongTexts`` maps names, which follow from the contents,
to the strings. A text is rendered with its own bytes, so it renders like any other. Inside of what is rendered as JSON,
or hashed, its name is enough.

Nothing is refused here. A part of a form that is not known is rendered as the JSON that it is, and the prompt is marked
``unread``: it is found again like any other, but its tokens are not computed, and nothing is learned from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sized
from typing import Any, Final

import xxhash

from dualmap.api_bodies.errors import PromptError, TooManyPartsError
from dualmap.api_bodies.json_body import write_json
from dualmap.scheduling.prompts.blocks import IMAGE_MARK_BYTES, Piece, Prompt, TextPrompt, TokenPrompt, joined, size_of
from dualmap.scheduling.values import value

_MESSAGE = b"\xff"
_FIELD = b"\xfe"
_TOKEN_SEPARATOR = 0xFFFFFFFF
_EMBEDDING_BYTES = 8 << 10
"""Base64 of one token's embedding, roughly: 3072 values of 16 bits. A request does not contain the model's width."""

MAX_PARTS: Final = 10_000
"""Messages, content parts of all messages, prompts, tools: default maximum of each."""

_BILLING_HEADER: Final = "x-anthropic-billing-header"
_BILLING_HEADER_BYTES: Final = _BILLING_HEADER.encode()

LongTexts = Mapping[str, bytes]
"""Long strings of a body, in UTF-8, by the names that replace them."""

_NO_LONG_TEXTS: Final[LongTexts] = {}


def without_billing_line(text: Piece) -> Piece:
    """A text of a system message as vLLM's chats show it: one client begins it with a line that differs in every
    request, which is dropped."""
    if isinstance(text, str):
        return text.partition("\n")[2] if text.startswith(_BILLING_HEADER) else text
    return text.partition(b"\n")[2] if text.startswith(_BILLING_HEADER_BYTES) else text


def _opening(role: str) -> bytes:
    """The beginning of a message."""
    return joined((_MESSAGE, role, _FIELD))


_OPENINGS: Final = {role: _opening(role) for role in ("assistant", "developer", "system", "tool", "user")}

_LEADING_KEYS = frozenset(
    {
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "functions",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "reasoning_effort",
        "tools",
        "truncate_prompt_tokens",
    }
)
"""Parts of a body, besides the messages, that change what an engine computes from the first token on."""

_TEXT_FIELDS: Final = {"refusal": "refusal", "thinking": "thinking", "tool_reference": "name"}
"""Fields that hold the text of a part, by its type, where it is not ``text``."""

_IMAGES: Final = frozenset({"image_embeds", "image_pil", "image_url", "input_image"})
_KINDS: Final = (
    "image_url", "image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "audio_url",
    "input_audio", "video_url", "refusal", "text",
)  # fmt: skip
"""Fields that say what a part without a ``type`` is, in the order in which vLLM looks for them."""


@value
class Place:
    """A place between two messages of a rendered conversation, by what comes before it."""

    pieces: int
    parts: int
    """Content parts."""


def chat_prompt(
    body: Mapping[str, Any],
    long_texts: LongTexts = _NO_LONG_TEXTS,
    *,
    max_parts: int = MAX_PARTS,
    places: list[Place] | None = None,
) -> TextPrompt:
    """The prompt of a chat completions body. ``places`` gets the place before each message, and the one
    behind all.

    Raises:
        PromptError: ``messages`` is missing, empty or no array of objects with roles, or has too many parts.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages must be a non-empty array of objects", "messages")
    _check_count(messages, "messages", max_parts)
    rendering = _Rendering(long_texts, max_parts)
    rendering.add_leading(body)
    for index, message in enumerate(messages):
        if places is not None:
            places.append(rendering.place)
        rendering.add_message(message, index)
    if places is not None:
        places.append(rendering.place)
    return TextPrompt(
        rendering.pieces, rendering.media_at, tuple(rendering.image_ends), rendering.other_media, rendering.unread
    )


def completion_prompt(
    body: Mapping[str, Any], long_texts: LongTexts = _NO_LONG_TEXTS, *, max_parts: int = MAX_PARTS
) -> Prompt:
    """The prompt of a completions body: a string, token ids, or an array of either (rendered one after the other).

    Without one, ``prompt_embeds``, a string in base64 or an array of such, takes its place.

    Raises:
        PromptError: ``prompt`` is missing, empty or has the wrong shape, and so are embeddings; or there are too many.
    """
    prompt = body.get("prompt")
    rendering = _Rendering(long_texts, max_parts)
    if not prompt and body.get("prompt_embeds"):
        return _embeddings(body["prompt_embeds"], rendering)
    if isinstance(prompt, str):
        rendering.add_leading(body)
        rendering.add_text(prompt)
        return TextPrompt(rendering.pieces)
    if not isinstance(prompt, list) or not prompt:
        raise PromptError("prompt must be a string, an array of token ids, or an array of either", "prompt")
    if isinstance(prompt[0], str):
        rendering.add_leading(body)
        rendering.add_prompts(prompt, "prompt")
        return TextPrompt(rendering.pieces)
    if isinstance(prompt[0], list):
        _check_count(prompt, "prompt", max_parts)
        return TokenPrompt(_joined_token_ids(prompt))
    return TokenPrompt(_token_ids(prompt, "prompt"))


class _Rendering:
    """A prompt in the making."""

    media_at: int | None = None
    other_media = False
    unread = False
    _measured = (0, 0)
    """Pieces, and their bytes."""
    _message_starts = 0
    _parts = 0

    def __init__(self, long_texts: LongTexts, max_parts: int) -> None:
        self.pieces: list[Piece] = []
        self.image_ends: list[int] = []
        self._long_texts = long_texts
        self._max_parts = max_parts

    @property
    def place(self) -> Place:
        return Place(len(self.pieces), self._parts)

    def add_text(self, text: str) -> None:
        self.pieces.append(self._long_texts.get(text, text) if self._long_texts else text)

    def add_leading(self, body: Mapping[str, Any]) -> None:
        """Add what comes before the messages; most bodies have nothing there."""
        if _LEADING_KEYS.isdisjoint(body):
            return
        present = {key: body[key] for key in _LEADING_KEYS if body.get(key) is not None}
        for key, given in present.items():
            if isinstance(given, list):
                _check_count(given, key, self._max_parts)
        if present:
            self.unread = self.unread or not isinstance(present.get("tools", []), list)
            self.pieces.append(_sorted_json(present))

    def add_prompts(self, prompts: list[Any], param: str) -> None:
        """Strings, one after the other."""
        _check_count(prompts, param, self._max_parts)
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise PromptError(f"{param}[{index}] must be a string like the others", f"{param}[{index}]")
            if index:
                self.pieces.append(_MESSAGE)
            self.add_text(prompt)

    def add_message(self, message: Any, index: int) -> None:
        if not isinstance(message, dict):
            raise PromptError(f"messages[{index}] must be an object", f"messages[{index}]")
        role = message.get("role")
        if not isinstance(role, str):
            raise PromptError(f"messages[{index}].role must be a string", f"messages[{index}].role")
        content = message.get("content")
        pieces = self.pieces
        pieces.append(_OPENINGS.get(role) or _opening(role))
        if isinstance(content, str):
            text = self._long_texts.get(content, content) if self._long_texts else content
            pieces.append(without_billing_line(text) if role == "system" else text)
        elif isinstance(content, list):
            self._message_starts = len(pieces) - 1
            self._add_parts(content, f"messages[{index}].content")
            if role == "system":
                self._drop_billing_lines()
        elif content is not None:
            self._add_unread(content)
        if len(message) > 2:
            self._add_extras(message)

    def _drop_billing_lines(self) -> None:
        """Leave the line out of each text of a system message that differs in every request, as vLLM does."""
        pieces = self.pieces
        for place in range(self._message_starts + 1, len(pieces)):
            pieces[place] = without_billing_line(pieces[place])

    def _add_unread(self, value: Any) -> None:
        self.unread = True
        self.pieces += (_FIELD, _sorted_json(value))

    def _add_extras(self, message: dict[str, Any]) -> None:
        """Name, tool calls, reasoning and all other fields of a message. Clients send absent parts as null."""
        extras = {key: value for key, value in message.items() if value is not None and key not in ("role", "content")}
        if extras:
            calls, name = extras.get("tool_calls", []), extras.get("name", "")
            self.unread = self.unread or not (isinstance(calls, list) and isinstance(name, str))
            self.pieces += (_FIELD, _sorted_json(extras))

    def _add_parts(self, content: list[Any], param: str) -> None:
        """Content parts: text as it is (one text part renders like a plain string), media by their hash."""
        self._parts += len(content)
        if self._parts > self._max_parts:
            raise TooManyPartsError(f"the messages have over {self._max_parts} content parts", param)
        for index, part in enumerate(content):
            if index:
                self.pieces.append(b"\n")
            if isinstance(part, str):
                self.add_text(part)
            elif not isinstance(part, dict) or not isinstance(kind := _kind(part), str):
                self._add_unread(part)
            elif isinstance(text := _text(part, kind), str):
                self.add_text(text)
            elif kind.endswith("text"):
                self._add_unread(part)
            else:
                self._add_media(part, kind)

    def _add_media(self, part: dict[str, Any], kind: str) -> None:
        if self.media_at is None:
            self.media_at = self._bytes_of(self._message_starts)
        if kind not in _IMAGES:
            self.other_media = True
            self.pieces.append(_mark(kind, part))
            return
        self.pieces.append(_mark("image", _image_identity(part)))
        self.image_ends.append(self._bytes_of(len(self.pieces)))

    def _bytes_of(self, pieces: int) -> int:
        """Length of the first ones; no fewer than at the last call."""
        counted, size = self._measured
        self._measured = pieces, size + size_of(self.pieces[counted:pieces])
        return self._measured[1]


def _check_count(parts: Sized, param: str, most: int) -> None:
    if len(parts) > most:
        raise TooManyPartsError(f"{param} has over {most} entries", param)


def _kind(part: dict[str, Any]) -> Any:
    """The type of a part, or what its fields say of it; None where they say nothing."""
    kind = part.get("type")
    return next((name for name in _KINDS if name in part), None) if kind is None else kind


def _text(part: dict[str, Any], kind: str) -> Any:
    return part.get(_TEXT_FIELDS.get(kind, "text"))


def is_image(part: Any) -> bool:
    """Whether a content part of a chat is an image: one that has a mark in the chat's prompt."""
    return isinstance(part, dict) and (kind := _kind(part)) in _IMAGES and not isinstance(_text(part, kind), str)


def _image_identity(part: dict[str, Any]) -> Any:
    """Equal in all APIs. What else a part may have (``detail``), vLLM ignores."""
    if uuid := part.get("uuid"):
        return {"uuid": uuid}
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) and url else part


def _mark(kind: str, identity: Any) -> bytes:
    # Base64 media would drown the chain in megabytes; the hash tells media apart just as well.
    digest = xxhash.xxh3_128_hexdigest(_sorted_json(identity)).encode()
    assert len(digest) == IMAGE_MARK_BYTES
    return b"".join((_FIELD, kind.encode("utf-8", "surrogatepass"), _FIELD, digest))


def _embeddings(embeds: Any, rendering: _Rendering) -> TokenPrompt:
    """Embeddings as token ids, about one for each embedding; as text they would count as a thousand times as many."""
    if isinstance(embeds, str):
        rendering.add_text(embeds)
    elif isinstance(embeds, list):
        rendering.add_prompts(embeds, "prompt_embeds")
    else:
        raise PromptError("'prompt_embeds' must be a base64 string or an array of such", "prompt_embeds")
    encoded = joined(rendering.pieces)
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


def _sorted_json(value: Any) -> bytes:
    """Equal values have equal bytes."""
    return write_json(value, sort_keys=True)
