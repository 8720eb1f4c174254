"""A JSON object with one long list, read in parts: the *frame*, which is the object around the list, and the list's
items by *stretches*.

The parts are read by the same reader as a whole object, and together they are what the whole is, because JSON has no
state but the brackets that are open:

- The frame is the object with one item in place of all: a string that a client cannot guess. If that is valid JSON, and
  the object's list is this one string, then the list begins at this place of the object itself, and what follows its
  end is a valid rest. A second list of the same name, under any spelling, would stand in the frame in its place.
- A stretch in brackets of its own is valid JSON only if it is a sequence of whole items. A whole item ends where it
  ends, whatever follows, so the next stretch begins with an item.

Places that may lie between two items are searched for, and each is tried: a wrong one makes no valid JSON. An object
that does not come apart so is ``UnlistedError``, valid or not: somebody else has to read it.

A reader in the state behind an item may thus go on from the end of any item of the list, where the bytes before are
those of an object that was read: the frame and the items behind are all that it has to read.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, Final

import orjson

from dualmap.scheduling.values import value

STRETCH_BYTES: Final = 32 << 10
"""A stretch is as long as this, and up to the end of its last item."""
LONG_STRING_BYTES: Final = 64 << 10
_MAX_STRETCH_BYTES: Final = 512 << 10
"""Most bytes that are read at once."""
_MAX_WASTED_BYTES: Final = 1 << 20
"""Most bytes that are read for wrong places, of one object."""
_MAX_OPENED: Final = 900
"""Objects and arrays that cannot be nested deeper than the reader of JSON allows in a whole."""
_MAX_LISTS: Final = 4
"""Places where the list may begin."""
_SKIPPED_BYTES: Final = 256

_BLANK: Final = b" \t\r\n"
# Items are taken to be objects that begin with a key: in a string, a quote has a backslash before it. As clients write
# them, compactly or with a blank; where there are others between two items, the stretch is longer.
_BETWEEN: Final = (b'},{"', b'}, {"')
_GOES_ON: Final = re.compile(rb"[ \t\r\n]*+,[ \t\r\n]*+")
_OPENS: Final = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+\[[ \t\r\n]*+")
_QUOTES: Final = re.compile(rb'[ \t\r\n]*+:[ \t\r\n]*+"')


class UnlistedError(ValueError):
    """The object does not come apart into frame and stretches."""


@value
class Stretch:
    """Some items, one after the other."""

    items: list[Any]
    end: int
    """Behind the last of them."""
    bound: JsonBound
    text: bytes
    """The items as an array."""
    is_last: bool


@value
class JsonBound:
    """An upper bound of what JSON is made of."""

    values: int = 0
    """Objects, arrays and strings."""
    commas: int = 0

    def __add__(self, other: JsonBound) -> JsonBound:
        return JsonBound(self.values + other.values, self.commas + other.commas)


def bound_of(text: bytes) -> JsonBound:
    count = text.count
    return JsonBound(count(b'"') // 2 + count(b"{") + count(b"["), count(b","))


def items_begin(body: bytes, name: str) -> int:
    """The place of the first item of the first list that is called so.

    Raises:
        UnlistedError: there is none.
    """
    return _first_called(body, name, _OPENS).end()


def text_begins(body: bytes, name: str) -> int:
    """The place of the first quote of the first string that is called so.

    Raises:
        UnlistedError: there is none.
    """
    return _first_called(body, name, _QUOTES).end() - 1


def _first_called(body: bytes, name: str, opens: re.Pattern[bytes]) -> re.Match[bytes]:
    """The beginning of the first value of that name which opens so. Raises UnlistedError."""
    quoted, at = b'"%b"' % name.encode(), 0
    for _ in range(_MAX_LISTS):
        at = body.find(quoted, at) + len(quoted)
        if at < len(quoted):
            break
        if (found := opens.match(body, at)) is not None:
            return found
    raise UnlistedError(name)


def read_text(body: bytes, at: int) -> tuple[str, int]:
    """The rest of a string, from a place in it where a character begins, and the place behind its last quote.

    Raises:
        UnlistedError: it is none.
    """
    text = b'"%b' % body[at:]
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:  # what follows the string is too much
        text = text[: len(error.doc[: error.pos].encode())].rstrip(_BLANK)
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UnlistedError(str(error)) from error
    if not isinstance(found, str):
        raise UnlistedError("it is no string")
    return found, at + len(text) - 1


def next_item(body: bytes, end: int) -> int | None:
    """The place of the item that follows one with this end; None: it is the last one, or something else follows."""
    found = _GOES_ON.match(body, end)
    return None if found is None else found.end()


def frame_bytes(body: bytes, begin: int, end: int, only: str) -> bytes:
    """The object around the list whose first item begins at ``begin``, and whose last one ends at ``end``. ``only``,
    which no client can guess, takes the place of its items; it has no character that JSON escapes."""
    return b'%b"%b"%b' % (body[:begin], only.encode(), body[end:])


def read_frame(frame: bytes, name: str, only: str) -> dict[str, Any]:
    """The fields of the object around the list, which is empty; or around a string, in whose place the list is.

    Raises:
        UnlistedError: it is no object that has its list, or its string, there.
    """
    try:
        fields = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise UnlistedError(str(error)) from error
    if not isinstance(fields, dict) or fields.get(name) not in ([only], only):
        raise UnlistedError(name)
    fields[name] = []
    return fields


def stretches(body: bytes, begin: int) -> Generator[Stretch | None, None, None]:
    """The items from ``begin`` on, where one begins; None stands for a step without any.

    Raises:
        UnlistedError: there are none that come apart.
    """
    at, wasted = begin, 0
    while True:
        between, skipped = at + STRETCH_BYTES, _SKIPPED_BYTES
        while True:
            between = _find_between(body, between, at + _MAX_STRETCH_BYTES)
            end = between + 1 if between >= 0 else len(body)
            stretch = _stretch(body, at, end)
            if stretch is not None:
                break
            wasted += end - at
            if between < 0 or wasted > _MAX_WASTED_BYTES:
                raise UnlistedError("a stretch has no end")
            between, skipped = end + skipped, 2 * skipped
            yield None
        yield stretch
        if stretch.is_last or between < 0:
            return
        at = body.index(b"{", between)


def _find_between(body: bytes, start: int, end: int) -> int:
    """The next place behind which two items may lie next to each other; -1: there is none."""
    places = [place for each in _BETWEEN if (place := body.find(each, start, end)) >= 0]
    return min(places, default=-1)


def _stretch(body: bytes, begin: int, end: int) -> Stretch | None:
    """The items between two places, or up to the end of the list where that comes before; None: they are none."""
    if end - begin > _MAX_STRETCH_BYTES:
        raise UnlistedError("a stretch is too long")
    text = b"[%b]" % body[begin:end]
    try:
        items, is_last = orjson.loads(text), False
    except orjson.JSONDecodeError as error:
        text = text[: len(error.doc[: error.pos].encode())].rstrip(_BLANK)
        if not text.endswith(b"]"):
            return None
        try:  # the list may have ended there, so that the rest was too much
            items, is_last = orjson.loads(text), True
        except orjson.JSONDecodeError:
            return None
        end = begin + len(text[1:-1].rstrip(_BLANK))
    opened = text.count(b"{") + text.count(b"[")
    if not items or (opened > _MAX_OPENED and not _is_json(b"[%b]" % text)):  # in an object, it is one deeper
        raise UnlistedError("it has no parts, or is nested too deeply")
    bound = JsonBound(text.count(b'"') // 2 + opened, text.count(b",") + 1)  # with the comma behind it
    return Stretch(items, end, bound, text, is_last)


def _is_json(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def has_long_string(text: bytes) -> bool:
    """Whether JSON may have a string of over ``LONG_STRING_BYTES``: a quote without a backslash before it begins or
    ends one, so that there is none where such quotes are no further apart."""
    at, size = 0, len(text)
    while size - at > LONG_STRING_BYTES:
        quote = text.rfind(b'"', at + 1, at + LONG_STRING_BYTES + 1)
        if quote < 0 or text[quote - 1] == 0x5C:
            return True
        at = quote
    return False
