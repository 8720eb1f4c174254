"""The record of an instance in Redis: what is described of it and its counts, packed in one text.

Every transition reads and writes a record, so it is packed and not JSON: that costs a third. This table is the only
one: the scripts get what they unpack and pack it with from ``LUA``.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import Any, Final

LIMITS: Final = ("kv_capacity_tokens", "dispatch_window_tokens", "max_running_requests", "max_queued_requests")
DESCRIBED: Final = ("state", "role", *LIMITS, "tokens_per_s")
"""Two texts that end with a zero byte, then numbers; the rate is the fractional one."""
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
FIELDS: Final = (*DESCRIBED, *COUNTS)

NUMBERS: Final = Struct(f"<{len(LIMITS)}qd{len(COUNTS)}q")
_LIMITS_AND_RATE = Struct(f"<{len(LIMITS)}qd")
_COUNTS_BYTES = 8 * len(COUNTS)

LUA: Final[Mapping[str, str]] = {
    "format": f"'<ss{'i8' * len(LIMITS)}d{'i8' * len(COUNTS)}'",
    "names": ", ".join(FIELDS),
    "table": ", ".join(f"{name} = {name}" for name in FIELDS),
    "values": ", ".join(f"instance.{name}" for name in FIELDS),
    "counts_bytes": str(_COUNTS_BYTES),
}
"""What ``record.NAME`` stands for in a script."""


def unpack(text: bytes) -> dict[str, Any]:
    """The record by field."""
    state, role, numbers = text.split(b"\0", 2)
    return dict(zip(FIELDS, (state.decode(), role.decode(), *NUMBERS.unpack(numbers)), strict=True))


def pack(fields: Mapping[str, Any]) -> bytes:
    """The reverse of ``unpack``."""
    return pack_described(fields) + Struct(f"<{len(COUNTS)}q").pack(*[fields[name] for name in COUNTS])


def pack_described(fields: Mapping[str, Any]) -> bytes:
    """What a record begins with: all but its counts."""
    numbers = [fields[name] for name in DESCRIBED[2:]]
    return f"{fields['state']}\0{fields['role']}\0".encode() + _LIMITS_AND_RATE.pack(*numbers)


def described_in(text: bytes) -> bytes:
    """What a record begins with, as it is stored."""
    return text[:-_COUNTS_BYTES]
