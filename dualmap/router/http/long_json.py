"""A long JSON object read in steps: its number of values is known, and bounded, before any object is built.

Cost and memory of building a value hardly depend on its length, so a body of millions of tiny ones would block the
event loop for seconds. A first pass finds the strings and counts what lies between them; it stops when there are too
many values. Strings of ``LONG_STRING_BYTES`` and more (documents, images) are cut out: each is decoded in pieces, and
replaced by a short name that follows from its text. The rest is short enough to be built at once.

A body that is beyond these bounds, or no JSON, is not read any further: it is passed on as it came.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from dualmap.api_bodies.json_body import UnreadableJsonError, read_json
from dualmap.api_bodies.prompt import LongTexts
from dualmap.router.http.doubled_fields import RULED_FIELDS, TOKEN_FIELDS
from dualmap.router.http.steering import SAMPLING

LONG_STRING_BYTES: Final = 64 << 10

_STEP_BYTES: Final = 512 << 10
"""Read, or decoded, in one step."""
_STEP_STRINGS: Final = 2000

_SEPARATORS: Final = frozenset({b":", b": ", b",", b", "})
_BACKSLASH: Final = b"\\"
_QUOTE: Final = ord('"')
_COLON: Final = re.compile(rb"[ \t\r\n]*+:")
_RULED: Final = {b'"%b"' % name.encode(): name for name in RULED_FIELDS}
_LONGEST_KEY_BYTES: Final = 2 + 6 * max(map(len, RULED_FIELDS))
"""Bytes of a key with all its letters escaped."""

# Whole characters and escapes, a pair of surrogates for one; ends before the quote, or before what is cut in two. A
# high surrogate is alone where something else than a low one follows.
_CHARACTERS: Final = re.compile(
    rb"""(?: [^"\\]++ | \\[^u] | \\u (?:
          (?! [dD][89abAB] ) [0-9a-fA-F]{4}
        | [dD][89abAB] [0-9a-fA-F]{2} (?:
              \\u [dD][c-fC-F] [0-9a-fA-F]{2}
            | (?= [^\\] | \\[^u] | \\u (?! [dD][c-fC-F] ) [0-9a-fA-F]{2} )
          )
        ) )*+""",
    re.DOTALL | re.VERBOSE,
)

Steps = Generator[None, None, None]


@dataclass(slots=True)
class LongJson:
    """The parts that were found. ``short`` is the object with a name in place of each long string."""

    short: bytes = b""
    long_texts: dict[str, bytes] = field(default_factory=dict)
    """The long strings in UTF-8, by their names."""
    values: int = 0
    """Objects, arrays and strings (keys are strings, too)."""
    numbers: int = 0
    """Numbers, or anything else between commas, and some of the above; ten of them count as one value."""
    model_span: tuple[int, int] | None = None
    """Span in the body of the string of its own field ``model``, quotes included."""
    doubled: frozenset[str] = frozenset()
    """The object's own fields that it has more than once, of those that rights depend on (``doubled_fields``)."""
    excess: str = ""
    """Why the body was not read to its end: it is beyond the bounds. ``short`` is empty then, and the model known if it
    came before."""

    @property
    def memory_bytes(self) -> int:
        """Upper bound of the memory to build and render it: text takes up to 4 times its size in UTF-8."""
        built = 200 * self.values + 80 * self.numbers + 5 * len(self.short)
        return built + 2 * sum(map(len, self.long_texts.values()))


def scan_json(body: bytes, *, max_values: int, max_short_bytes: int) -> Generator[None, None, LongJson]:
    """The first pass, in steps.

    Raises:
        UnreadableJsonError: a string has no end, or is none.
    """
    scan = _Scan(body, max_values, max_short_bytes)
    try:
        yield from scan.run()
    except _BeyondBoundsError as error:
        return LongJson(model_span=scan.found.model_span, excess=str(error))
    return scan.found


def check_counts(body: Mapping[str, Any], long_texts: LongTexts) -> None:
    """An engine reads a number out of a text of any length, such as 100,000 blanks and 50.

    Raises:
        UnreadableJsonError: a field for the number or the length of answers is a text that was left out.
    """
    sampling = body.get(SAMPLING)
    for fields in (body, sampling if isinstance(sampling, dict) else {}):
        for name in TOKEN_FIELDS & fields.keys():
            if isinstance(fields[name], str) and fields[name] in long_texts:
                raise UnreadableJsonError(f"its field {name!r} is a long text")


class _BeyondBoundsError(Exception):
    """The body is not to be read to its end."""


def _invalid(why: str) -> UnreadableJsonError:
    return UnreadableJsonError(f"the body is not valid JSON: {why}")


class _Scan:
    def __init__(self, body: bytes, max_values: int, max_short_bytes: int) -> None:
        self.found = LongJson()
        self._body = body
        self._max_values = max_values
        self._max_short_bytes = max_short_bytes
        self._depth = 0
        self._kept: list[bytes | memoryview] = []
        self._kept_to = 0
        """The body up to here is in ``_kept``."""
        self._cut_bytes = 0
        self._key_end = 0
        """Behind the last key of the object itself that is a ruled field."""
        self._key = ""
        """The name of the field, if that was the object's last string; else empty."""
        self._keys: set[str] = set()
        """The ruled fields that the object has."""

    def run(self) -> Steps:
        body, size = self._body, len(self._body)
        pos = strings = 0
        while pos < size:
            start = body.find(b'"', pos, pos + _STEP_BYTES)
            stop = start if start >= 0 else min(pos + _STEP_BYTES, size)
            if body[pos:stop] not in _SEPARATORS:
                self._count(pos, stop)
            if start < 0:
                pos = stop
                self._check_size(pos)
                yield
                continue
            end = body.find(b'"', start + 1)
            if end < 0:
                raise _invalid(f"the string that begins at {start} has no end")
            if body.find(_BACKSLASH, start + 1, end) >= 0:
                end = yield from self._end_of_escaped(start + 1)
            self._see_string(start, end)
            if end - start > LONG_STRING_BYTES:
                yield from self._cut(start, end)
            pos, strings = end + 1, strings + 1
            if strings % _STEP_STRINGS == 0:
                self._check_size(pos)
                yield
        self._check_size(size)
        self._kept.append(body[self._kept_to :])
        self.found.short = b"".join(self._kept)

    def _count(self, start: int, stop: int) -> None:
        """The bytes between two strings."""
        count = self._body.count
        opened = count(b"{", start, stop) + count(b"[", start, stop)
        self._depth += opened - count(b"}", start, stop) - count(b"]", start, stop)
        self.found.numbers += count(b",", start, stop)
        self._add_values(opened)

    def _add_values(self, count: int) -> None:
        self.found.values += count
        if self.found.values + self.found.numbers // 10 > self._max_values:
            raise _BeyondBoundsError(
                f"the body has over {self._max_values} objects, arrays and strings (ten numbers count as one)"
            )

    def _check_size(self, pos: int) -> None:
        if pos - self._cut_bytes > self._max_short_bytes:
            raise _BeyondBoundsError(
                f"the body is over {self._max_short_bytes} bytes, strings of {LONG_STRING_BYTES} bytes and more left"
                " aside"
            )

    def _end_of_escaped(self, pos: int) -> Generator[None, None, int]:
        """The end of the string whose first character is at ``pos``."""
        body, size = self._body, len(self._body)
        while True:
            at = self._behind_characters(pos, size)
            if at < size and body[at] == _QUOTE:
                return at
            if at == pos:
                raise _invalid(f"a string has a wrong escape, or no end, at {pos}")
            pos = at
            yield

    def _behind_characters(self, pos: int, end: int) -> int:
        """Behind the whole characters from ``pos`` on, up to a step's worth of them."""
        body, stop = self._body, pos + _STEP_BYTES
        if stop < end:
            for _ in range(3):  # not inside of a character of UTF-8
                stop -= body[stop] & 0xC0 == 0x80
        found = _CHARACTERS.match(body, pos, min(stop, end))
        assert found is not None
        return found.end()

    def _see_string(self, start: int, end: int) -> None:
        self._add_values(1)
        if self._depth != 1:
            return
        if self._key == "model" and self._body[self._key_end : start].strip() == b":":
            self.found.model_span = (start, end + 1)
        said = self._body[start : end + 1] if end - start <= _LONGEST_KEY_BYTES else b""
        self._key = name = _RULED.get(said, "") or (_ruled_name(said) if _BACKSLASH in said else "")
        if not name:
            return
        self._key_end = end + 1
        if _COLON.match(self._body, end + 1) is None:  # no key
            self._key = ""
        elif name in self._keys:
            self.found.doubled |= {name}
        else:
            self._keys.add(name)

    def _cut(self, start: int, end: int) -> Steps:
        """Replace the string by its name."""
        pieces, digest, pos = [], xxhash.xxh3_128(), start + 1
        while pos < end:
            stop = self._behind_characters(pos, end + 1)  # with the quote, which it ends before
            if stop == pos:
                raise _invalid(f"a string has a wrong escape at {pos}")
            piece = _decoded(b'"%b"' % self._body[pos:stop])
            pieces.append(piece)
            digest.update(piece)
            pos = stop
            yield
        name = digest.hexdigest()
        self.found.long_texts[f"\0{name}"] = b"".join(pieces)
        self._kept += (self._body[self._kept_to : start], b'"\\u0000%b"' % name.encode())
        self._kept_to = end + 1
        self._cut_bytes += end - start - 1


def _decoded(string: bytes) -> bytes:
    try:
        text: str = read_json(string)
    except UnreadableJsonError as error:
        raise _invalid(str(error)) from error
    return text.encode("utf-8", "surrogatepass")


def _ruled_name(string: bytes) -> str:
    """The name of a ruled field that a string with escapes says; empty for any other."""
    try:
        name: str = read_json(string)
    except UnreadableJsonError:
        return ""
    return name if name in RULED_FIELDS else ""
