"""Bodies whose messages are plain: objects with a role, and text as their content.

They are most bodies, and are read in C where that is built (``plain_list.c``), without an object for each message: the
prompt's text at once, and the *frame*, which is the body with one string in place of its messages. The same clients
send the same frames again and again, so what follows from one is computed once (``router.http.short_bodies``). The
specification of the text is ``api_bodies.prompt``, with ``messages_api`` and ``responses_api``; everything that is not
plain is read by these alone.
"""

from __future__ import annotations

from enum import IntEnum
from types import ModuleType
from typing import Any, Final, NamedTuple


class Api(IntEnum):
    """APIs that have a list of messages; numbers of ``plain_list.c``."""

    CHAT = 0
    MESSAGES = 1
    RESPONSES = 2


NAMES: Final = {Api.CHAT: "messages", Api.MESSAGES: "messages", Api.RESPONSES: "input"}
"""The list of messages, by API."""


def _load() -> ModuleType | None:
    try:
        from dualmap.api_bodies import _plain_list
    except ImportError:
        return None
    return _plain_list


NATIVE: Final[Any] = _load()
"""The extension; None where it is not built."""
_QUOTED: Final = {api: b'"%b"' % name.encode() for api, name in NAMES.items()}


class PlainList(NamedTuple):
    """A body with plain messages."""

    frame: bytes
    text: bytes
    """The messages as a prompt has them."""


def plain_list(body: bytes, api: Api, only: bytes, *, native: Any = NATIVE) -> PlainList | None:
    """The messages of a body, and the frame around them; None where they are not plain, or nothing native reads them.
    ``only`` is the JSON of a string that no client can guess: the frame has it in place of the messages.

    The messages are valid JSON. Whether the frame is, and whether it has its list where the messages were, its reader
    has to check (``listed_json.read_frame``).
    """
    found = None if native is None else native.plain_list(body, _QUOTED[api], only, api)
    return None if found is None else PlainList(*found)


class PlainPlace(NamedTuple):
    """A place behind a message."""

    messages: int
    parts: int
    """Content parts of the messages before it."""
    end: int
    """Bytes of the body up to there."""
    written: int
    """Bytes of the text up to there."""
    values: int
    """Objects, arrays and strings before it."""
    commas: int


def plain_items(
    body: bytes, begin: int, stretch_bytes: int, api: Api, *, native: Any = NATIVE
) -> tuple[bytes, list[PlainPlace]] | None:
    """The messages of a list from the one on that begins there, as a prompt has them, and places behind messages about
    every so many bytes; the last one is behind the last message. None as for ``plain_list``."""
    found = None if native is None else native.plain_items(body, begin, stretch_bytes, api)
    return None if found is None else (found[0], [PlainPlace(*each) for each in found[1]])
