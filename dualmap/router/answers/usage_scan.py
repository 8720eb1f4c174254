"""The usage of a long whole answer, found while it passes: nothing of it is kept, and no other value is built.

The usage is the field of the answer's own object, however deep others of the name are. Strings are taken out, brackets
are counted in what is left; only a piece that has the name is read token by token.
"""

from __future__ import annotations

import re
from typing import Final

from dualmap.router.answers.fields import read_usage
from dualmap.router.answers.sse import json_object
from dualmap.scheduling.request.outcome import Usage

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_IN_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+("|\\?\Z)|[{}\[\]]', re.DOTALL)
"""A bracket, or a string: the group is a quote where it is whole."""
_KEY: Final = b'"usage"'
_OPENS: Final = re.compile(rb"\s*:\s*\{")
_MAY_OPEN: Final = re.compile(rb"\s*(?::\s*)?\Z")
_OPENING: Final = (b"{", b"[")
_WAITS_BYTES: Final = 64
"""A shorter string that has not come whole waits for its end: it may be the key."""
_MAX_USAGE_BYTES: Final = 64 << 10


class UsageScan:
    """Reads a JSON object in pieces. ``usage`` is set once its usage has come whole."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self._depth = 0
        self._in_string = False
        self._rest = b""
        """Bytes that are read together with the next ones."""
        self._over = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._over:
            return
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._in_string:
            end = _end_of_string(data)
            if end < 0:
                self._rest = b"\\" if _ends_escaping(data) else b""
                return
            data, self._in_string = data[end:], False
        if _KEY in data:
            self._read(data)
        else:
            self._count(data)

    def _count(self, data: bytes) -> None:
        """Count the brackets of a piece that does not have the name."""
        bare = _STRING.sub(b"", data)
        begun = bare.find(b'"')
        outside = bare if begun < 0 else bare[:begun]
        count = outside.count
        self._depth += count(b"{") + count(b"[") - count(b"}") - count(b"]")
        if begun >= 0:
            self._begin_string(bare[begun:])

    def _begin_string(self, begun: bytes) -> None:
        """The piece ends within a string."""
        if len(begun) <= _WAITS_BYTES:
            self._rest = begun
        else:
            self._in_string, self._rest = True, b"\\" if _ends_escaping(begun) else b""

    def _read(self, data: bytes) -> None:
        """Read a piece token by token."""
        for token in _TOKEN.finditer(data):
            text = token.group()
            if token[1] is None:
                self._depth += 1 if text in _OPENING else -1
            elif token[1] != b'"':
                return self._begin_string(text)
            elif text == _KEY and self._depth == 1 and self._reads_usage(data, token.start(), token.end()):
                return None
        return None

    def _reads_usage(self, data: bytes, start: int, behind: int) -> bool:
        """Whether the name is the key of the usage, which is read, or waits for its end."""
        opens = _OPENS.match(data, behind)
        if opens is None and _MAY_OPEN.match(data, behind) is None:
            return False
        end = -1 if opens is None else _end_of_object(data, opens.end() - 1)
        if opens is None or end < 0:
            self._rest = data[start:]
            self._over = len(self._rest) > _MAX_USAGE_BYTES
            return True
        self.usage = read_usage(json_object(data[opens.end() - 1 : end]) or {})
        self._over = True
        return True


def _end_of_string(data: bytes) -> int:
    """Behind the string that ``data`` begins within; -1 where its end has not come."""
    found = _IN_STRING.match(data)
    assert found is not None
    return found.end() + 1 if data[found.end() : found.end() + 1] == b'"' else -1


def _ends_escaping(data: bytes) -> bool:
    """Whether the last byte escapes the next one."""
    return (len(data) - len(data.rstrip(b"\\"))) % 2 == 1


def _end_of_object(data: bytes, start: int) -> int:
    """Behind the object that begins at ``start``; -1 where its end has not come."""
    depth = 0
    for token in _TOKEN.finditer(data, start):
        if token[1] is None:
            depth += 1 if token.group() in _OPENING else -1
            if depth == 0:
                return token.end()
    return -1
