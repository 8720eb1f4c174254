"""Commands as the bytes that a server reads (RESP)."""

from __future__ import annotations

from collections.abc import Sequence

import hiredis

Argument = bytes | str | int | float


def pack(arguments: Sequence[Argument]) -> bytes:
    """A command and its arguments."""
    packed: bytes = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type]  # the stub knows tuples of one
    return packed
