"""Tolerant reading: a store may hold values that this fleet did not write, as people and scripts change keys by hand.

A value that cannot be read is an error of the store, whatever Python calls it, so that every caller does what it does
without a store. An unreadable entry of a collection counts as missing: the others stay in use until the leader has
mended it (``statestore.pool.upkeep``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import lru_cache, wraps
from typing import Any, Final, ParamSpec, TypeVar

from dualmap.statestore.errors import UnreadableStateError

Parameters = ParamSpec("Parameters")
Reply = TypeVar("Reply")
Entry = TypeVar("Entry")
Call = Callable[Parameters, Coroutine[Any, Any, Reply]]

UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, struct.error)
"""Exceptions that parsing raises where a text is not what it should be."""
LARGEST_COUNT: Final = 2**53
"""Beyond it a count is no longer exact in a script, and far beyond what a fleet counts to."""


def unreadable(what: str, error: Exception) -> UnreadableStateError:
    return UnreadableStateError(f"what the store keeps cannot be read ({what}): {error!r}")


def checks_replies(call: Call[Parameters, Reply]) -> Call[Parameters, Reply]:
    """A call whose replies may not be readable: that is an ``UnreadableStateError``."""

    @wraps(call)
    async def checked(*arguments: Parameters.args, **named: Parameters.kwargs) -> Reply:
        try:
            return await call(*arguments, **named)
        except UNREADABLE as error:
            raise unreadable(call.__name__, error) from error

    return checked


def is_readable(parse: Callable[[], object]) -> bool:
    try:
        parse()
    except UNREADABLE:
        return False
    return True


def each_readable(texts: Mapping[bytes, bytes], parse: Callable[[str, bytes], Entry]) -> dict[str, Entry]:
    """The readable entries by name, in order."""
    found: dict[str, Entry] = {}
    for each, text in sorted(texts.items()):
        try:
            name = each.decode()
            found[name] = parse(name, text)
        except UNREADABLE:
            continue
    return found


def readable_texts(entries: Iterable[bytes]) -> list[str]:
    """The entries of a list that are texts."""
    return [*each_readable(dict.fromkeys(entries, b""), lambda name, _: name)]


@lru_cache(maxsize=1024)  # a version or an epoch is that of the reply before
def count_from(text: bytes) -> int:
    """Raises ValueError if it is not one that this fleet would write."""
    count = int(text)
    if not 0 <= count < LARGEST_COUNT:
        raise ValueError(f"{count} is no count")
    return count
