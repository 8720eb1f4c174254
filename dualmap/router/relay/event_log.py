"""The events that the native relay has kept of a stream: each as what differs from the one before.

A log is a sequence of parts, two for an event: up to the bracket that begins the ids of its tokens, and what is behind
it, which is empty without them. A part is three numbers and bytes: how many bytes it has in common with the begin, and
then with the end, of the same part of the event before, and how many other bytes are between those, which follow. A
number has seven bits in each of its bytes, the lowest first; the eighth bit says that another byte follows. The empty
line that ends an event is not in the log.
"""

from __future__ import annotations

from typing import Final

_SLICE_EVENTS: Final = 64


def unpack(log: bytes) -> list[bytes]:
    """The events, whole, in slices of a few; one of no event if there is none."""
    slices: list[bytes] = []
    parts: list[bytes] = []
    former = b"", b""
    at = 0
    while at < len(log):
        first, at = _part(log, at, former[0])
        second, at = _part(log, at, former[1])
        former = first, second
        parts += first, second, b"\n\n"
        if len(parts) == 3 * _SLICE_EVENTS:
            slices.append(b"".join(parts))
            parts = []
    return [*slices, b"".join(parts)]


def _part(log: bytes, at: int, former: bytes) -> tuple[bytes, int]:
    begin, at = _number(log, at)
    end, at = _number(log, at)
    middle, at = _number(log, at)
    return former[:begin] + log[at : at + middle] + former[len(former) - end :], at + middle


def _number(log: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = log[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
