"""A warning for reports: under overload, a run that ends before what was put off comes due flatters deadline order."""

from __future__ import annotations

from collections.abc import Sequence

HOLDS = 3
"""A run should last so many times ``scheduling.max_hold_s``."""


def short_span_note(spans_s: Sequence[float], max_hold_s: float) -> str:
    """Of runs in deadline order, by how long their counted requests kept arriving; empty if all are long enough."""
    short_s = [span_s for span_s in spans_s if span_s < HOLDS * max_hold_s]
    if not short_s:
        return ""
    least, most = f"{min(short_s):.0f}", f"{max(short_s):.0f}"
    return (
        f"Short: {least if least == most else f'{least} to {most}'} s of counted arrivals, less than {HOLDS} × "
        f"scheduling.max_hold_s ({HOLDS * max_hold_s:.0f} s). What deadline order puts off comes due only after "
        "max_hold_s, so under overload this flatters it."
    )
