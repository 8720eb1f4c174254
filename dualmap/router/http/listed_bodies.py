"""Reading JSON bodies with a list of messages by stretches, from where a former body is known to end.

What is read here is read exactly as by ``scan_json`` and one parse of the whole (``router.http.long_bodies``), but for
a third of the time: no string is looked at but by the reader of JSON, and upper bounds are counted. Strings of 64 KB
are cut out as there. A body that may be beyond the bounds, or does not come apart, is left to those. A chat with plain
messages is read without stretches, where something native does so (``api_bodies.plain_list``).
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import xxhash

from dualmap.api_bodies import listed_json
from dualmap.api_bodies.json_body import UnreadableJsonError, read_json
from dualmap.api_bodies.listed_json import (
    JsonBound,
    UnlistedError,
    bound_of,
    frame_bytes,
    has_long_string,
    items_begin,
    next_item,
    read_frame,
    read_text,
    stretches,
    text_begins,
)
from dualmap.api_bodies.plain_list import Api, PlainPlace, plain_items
from dualmap.api_bodies.prompt import LongTexts
from dualmap.router.http.admission import LONG_BODY_BYTES, content_encoding, inference_request_of, token_source
from dualmap.router.http.body_edits import json_model_span
from dualmap.router.http.doubled_fields import RULED_FIELDS, may_be_doubled
from dualmap.router.http.long_json import LongJson, check_counts, scan_json
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.kept import Kept
from dualmap.router.prompts.inference_request import CHAT_PATH, COMPLETIONS_PATH, InferenceRequest, TokenSource
from dualmap.router.prompts.known_bodies import ContinuedChat, KnownBodies, Listed, ListHashes, Mark
from dualmap.router.prompts.listed_prompt import (
    LISTS,
    STANDS_FOR_ALL,
    Head,
    ItemEnd,
    ListedBody,
    ListedPrompt,
    PlainBody,
    TextBody,
    listed_prompt,
    plain_prompt,
    text_prompt,
)
from dualmap.scheduling.prompts.blocks import Piece, TextPrompt
from dualmap.scheduling.values import record, value

_ONLY: Final = secrets.token_hex(16)
_PROMPT: Final = "prompt"
"""The text of completions."""

MAX_FRAME_BYTES: Final = 16 << 20
"""Most memory for the objects around lists: some 80 with tools of 40 KB."""
MAX_PLAIN_BYTES: Final = 1 << 20
"""Most bytes of messages that are read in C at once: about a millisecond's work."""
_VALUE_BYTES: Final = 200
_TEXT_FACTOR: Final = 5
"""Upper bounds of the memory of a value, and of text by its bytes."""


@value
class Listing:
    """A body whose list was found."""

    whose: int
    """Hash of tenant and path."""
    name: str
    begin: int
    """The place of its first item."""
    hashes: ListHashes
    marks: Sequence[Mark]
    """Those that it has, the longest first."""

    def is_short(self, mark: Mark) -> bool:
        """Whether what is not known reads like a short body."""
        return len(self.hashes) - mark.end - mark.run.behind <= LONG_BODY_BYTES


@record
class Frame:
    """The object around a list, as agents of one program send it again and again."""

    fields: Mapping[str, Any]
    """Its fields, which are not changed."""
    long_texts: LongTexts
    bound: JsonBound
    doubled: frozenset[str]
    model_span: tuple[int, int] | None
    """Span of the model's name in the frame."""
    head: Head | None = None
    """What its prompts have before the list, once this is known."""


class ListedBodies:
    """Reads bodies, and keeps what it learns of them."""

    def __init__(
        self, known: KnownBodies, *, max_json_values: int, max_json_bytes: int, max_prompt_parts: int,
        trusts_transfers: bool,
    ) -> None:  # fmt: skip
        self._known = known
        self._frames = Kept[int, Frame](MAX_FRAME_BYTES)
        self._max_json_values = max_json_values
        self._max_json_bytes = max_json_bytes
        self._max_prompt_parts = max_prompt_parts
        self._trusts_transfers = trusts_transfers

    def find(self, request: ClientRequest) -> Listing | None:
        """The list of a body; None where it is none to be read here."""
        body, path = request.body, request.path
        name, most = LISTS.get(path), self._max_json_bytes
        if path == COMPLETIONS_PATH:
            name, most = _PROMPT, min(most, MAX_PLAIN_BYTES)
        if name is None or len(body) > most or content_encoding(request) is not None:
            return None
        try:
            begin = text_begins(body, name) if name is _PROMPT else items_begin(body, name)
        except UnlistedError:
            return None
        hashes = ListHashes(body, begin, _tenant_of(request), request.path)
        return Listing(hashes.grid[0], name, begin, hashes, [*self._known.find(hashes)])

    def forget(self, mark: Mark) -> None:
        """Forget what is known of a list, which is of no use."""
        self._known.forget(mark.run)

    def read(
        self, request: ClientRequest, request_id: str, listing: Listing, start: Mark | None, *, at_once: bool
    ) -> Generator[int, None, InferenceRequest]:
        """The request, from a mark on, in steps: each yields an upper bound of the memory that it took. ``at_once``:
        they are short, or it is not read.

        Raises:
            UnlistedError: it is not to be read so.
        """
        body, begin = request.body, listing.begin
        if listing.name is _PROMPT:
            return (yield from self._read_text(request, request_id, listing, start, at_once=at_once))
        at = begin if start is None else next_item(body, begin + start.end)
        if at is None:
            raise UnlistedError("nothing is new")
        plain = None
        if request.path == CHAT_PATH and len(body) - at <= MAX_PLAIN_BYTES:
            plain = plain_items(body, at, listed_json.STRETCH_BYTES, Api.CHAT)
        if plain is not None:
            with suppress(UnlistedError):
                return (yield from self._read_plain(request, request_id, listing, start, *plain, at_once=at_once))
        bound = JsonBound()
        items: list[Any] = []
        long_texts: dict[str, bytes] = {}
        ends: list[ItemEnd] = []
        for stretch in stretches(body, at):
            if stretch is None:
                yield 0
                continue
            if has_long_string(stretch.text):
                items += yield from _short(stretch.text, long_texts)
            else:
                items += stretch.items
                yield _TEXT_FACTOR * len(stretch.text) + _VALUE_BYTES * stretch.bound.values
            bound += stretch.bound
            self._check(bound)
            ends.append(ItemEnd(len(items), stretch.end - begin, bound))
            at = stretch.end
        frame = yield from self._frame(frame_bytes(body, begin, at, _ONLY), listing, at_once=at_once)
        self._check(bound + frame.bound if start is None else bound + frame.bound + start.counted.bound)
        fields = {**frame.fields, listing.name: items}
        long_texts |= frame.long_texts
        listed = ListedBody(request.path, fields, long_texts, ends, start, frame.head)
        found = listed_prompt(listed, max_parts=self._max_prompt_parts)
        if found is not None and isinstance(prompt := found.sent.prompt, ContinuedChat) and found.sent.teaches:
            source = TokenSource(request.path, fields, long_texts, TextPrompt(prompt.pieces))
            found.sent.late_source = lambda: source
        return self._completed(request, request_id, listing, start, at, frame, fields, long_texts, found)

    def _read_plain(
        self, request: ClientRequest, request_id: str, listing: Listing, start: Mark | None,
        text: bytes, places: Sequence[PlainPlace], *, at_once: bool,
    ) -> Generator[int, None, InferenceRequest]:  # fmt: skip
        """The request of a chat whose messages behind the mark are plain, and were read.

        Raises:
            UnlistedError: it is not to be read so.
        """
        body, begin = request.body, listing.begin
        yield 2 * len(text)
        at = places[-1].end
        bound = JsonBound(places[-1].values, places[-1].commas)
        frame = yield from self._frame(frame_bytes(body, begin, at, _ONLY), listing, at_once=at_once)
        self._check(bound + frame.bound if start is None else bound + frame.bound + start.counted.bound)
        fields = {**frame.fields, listing.name: [STANDS_FOR_ALL]}
        plain = PlainBody(fields, frame.long_texts, text, places, begin, start, frame.head)
        found = plain_prompt(plain, max_parts=self._max_prompt_parts)
        sent = found.sent
        if sent.source is not None:
            assert isinstance(sent.prompt, TextPrompt)
            sent.late_source = partial(token_source, request.path, body, sent.prompt)
            sent.source = None
        elif isinstance(sent.prompt, ContinuedChat) and sent.teaches:
            assert start is not None
            first = next_item(body, begin + start.end)
            source = partial(_tail_source, frame, listing.name, request.path, body[first:at], sent.prompt.pieces)
            sent.late_source = source
        return self._completed(request, request_id, listing, start, at, frame, fields, frame.long_texts, found)

    def _read_text(
        self, request: ClientRequest, request_id: str, listing: Listing, start: Mark | None, *, at_once: bool
    ) -> Generator[int, None, InferenceRequest]:
        """The request of a completions body with one text as its prompt.

        Raises:
            UnlistedError: it is not to be read so.
        """
        body, begin = request.body, listing.begin
        text, at = read_text(body, begin + (1 if start is None else start.end))
        if not text:
            raise UnlistedError("nothing is new")
        yield _TEXT_FACTOR * len(text)
        frame = yield from self._frame(frame_bytes(body, begin, at, _ONLY), listing, at_once=at_once)
        self._check(frame.bound)
        prompt = TextBody(frame.fields, frame.long_texts, text, at - 1 - begin, start)
        found = text_prompt(prompt, max_parts=self._max_prompt_parts)
        fields = {**frame.fields, _PROMPT: text}
        return self._completed(request, request_id, listing, start, at, frame, fields, frame.long_texts, found)

    def _completed(
        self, request: ClientRequest, request_id: str, listing: Listing, start: Mark | None, at: int, frame: Frame,
        fields: dict[str, Any], long_texts: LongTexts, found: ListedPrompt | None,
    ) -> InferenceRequest:  # fmt: skip
        """The request with this prompt, whose list ends at ``at``; what was learned of it is kept once it is hashed."""
        body, begin = request.body, listing.begin
        prompt = None if found is None else found.sent
        read = inference_request_of(
            request, request_id, fields, prompt, long_texts, trusts_transfers=self._trusts_transfers
        )
        read.doubled, span = frame.doubled, frame.model_span
        if span is not None:
            left_out = 0 if span[0] < begin else at - begin - len(_ONLY) - 2
            read.model_span = span[0] + left_out, span[1] + left_out
        if found is not None:
            if start is not None:
                self._known.use(start)
            if found.marks:
                kept = Listed(listing.hashes, found.digest, len(body) - at)
                found.sent.hashed = partial(self._known.keep, kept, start, found.marks)
            frame.head = frame.head or found.head
        return read

    def _frame(self, text: bytes, listing: Listing, *, at_once: bool) -> Generator[int, None, Frame]:
        """The object around a list. Raises UnlistedError."""
        key = xxhash.xxh3_128_intdigest(text, listing.whose)
        known = self._frames.get(key)
        if known is not None:
            return known
        if at_once and len(text) > LONG_BODY_BYTES:
            raise UnlistedError("it takes long to read")
        bound = bound_of(text)
        self._check(bound)
        fields = read_frame(text, listing.name, _ONLY)
        long_texts: dict[str, bytes] = {}
        if has_long_string(text):
            fields = yield from _short(text, long_texts)
            try:
                check_counts(fields, long_texts)
            except UnreadableJsonError as error:
                raise UnlistedError(error.reason) from error
        yield _TEXT_FACTOR * len(text)
        doubled: frozenset[str] = frozenset()
        if may_be_doubled(text, fields, RULED_FIELDS):
            doubled = yield from _doubled(text)
        span = json_model_span(text) if isinstance(fields.get("model"), str) else None
        frame = Frame(fields, long_texts, bound, doubled, span)
        self._frames.keep(key, frame, _TEXT_FACTOR * len(text) + _VALUE_BYTES * bound.values)
        return frame

    def _check(self, bound: JsonBound) -> None:
        if bound.values + bound.commas // 10 > self._max_json_values:
            raise UnlistedError("it may be beyond the bounds")


def _tenant_of(request: ClientRequest) -> str:
    return "" if request.caller is None else request.caller.tenant.name


def _tail_source(frame: Frame, name: str, path: str, items: bytes, pieces: Sequence[Piece]) -> TokenSource:
    """The source of the tokens of a list's last items."""
    fields = {**frame.fields, name: read_json(b"[%b]" % items)}
    return TokenSource(path, fields, frame.long_texts, TextPrompt(pieces))


def _short(text: bytes, long_texts: dict[str, bytes]) -> Generator[int, None, Any]:
    """The value with names in place of its long strings, which are added to the others."""
    found = yield from _scanned(text)
    long_texts |= found.long_texts
    yield len(text) + found.memory_bytes
    return read_json(found.short)


def _doubled(frame: bytes) -> Generator[int, None, frozenset[str]]:
    found = yield from _scanned(frame)
    return found.doubled


def _scanned(text: bytes) -> Generator[int, None, LongJson]:
    scan = scan_json(text, max_values=len(text), max_short_bytes=len(text))
    while True:
        try:
            next(scan)
        except StopIteration as end:
            found: LongJson = end.value
            return found
        yield 0
