"""What transitions read and write of instances and requests: texts of JSON, by one table for Python and the scripts.

Every transition reads and writes such texts, and people read them with ``redis-cli``. Their fields stand in a fixed
order without spaces: a script writes one by a format, at half the cost of encoding a table. ``LUA`` is the code for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import orjson

from scheduling.request import PLACED_FIELDS, TOLD_FIELDS, Request

DESCRIBED: Final = (
    "state",
    "role",
    "kv_capacity_tokens",
    "dispatch_window_tokens",
    "max_running_requests",
    "max_queued_requests",
)
"""Of the description of an instance, what scripts read."""
COUNTS: Final = (
    "pending_tokens",
    "dispatched_tokens",
    "deferred_tokens",
    "passed_over_tokens",
    "context_tokens",
    "queued_requests",
    "running_requests",
    "cached_blocks",
    "assigned_tokens",
    "last_prefill_ms",
    "work_since_ms",
    "kv_stamp",
    "version",
)
_TEXTS = {"state", "role", *(each.name for each in fields(Request) if str(each.type) not in ("int", "bool"))}


class Record:
    """Some fields in one text of JSON, texts before numbers; no text has quotes or backslashes."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(sorted(names, key=lambda name: name not in _TEXTS))
        self._format = "{" + ",".join(f'"{name}":{_form(name)}' for name in self.names) + "}"

    def pack(self, values: Sequence[Any]) -> bytes:
        """By the order of ``names``; None is an empty text."""
        return (self._format % tuple(["" if each is None else each for each in values])).encode()

    def fields(self, text: bytes) -> dict[str, Any]:
        """By name."""
        found: dict[str, Any] = orjson.loads(text)
        return found

    def lua(self, table: str) -> Mapping[str, str]:
        """Code for a script, of values in a Lua table."""
        return {"format": f"'{self._format}'", "values": ", ".join(f"{table}.{name}" for name in self.names)}


def _form(name: str) -> str:
    return '"%s"' if name in _TEXTS else "%.17g" if name == "tokens_per_s" else "%d"


INSTANCE: Final = Record((*DESCRIBED, "tokens_per_s", *COUNTS))
PLACED: Final = Record(PLACED_FIELDS)
TOLD: Final = Record(TOLD_FIELDS)

LUA: Final[Mapping[tuple[str, str], str]] = {
    (name, piece): code
    for name, record, table in (
        ("INSTANCE", INSTANCE, "instance"),
        ("PLACED", PLACED, "request"),
        ("TOLD", TOLD, "told"),
    )
    for piece, code in record.lua(table).items()
}
"""What ``INSTANCE.format`` and the like stand for in a script."""
