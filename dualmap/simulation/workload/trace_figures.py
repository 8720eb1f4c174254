"""Figures of a trace that decide how it behaves in a cache: to compare a generated trace with a real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

from dualmap.simulation.workload.traces import Trace

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
BURST_S = 3.0


@dataclass(kw_only=True, frozen=True, slots=True)
class TraceFigures:
    """Figures that two equivalent traces have in common."""

    requests: int
    rate_per_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    input_quantiles: tuple[float, ...]
    """Input lengths at QUANTILES."""
    output_quantiles: tuple[float, ...]
    infinite_cache_hit: float
    """Share of input tokens that one cache without a limit would have held."""
    root_shares: tuple[float, ...]
    """Shares of requests by first block, most popular first; the first three."""
    blocks_per_request: float
    distinct_block_share: float
    burst_mean: float
    """Arrivals in one interval of BURST_S."""
    burst_dispersion: float
    """Variance of that number over its mean; 1 for a Poisson process."""


def trace_figures(trace: Trace) -> TraceFigures:
    requests = trace.requests
    inputs = sorted(r.input_tokens for r in requests)
    outputs = sorted(r.output_tokens for r in requests)
    roots = Counter(r.hash_ids[0] for r in requests)
    positions = sum(len(r.hash_ids) for r in requests)
    bursts = _burst_sizes(trace)
    return TraceFigures(
        requests=len(requests),
        rate_per_s=trace.rate_per_s,
        mean_input_tokens=fmean(inputs),
        mean_output_tokens=fmean(outputs),
        input_quantiles=tuple(quantile(inputs, q) for q in QUANTILES),
        output_quantiles=tuple(quantile(outputs, q) for q in QUANTILES),
        infinite_cache_hit=infinite_cache_hit(trace),
        root_shares=tuple(count / len(requests) for _, count in roots.most_common(3)),
        blocks_per_request=positions / len(requests),
        distinct_block_share=len({block for r in requests for block in r.hash_ids}) / positions,
        burst_mean=fmean(bursts),
        burst_dispersion=pvariance(bursts) / fmean(bursts),
    )


def quantile(ordered: Sequence[float], probability: float) -> float:
    """Linear interpolation between the closest ranks of an ascending sequence."""
    position = probability * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def cached_tokens_if_infinite(trace: Trace) -> list[int]:
    """The input tokens of each request that one cache without a limit would have held at its arrival.

    The last token of a prompt is always computed, as an engine does.
    """
    seen: set[int] = set()
    cached: list[int] = []
    for request in trace.requests:
        hit_blocks = 0
        for block in request.hash_ids:
            if block not in seen:
                break
            hit_blocks += 1
        seen.update(request.hash_ids)
        cached.append(min(hit_blocks * trace.block_tokens, request.input_tokens - 1))
    return cached


def infinite_cache_hit(trace: Trace, skip: int = 0) -> float:
    """Share of the input tokens of all requests but the first ``skip`` that an endless cache would have held."""
    total = sum(r.input_tokens for r in trace.requests[skip:])
    return sum(cached_tokens_if_infinite(trace)[skip:]) / total


def _burst_sizes(trace: Trace) -> list[int]:
    start_s = trace.requests[0].arrival_s
    intervals = Counter(int((r.arrival_s - start_s + BURST_S / 2) / BURST_S) for r in trace.requests)
    return [intervals[index] for index in range(max(intervals) + 1)]
