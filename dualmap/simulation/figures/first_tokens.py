"""First tokens over the time of a run, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from dualmap.simulation.figures.results import RunResult

_LEVELS = "▁▂▃▄▅▆▇█"


def bars(values: Sequence[float], highest: float) -> str:
    """One character a value, from 0 to ``highest``; × for what is infinite: a request without a first token."""
    top = len(_LEVELS) - 1

    def bar(value: float) -> str:
        return _LEVELS[min(top, round(top * value / highest))] if isfinite(value) else "×"

    return "".join(map(bar, values))


def first_tokens_over_time(result: RunResult, slo_s: float) -> str:
    """P90 of the time to first token and the share on time, over the run's arrivals from left to right."""
    if not result.timeline:
        return ""
    ttfts_s = [ttft_s for _, _, ttft_s in result.timeline]
    highest_s = max((ttft_s for ttft_s in ttfts_s if isfinite(ttft_s)), default=0.0)
    shares = [share for _, share, _ in result.timeline]
    ending_s = result.timeline[-1][0]
    return "\n".join(
        (
            f"first tokens over {ending_s:,.0f} s of arrivals, {result.instances} instances, {result.policy}:",
            f"  P90      {bars(ttfts_s, max(highest_s, slo_s))}  up to {highest_s:.2f} s (SLO {slo_s:g} s)",
            f"  on time  {bars(shares, 1.0)}  down to {min(shares):.0%}",
        )
    )


def p99_of_all_s(result: RunResult) -> float:
    """P99 of the time to first token; infinite if more than one request of a hundred got none."""
    return inf if result.refused > 0.01 * result.requests else result.ttft_s.p99
