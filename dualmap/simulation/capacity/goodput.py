"""Goodput: the highest rate at which enough requests are on time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dualmap.simulation.virtual_time.runs import RunJob

ON_TIME_SHARE = 0.90
GROWTH = 1.5
_LONGEST_STRIDE = 4.0
_MAX_STEPS = 32
_HOPELESS = 1 / 64
"""Below this part of the starting rate the search gives up: bursts alone may be too much for a small fleet."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of the search."""

    rate_per_s: float
    """Highest rate that was seen to hold; 0 if none was."""
    upper_rate_per_s: float
    """Lowest rate above it that was seen to fail."""
    tried: tuple[tuple[float, float], ...]
    """(rate, share on time), in order of rate."""


def find_goodput(
    on_time_share: Callable[[float], float],
    start_rate_per_s: float,
    *,
    wanted_share: float = ON_TIME_SHARE,
    tolerance: float = 0.01,
    growth: float = GROWTH,
    known: Iterable[tuple[float, float]] = (),
) -> Goodput:
    """Bracket from ``start_rate_per_s`` outwards by ``growth`` to the power of 1, 2, 4, …, then bisect to a
    ``tolerance`` (relative).

    ``on_time_share`` must fall with the rate, as far as noise lets it; the search is deterministic. ``known`` are
    (rate, share) pairs, of a search for another share for example: the bracket begins with them.
    """
    tried: dict[float, float] = {}

    def holds(rate_per_s: float) -> bool:
        tried[rate_per_s] = on_time_share(rate_per_s)
        return tried[rate_per_s] >= wanted_share

    low, high = _bracket(known, wanted_share)
    stride = growth
    rate_per_s = _next_rate(low, high, stride) if low or high else start_rate_per_s
    for _ in range(_MAX_STEPS):
        if low and high and high - low <= tolerance * high:
            break
        if holds(rate_per_s):
            low = rate_per_s
        else:
            high = rate_per_s
        if high and high < _HOPELESS * start_rate_per_s:
            break
        rate_per_s = _next_rate(low, high, stride)
        stride = min(stride * stride, _LONGEST_STRIDE)
    return Goodput(low, high, tuple(sorted(tried.items())))


def _bracket(known: Iterable[tuple[float, float]], wanted_share: float) -> tuple[float, float]:
    """The lowest rate that failed, and the highest below it that held; 0 where there is none."""
    pairs = sorted(known)
    high = next((rate for rate, share in pairs if share < wanted_share), 0.0)
    return max((rate for rate, share in pairs if share >= wanted_share and not 0 < high < rate), default=0.0), high


def _next_rate(low: float, high: float, growth: float) -> float:
    if not high:
        return low * growth
    if not low:
        return high / growth
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class GoodputJob:
    """The goodput of one scenario on one trace; ``job``'s rate is where the search starts."""

    job: RunJob
    wanted_share: float = ON_TIME_SHARE
    tolerance: float = 0.01


def run_goodput(
    search: GoodputJob,
    tried: Callable[[float, float], None] = lambda rate_per_s, share: None,
    on_progress: Callable[[float, int], None] = lambda rate_per_s, arrived: None,
) -> Goodput:
    """Search in this process; ``tried`` is called with each rate and its share on time, ``on_progress`` with a rate and
    how many requests of its run have arrived. Raises SimulationError."""
    job = search.job

    def on_time_share(rate_per_s: float) -> float:
        run = RunJob(job.source, job.scenario, rate_per_s)
        share = run.run(lambda arrived: on_progress(rate_per_s, arrived)).share_on_time
        tried(rate_per_s, share)
        return share

    start = job.rate_per_s or job.source.load().rate_per_s
    return find_goodput(on_time_share, start, wanted_share=search.wanted_share, tolerance=search.tolerance)
