"""Output of commands with ``--json``: the values behind their tables, under the names that the code has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson


def as_json(value: object) -> str:
    """Values of the store, of a replica or of settings as indented JSON."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()


def _plain(value: object) -> Any:
    """Values that the encoder does not know; raises TypeError for all others."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, tuple):  # a named one: others are known
        return value._asdict()  # type: ignore[attr-defined]
    raise TypeError(type(value).__name__)
