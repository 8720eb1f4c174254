"""JSON of clients, read as the engines' own reader reads it.

vLLM reads bodies with Python's ``json``, which takes what the fast reader refuses: lone surrogates, ``NaN``, a byte
order mark. The fast one comes first, so only such bodies take longer.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

MAX_SLOW_BYTES: Final = 1 << 20
"""A longer text is read by the fast reader alone."""


class UnreadableJsonError(ValueError):
    """The bytes are no JSON that is read here; the message says why."""

    def __init__(self, reason: str, position: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position
        """Position of the character at which the text ceases to be JSON."""


def read_json(text: bytes) -> Any:
    """The value that the bytes hold.

    Raises:
        UnreadableJsonError: they hold none.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if len(text) > MAX_SLOW_BYTES:
            raise UnreadableJsonError(error.msg, error.pos) from error
    try:
        return json.loads(text.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UnreadableJsonError(error.msg, error.pos) from error
    except RecursionError as error:
        raise UnreadableJsonError("it is nested too deeply") from error
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        raise UnreadableJsonError(str(error)) from error


def write_json(value: Any, *, sort_keys: bool = False) -> bytes:
    """The value as JSON, of any that ``read_json`` returns.

    Raises:
        UnreadableJsonError: it is nested too deeply.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError:  # a lone surrogate, a number of over 64 bits, or nesting
        pass
    try:
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":")).encode()
    except RecursionError as error:
        raise UnreadableJsonError("it is nested too deeply") from error
