"""How long to wait after failures in a row, and which of them to log."""

from __future__ import annotations

_MAX_DOUBLINGS = 30
"""More would overflow a float; long before, the bound decides."""


def backoff_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Pause after that many failures in a row, 1 or more: doubling from ``first_s``, bounded."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))


def worth_logging(failures: int) -> bool:
    """True for failures 1, 2, 4, 8, …: an outage is logged without flooding the log."""
    return failures & (failures - 1) == 0
