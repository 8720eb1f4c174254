"""Commands as RESP, the protocol of Redis: arrays of bulk strings.

hiredis packs what is sent once in a while. A placement names up to seventy keys and values, of which all but a few are
the same in every placement: these are packed once, and the command is put together from its packed parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import hiredis

Argument = bytes | str | int | float
Command = Sequence[Argument]


def pack(command: Command) -> bytes:
    """The command as it is sent."""
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # the stub knows tuples of one
    return packed


def bulk(text: bytes) -> bytes:
    """One argument."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


class PackedCall(NamedTuple):
    """Keys and arguments of a script, packed, without what the caller of scripts puts in front of them."""

    key_count: int
    keys: bytes
    argument_count: int
    arguments: bytes
