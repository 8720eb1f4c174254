"""The head of an instance's answer."""

from __future__ import annotations

from enum import StrEnum

from dualmap.scheduling.values import value


class Framing(StrEnum):
    """How an answer's end is marked."""

    LENGTH = "length"
    CHUNKED = "chunked"
    UNTIL_CLOSE = "until_close"
    EMPTY = "empty"


@value
class AnswerHead:
    status: int
    fields: list[tuple[bytes, bytes]]
    framing: Framing

    index: dict[bytes, bytes]
    """The fields by (lower-case) name."""


@value
class ErrorAnswer:
    """An instance's own error answer, kept in case no other instance takes the request."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes
