"""The prompt of a body whose list of messages was read by stretches: of all of them, or of those behind a mark.

The result is the one that ``router.prompts.prompt`` has for the whole body, to the last digit, or ``UnlistedError``: a
prompt with media, or with parts of an unknown form, is none to go on from, and what would make it another one for the
sake of later messages is looked for here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import xxhash

from dualmap.api_bodies.errors import PromptError
from dualmap.api_bodies.json_body import UnreadableJsonError, write_json
from dualmap.api_bodies.listed_json import JsonBound, UnlistedError
from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.api_bodies.plain_list import PlainPlace
from dualmap.api_bodies.prompt import LongTexts, Place, chat_prompt, completion_prompt
from dualmap.api_bodies.responses_api import chat_of_response
from dualmap.router.prompts.inference_request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    SentPrompt,
)
from dualmap.router.prompts.known_bodies import Counted, Mark, NewMark
from dualmap.router.prompts.prompt import output_limit, sent_as, shows_its_text
from dualmap.scheduling.prompts.blocks import Piece, TextPrompt, joined, size_of
from dualmap.scheduling.values import value

LISTS: Final = {CHAT_PATH: "messages", MESSAGES_PATH: "messages", RESPONSES_PATH: "input"}
"""The list of messages, by the path of the API."""


@value
class ItemEnd:
    """A place behind an item."""

    items: int
    """Items before it, of those that were read."""
    end: int
    """Bytes of the list up to there."""
    bound: JsonBound
    """Figures of the items that were read before it."""


@value
class Head:
    """What a prompt has before the list: tools, a system prompt of its own."""

    digest: int
    messages: int
    """Messages of the chat that it is."""


@value
class ListedBody:
    """A body that was read by stretches."""

    path: str
    fields: Mapping[str, Any]
    """Its fields; the list has the items that were read."""
    long_texts: LongTexts
    """Long strings that these have the names of."""
    ends: Sequence[ItemEnd]
    start: Mark | None
    """Where reading began; None: at the first item."""
    head: Head | None = None
    """The head that these fields make, unless items change it; None: it is not known."""


@value
class ListedPrompt:
    """The prompt of such a body, and what can be kept of it."""

    sent: SentPrompt
    digest: int
    """Hash of what the prompt has before the list."""
    head: Head | None
    """What the fields around the list make; None where this is not known, or no prompt goes on from it."""
    marks: Sequence[NewMark]


def listed_prompt(body: ListedBody, *, max_parts: int) -> ListedPrompt | None:
    """The prompt; None where the body has none that can be read, such as a conversation with too many parts.

    Raises:
        UnlistedError: what is behind the mark does not continue what is before it.
    """
    places: list[Place] = []
    start, name = body.start, LISTS[body.path]
    changes = body.path == MESSAGES_PATH and any(map(_may_change_tools, body.fields[name]))
    known_head = None if start is None or changes else body.head
    try:
        chat, begins = _chat_of(body.path, body.fields if known_head is None else {name: body.fields[name]})
        prompt = chat_prompt(chat, body.long_texts, max_parts=max_parts, places=places)
    except (PromptError, UnreadableJsonError, RecursionError) as error:
        if start is None:
            return None
        raise UnlistedError(str(error)) from error
    pieces, messages = prompt.pieces, chat["messages"]
    begins.append(len(messages))
    before = places[begins[0]].pieces
    head = known_head or Head(_head_digest(chat, joined(pieces[:before])), begins[0])
    plain = not (prompt.has_media or prompt.unread)
    kept_head = head if plain and not changes else None
    if start is None:
        sent = sent_as(body.path, body.fields, prompt, body.long_texts)
        marks = [*_marks(body, messages, begins, places, pieces)] if plain else []
        return None if sent is None else ListedPrompt(sent, head.digest, kept_head, marks)
    known = start.counted
    if (
        not plain
        or head.digest != start.run.head
        or head.messages + len(messages) - begins[0] + known.messages > max_parts
        or places[-1].parts + known.parts > max_parts
    ):
        raise UnlistedError("it is not what was known, continued")
    salt = body.fields.get("cache_salt")
    sent = SentPrompt(
        start.continued(pieces[before:]),
        salt if isinstance(salt, str) else None,
        shows_its_text(body.fields),
        output_limit(body.path, body.fields),
    )
    marks = [*_marks(body, messages, begins, places, pieces[before:])]
    return ListedPrompt(sent, head.digest, kept_head, marks)


@value
class PlainBody:
    """A chat of plain messages, of which those behind a mark were read, or all."""

    fields: Mapping[str, Any]
    """Its fields; the list has one message that stands for all."""
    long_texts: LongTexts
    text: bytes
    """The messages that were read, as a prompt has them."""
    places: Sequence[PlainPlace]
    """Places behind messages; the last one is behind all."""
    begin: int
    """The place of the list's first item in the body."""
    start: Mark | None
    head: Head | None = None


STANDS_FOR_ALL: Final = {"role": "user", "content": "."}
"""A message that stands for all messages of a chat."""
_STANDS_RENDERED: Final = b"\xffuser\xfe."


def plain_prompt(body: PlainBody, *, max_parts: int) -> ListedPrompt:
    """The prompt of such a chat.

    Raises:
        UnlistedError: it is not to be read so.
    """
    start, head, fields, before = body.start, body.head, body.fields, b""
    if start is None or head is None:
        try:
            prompt = chat_prompt(fields, body.long_texts, max_parts=max_parts)
        except (PromptError, UnreadableJsonError, RecursionError) as error:
            raise UnlistedError(str(error)) from error
        if prompt.unread:
            raise UnlistedError("its tools are of an unknown form")
        before = prompt.data.removesuffix(_STANDS_RENDERED)
        head = Head(_head_digest(fields, before), 0)
    known = Counted() if start is None else start.counted
    last = body.places[-1]
    if max(known.messages + last.messages, known.parts + last.parts) > max_parts:
        raise UnlistedError("it has too many parts")
    if start is None:
        sent = sent_as(CHAT_PATH, fields, TextPrompt(before + body.text), body.long_texts)
        assert sent is not None
    else:
        if head.digest != start.run.head:
            raise UnlistedError("it is not what was known, continued")
        salt = fields.get("cache_salt")
        sent = SentPrompt(
            start.continued((body.text,)),
            salt if isinstance(salt, str) else None,
            shows_its_text(fields),
            output_limit(CHAT_PATH, fields),
        )
    size = len(before) if start is None else start.size
    marks = []
    for place in body.places:
        bound = JsonBound(place.values, place.commas)
        counted = known + Counted(place.messages, place.messages, place.parts, bound)
        marks.append(NewMark(place.end - body.begin, size + place.written, counted))
    return ListedPrompt(sent, head.digest, head, marks)


@value
class TextBody:
    """A completions body with one text as its prompt, of which that behind a mark was read, or all."""

    fields: Mapping[str, Any]
    """Its fields, without the prompt."""
    long_texts: LongTexts
    text: str
    """The text that was read."""
    end: int
    """Bytes of the string, as it was sent, with its first quote."""
    start: Mark | None


def text_prompt(body: TextBody, *, max_parts: int) -> ListedPrompt | None:
    """The prompt of such a body; None where it is empty.

    Raises:
        UnlistedError: it is not to be read so.
    """
    start, fields, path = body.start, body.fields, COMPLETIONS_PATH
    try:
        stands = completion_prompt({**fields, "prompt": _STANDS}, body.long_texts, max_parts=max_parts)
    except (PromptError, UnreadableJsonError, RecursionError) as error:
        raise UnlistedError(str(error)) from error
    assert isinstance(stands, TextPrompt)
    before = stands.data.removesuffix(_STANDS.encode())
    digest = xxhash.xxh3_128_intdigest(before)
    size = size_of((body.text,))
    if start is None:
        size += len(before)
        sent = sent_as(path, {**fields, "prompt": body.text}, TextPrompt((before, body.text)), body.long_texts)
    elif digest != start.run.head:
        raise UnlistedError("it is not what was known, continued")
    else:
        size += start.size
        salt = fields.get("cache_salt")
        sent = SentPrompt(
            start.continued((body.text,)),
            salt if isinstance(salt, str) else None,
            shows_its_text(fields),
            output_limit(path, fields),
        )
    return None if sent is None else ListedPrompt(sent, digest, None, (NewMark(body.end, size, Counted()),))


_STANDS: Final = "."
"""A text that stands for a prompt."""


def _chat_of(path: str, fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[int]]:
    """The chat, and for each item the number of its messages before it."""
    begins: list[int] = []
    if path == MESSAGES_PATH:
        return chat_of_message(fields, begins=begins), begins
    if path == RESPONSES_PATH:
        return chat_of_response(fields, begins=begins), begins
    return fields, [*range(len(fields["messages"]))]


def _head_digest(chat: Mapping[str, Any], before: bytes) -> int:
    """Hash of what the prompt of a chat has before the list. Templates write objects in the order of their fields,
    which ``before`` does not have."""
    ordered = [chat.get(name) for name in _ORDERED]
    return xxhash.xxh3_128_intdigest(before if ordered == _UNSET else before + b"\xff" + write_json(ordered))


_ORDERED: Final = ("chat_template_kwargs", "documents", "tools")
_UNSET: Final = [None] * len(_ORDERED)


def _may_change_tools(item: Any) -> bool:
    """Whether a message of the messages API may change the tools, which stand before all messages."""
    return isinstance(item, dict) and item.get("role") == "system"


def _marks(
    body: ListedBody, chat: Sequence[Mapping[str, Any]], begins: Sequence[int], places: Sequence[Place],
    pieces: Sequence[Piece],
) -> Iterator[NewMark]:  # fmt: skip
    """The places behind items at which marks may be set: those behind which nothing changes what is before them.
    ``pieces`` are those of the prompt that is not known."""
    start, items, head = body.start, body.fields[LISTS[body.path]], places[begins[0]]
    known, size = (Counted(), 0) if start is None else (start.counted, start.size)
    skipped = 0 if start is None else head.pieces
    checked = counted = 0
    for each in body.ends:
        if body.path == MESSAGES_PATH and any(map(_may_change_tools, items[checked : each.items])):
            return
        checked, before = each.items, begins[each.items]
        if body.path == RESPONSES_PATH and chat[before - 1]["role"] == "assistant":
            continue  # the next item may become a part of it
        place = places[before]
        size += size_of(pieces[counted : place.pieces - skipped])
        counted = place.pieces - skipped
        more = Counted(each.items, before - begins[0], place.parts - head.parts, each.bound)
        yield NewMark(each.end, size, known + more)
