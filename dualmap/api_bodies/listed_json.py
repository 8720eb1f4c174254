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
_MAX_OPENED: Final = 900
"""Objects and arrays that cannot be nested deeper than the reader of JSON allows in a whole."""
_MAX_TRIES: Final = 48
"""Wrong places that are tried in one object."""
_SKIPPED_BYTES: Final = 256

_BLANK: Final = b" \t\r\n"
# A quote behind an opening brace without a backslash begins or ends a string; here it begins a key, or tries show it.
_BETWEEN: Final = re.compile(rb'\}([ \t\r\n]*+,[ \t\r\n]*+)\{[ \t\r\n]*+"')
_GOES_ON: Final = re.compile(rb"[ \t\r\n]*+,[ \t\r\n]*+")
_OPENINGS: Final = {
    name: re.compile(rb'"%b"[ \t\r\n]*+:[ \t\r\n]*+\[[ \t\r\n]*+' % name.encode()) for name in ("input", "messages")
}


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
    found = _OPENINGS[name].search(body)
    if found is None:
        raise UnlistedError(name)
    return found.end()


def next_item(body: bytes, end: int) -> int | None:
    """The place of the item that follows one with this end; None: it is the last one, or something else follows."""
    found = _GOES_ON.match(body, end)
    return None if found is None else found.end()


def frame_bytes(body: bytes, begin: int, end: int, only: str) -> bytes:
    """The object around the list whose first item begins at ``begin``, and whose last one ends at ``end``. ``only``,
    which no client can guess, takes the place of its items; it has no character that JSON escapes."""
    return b'%b"%b"%b' % (body[:begin], only.encode(), body[end:])


def read_frame(frame: bytes, name: str, only: str) -> dict[str, Any]:
    """The fields of the object around the list, which is empty.

    Raises:
        UnlistedError: it is no object that has its list there.
    """
    try:
        fields = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise UnlistedError(str(error)) from error
    if not isinstance(fields, dict) or fields.get(name) != [only]:
        raise UnlistedError(name)
    fields[name] = []
    return fields


def stretches(body: bytes, begin: int) -> Generator[Stretch, None, None]:
    """The items from ``begin`` on, where one begins.

    Raises:
        UnlistedError: there are none that come apart.
    """
    tries, at = _MAX_TRIES, begin
    while True:
        pos = at + STRETCH_BYTES
        while True:
            found = _BETWEEN.search(body, pos)
            stretch = _stretch(body, at, len(body) if found is None else found.start() + 1)
            if stretch is not None:
                break
            tries -= 1
            if found is None or not tries:
                raise UnlistedError("a stretch has no end")
            pos = found.end() + _SKIPPED_BYTES * (_MAX_TRIES - tries)
        yield stretch
        if stretch.is_last or found is None:
            return
        at = found.end(1)


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
