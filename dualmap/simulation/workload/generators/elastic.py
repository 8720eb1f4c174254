"""Traces whose rate changes: a day between night and noon, and flash crowds.

The requests are the Tool&Agent trace's, its bursts spread, with the times of arrival moved so that they follow a rate
curve. Requests of a session keep their order; thinking times stretch and shrink with the rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from math import cos, tau
from random import Random

from dualmap.simulation.workload.generators.conversation import BURST_S, toolagent
from dualmap.simulation.workload.traces import Trace, TraceRequest

CROWD_FACTOR = 2.0
CROWD_SHARE = 0.04
"""Share of the day that one crowd stays."""
RAMP_S = 10.0
"""Time in which a crowd comes, and in which it goes."""


def diurnal(requests: int, seed: int, day_s: int = 14_400, ratio: int = 4, crowds: int = 2) -> Trace:
    """One day from night over noon to night, ``ratio`` between them, with flash crowds that double the rate."""
    spell_s = CROWD_SHARE * day_s
    starts = [day_s * (number + 0.6) / (crowds + 0.2) - spell_s / 2 for number in range(crowds)]

    def rate(at_s: float) -> float:
        base = 1 + (ratio - 1) * (1 - cos(tau * at_s / day_s)) / 2
        return base * (1 + (CROWD_FACTOR - 1) * max((_crowd(at_s, start, spell_s) for start in starts), default=0.0))

    return _warped(f"diurnal-{ratio}", requests, seed, day_s, rate)


def flashcrowd(requests: int, seed: int, span_s: int = 900, factor: int = 2) -> Trace:
    """A steady rate, ``factor`` times as high in the middle third."""

    def rate(at_s: float) -> float:
        return 1 + (factor - 1) * _crowd(at_s, span_s / 3, span_s / 3)

    return _warped(f"flashcrowd-{factor}", requests, seed, span_s, rate)


def surge(requests: int, seed: int, span_s: int = 900, factor: int = 2) -> Trace:
    """A steady rate that is ``factor`` times as high from the end of the first third on."""
    return _warped(f"surge-{factor}", requests, seed, span_s, lambda at_s: 1.0 if at_s < span_s / 3 else factor)


def _crowd(at_s: float, start_s: float, spell_s: float) -> float:
    """Share of the crowd that is there, 0..1."""
    return max(0.0, min(1.0, (at_s - start_s) / RAMP_S, (start_s + spell_s - at_s) / RAMP_S))


def _warped(name: str, requests: int, seed: int, span_s: int, rate: Callable[[float], float]) -> Trace:
    base, rng = toolagent(requests, seed), Random(seed)
    spread = sorted(
        (replace(each, arrival_s=each.arrival_s + BURST_S * rng.random()) for each in base.requests),
        key=lambda each: each.arrival_s,
    )
    end_s = spread[-1].arrival_s + 1e-6
    mass = [0.0, *accumulate(rate(second + 0.5) for second in range(span_s))]
    moved = tuple(_moved(each, mass, each.arrival_s / end_s * mass[-1]) for each in spread)
    return Trace(name, base.block_tokens, moved)


def _moved(request: TraceRequest, mass: list[float], wanted: float) -> TraceRequest:
    second = bisect_right(mass, wanted) - 1
    return replace(request, arrival_s=second + (wanted - mass[second]) / (mass[second + 1] - mass[second]))
