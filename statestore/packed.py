"""What transitions read and write of instances and requests: packed, by one table for Python and the scripts.

Every transition reads and writes such texts, so they are packed and not JSON, which costs a third more. In front come
texts, each with a zero byte behind it, then 64-bit little-endian numbers. ``LUA`` is the code by which a script unpacks
and packs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from struct import Struct
from typing import Any, Final

from scheduling.request import PLACED_FIELDS, TOLD_FIELDS, Request

LIMITS: Final = ("kv_capacity_tokens", "dispatch_window_tokens", "max_running_requests", "max_queued_requests")
DESCRIBED: Final = ("state", "role", "tokens_per_s", *LIMITS)
"""Of an instance, beside its counts."""
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
COUNTS_BYTES: Final = 8 * len(COUNTS)
_TEXTS = {"state", "role", *(each.name for each in fields(Request) if str(each.type) not in ("int", "bool"))}


class Packed:
    """Some fields in one text, texts before numbers."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(sorted(names, key=lambda name: name not in _TEXTS))
        self._texts = sum(name in _TEXTS for name in names)
        self._numbers = Struct("<" + "".join(_code(name) for name in self.names[self._texts :]))

    def pack(self, values: Sequence[Any]) -> bytes:
        """By the order of ``names``; None is an empty text."""
        texts = "".join([f"{text or ''}\0" for text in values[: self._texts]])
        return texts.encode() + self._numbers.pack(*values[self._texts :])

    def unpack(self, text: bytes) -> tuple[Any, ...]:
        """By the order of ``names``."""
        *texts, numbers = text.split(b"\0", self._texts)
        return (*map(bytes.decode, texts), *self._numbers.unpack(numbers))

    def fields(self, text: bytes) -> dict[str, Any]:
        """By name."""
        return dict(zip(self.names, self.unpack(text), strict=True))

    def lua(self, table: str) -> Mapping[str, str]:
        """Code for a script, of values in a Lua table."""
        codes = "".join({"s": "s", "q": "i8", "d": "d"}[_code(name)] for name in self.names)
        return {
            "format": f"'<{codes}'",
            "names": ", ".join(self.names),
            "fields": ", ".join(f"{name} = {name}" for name in self.names),
            "values": ", ".join(f"{table}.{name}" for name in self.names),
        }


def _code(name: str) -> str:
    return "s" if name in _TEXTS else "d" if name == "tokens_per_s" else "q"


DESCRIPTION: Final = Packed(DESCRIBED)
"""What the text of an instance begins with."""
INSTANCE: Final = Packed((*DESCRIBED, *COUNTS))
PLACED: Final = Packed(PLACED_FIELDS)
TOLD: Final = Packed(TOLD_FIELDS)

LUA: Final[Mapping[tuple[str, str], str]] = {
    (name, piece): code
    for name, packed, table in (
        ("INSTANCE", INSTANCE, "instance"),
        ("PLACED", PLACED, "request"),
        ("TOLD", TOLD, "told"),
    )
    for piece, code in {**packed.lua(table), "counts_bytes": str(COUNTS_BYTES)}.items()
}
"""What ``INSTANCE.format`` and the like stand for in a script."""
