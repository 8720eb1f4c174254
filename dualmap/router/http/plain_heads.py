"""Heads of messages that can be read in one way only, and fields written one behind the other: in C where that is built
(``plain_heads.c``).

Reading them is a shortcut, and no second owner of a rule: most heads are *plain*, and both readers make the same of
those as the parser of HTTP does. All others, with everything that is refused, are left to the parser, and so is every
head where the extension is not built.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

Header = tuple[bytes, bytes]
"""One field: name in lower case, value without surrounding blanks."""

PlainRequest = tuple[bytes, list[Header], dict[bytes, bytes], int, int]
"""Target, fields, the first field of each name, where the body begins, the body's length."""
PlainAnswer = tuple[int, list[Header], dict[bytes, bytes], int, int]
"""Status, fields, the last field of each name, where the body begins, the body's length; that is below 0 where the body
is chunked."""

ReadRequest = Callable[[bytes, int, int], PlainRequest | None]
"""Reads the head of a POST request at the begin of some bytes; None where it is not plain, has more bytes or fields
than these, or is not whole."""
ReadAnswer = Callable[[bytes, int], PlainAnswer | None]
"""Reads the head of an answer at the begin of some bytes, likewise."""


def no_plain_request(_data: bytes, _max_head_bytes: int, _max_fields: int) -> PlainRequest | None:
    """Leaves every head to the parser."""
    return None


def no_plain_answer(_data: bytes, _max_head_bytes: int) -> PlainAnswer | None:
    """Leaves every head to the parser."""
    return None


def without_in_python(fields: list[Header], dropped: frozenset[bytes]) -> list[Header]:
    """The fields whose names are others than these."""
    return [field for field in fields if field[0] not in dropped]


def lines_in_python(begin: bytes, fields: list[Header], end: bytes) -> bytes:
    """The fields as lines of a head, between two parts of it."""
    # Joined: to format each field takes three times as long.
    return begin + b"\r\n".join([*map(b": ".join, fields), end])


def _load() -> ModuleType | None:
    try:
        from dualmap.router.http import _plain_heads
    except ImportError:
        return None
    return _plain_heads


NATIVE: Final[Any] = _load()
"""The extension; None where it is not built."""

read_request: Final[ReadRequest] = no_plain_request if NATIVE is None else NATIVE.read_request
read_answer: Final[ReadAnswer] = no_plain_answer if NATIVE is None else NATIVE.read_answer
without: Final[Callable[[list[Header], frozenset[bytes]], list[Header]]] = (
    without_in_python if NATIVE is None else NATIVE.without
)
"""See ``without_in_python``."""
lines: Final[Callable[[bytes, list[Header], bytes], bytes]] = lines_in_python if NATIVE is None else NATIVE.lines
"""See ``lines_in_python``."""
