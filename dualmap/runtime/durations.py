"""Times as people write them on a command line."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|)")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration_s(text: str) -> float:
    """The seconds of a time, with its unit or in seconds: ``30``, ``90s``, ``5m``, ``1h``. Raises ValueError."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time such as 30, 60s or 5m")
    return float(found[1]) * _UNITS_S[found[2]]
