"""Logs for people: lists of JSON objects, the latest first, of which the last ones are kept."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import orjson

from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.readable import UNREADABLE

Entry = TypeVar("Entry")


def logged(log: bytes, entry: Any, most: int) -> tuple[Command, Command]:
    """The commands that add an entry, a dataclass, to a log and keep at most so many entries."""
    return ("LPUSH", log, orjson.dumps(entry)), ("LTRIM", log, 0, most - 1)


async def last_logged(calls: Calls, log: bytes, kind: type[Entry], limit: int) -> list[Entry]:
    """The last entries, the latest first, without those that cannot be read."""
    lines = await calls.command("LRANGE", log, 0, limit - 1) if limit > 0 else ()
    entries = []
    for line in lines:
        with contextlib.suppress(*UNREADABLE):
            entries.append(kind(**codec.known_fields(kind, orjson.loads(line))))
    return entries
