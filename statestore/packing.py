"""Commands as the bytes that a server reads (RESP)."""

from __future__ import annotations

from collections.abc import Sequence

import hiredis

Argument = bytes | str | int | float

MAX_PACKED_KEYS = 65_536
"""Keys kept packed; only more than ten thousand instances have more, and then all are packed anew now and then."""


def pack(arguments: Sequence[Argument]) -> bytes:
    """A command and its arguments."""
    packed: bytes = hiredis.pack_command(tuple(arguments))  # type: ignore[arg-type]  # the stub knows tuples of one
    return packed


class PackedKeys(dict[bytes, bytes]):
    """Keys as they stand in a command."""

    def __missing__(self, key: bytes) -> bytes:
        if len(self) >= MAX_PACKED_KEYS:
            self.clear()
        packed = self[key] = b"$%d\r\n%b\r\n" % (len(key), key)
        return packed


class ScriptPacker:
    """Packs calls of scripts. The same few keys come back with every request, so each of them is packed once."""

    def __init__(self) -> None:
        self._keys = PackedKeys()
        self._heads: dict[tuple[str, int, int], tuple[bytes, int]] = {}
        """By form of the call: what it begins with, and how much of the packed arguments that replaces."""

    def pack(self, sha: str, keys: Sequence[bytes], arguments: tuple[Argument, ...]) -> bytes:
        """EVALSHA of the script; the same bytes as ``pack`` makes."""
        form = (sha, len(keys), len(arguments))
        known = self._heads.get(form)
        if known is None:
            known = self._heads[form] = _head(*form)
        head, replaced_bytes = known
        return b"".join((head, *map(self._keys.__getitem__, keys), pack(arguments)[replaced_bytes:]))


def _head(sha: str, key_count: int, argument_count: int) -> tuple[bytes, int]:
    parts = b"*%d\r\n" % (3 + key_count + argument_count)
    return parts + pack(("EVALSHA", sha, key_count)).removeprefix(b"*3\r\n"), len(b"*%d\r\n" % argument_count)
