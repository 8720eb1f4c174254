"""Bodies whose messages are plain: objects with a role, and text as their content.

They are most bodies, and are read in C where that is built (``plain_list.c``), without an object for each message: the
prompt's text at once, and the *frame*, which is the body with one string in place of its messages. The same clients
send the same frames again and again, so what follows from one is computed once (``router.http.short_bodies``). The
specification of the text is ``api_bodies.prompt``, with ``messages_api`` and ``responses_api``; everything that is not
plain is read by these alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any, Final, NamedTuple

import orjson

from dualmap.api_bodies.prompt import extra_fields


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
    if found is None:
        return None
    frame, text, open_messages = found
    if open_messages:
        text = _closed(body, text, open_messages)
        if text is None:
            return None
    return PlainList(frame, text)


def _closed(body: bytes, text: bytes, open_messages: Sequence[tuple[int, int, int]]) -> bytes | None:
    """The text with the further fields of messages that have some; None where their form is not known."""
    pieces: list[bytes] = []
    done = 0
    for place, begin, end in open_messages:
        try:
            extras, unread = extra_fields(orjson.loads(body[begin:end]))
        except (orjson.JSONDecodeError, RecursionError):
            return None
        if unread:
            return None
        pieces += (text[done:place], *extras)
        done = place
    return b"".join((*pieces, text[done:]))
