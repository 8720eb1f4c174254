import pytest

from dualmap.simulation.workload.trace_figures import (
    cached_tokens_if_infinite,
    infinite_cache_hit,
    quantile,
    trace_figures,
)
from dualmap.simulation.workload.traces import Trace, TraceRequest

# Three prompts: one new, one that shares its first two blocks, one that repeats the first.
TRACE = Trace(
    "t",
    100,
    (
        TraceRequest(0.0, 250, 10, (0, 1, 2)),
        TraceRequest(0.0, 400, 20, (0, 1, 3, 4)),
        TraceRequest(3.0, 250, 30, (0, 1, 2)),
    ),
)


def test_an_endless_cache_holds_what_came_before_but_never_the_last_token() -> None:
    assert cached_tokens_if_infinite(TRACE) == [0, 200, 249]


def test_requests_left_out_still_fill_the_cache() -> None:
    assert infinite_cache_hit(TRACE) == pytest.approx(449 / 900)
    assert infinite_cache_hit(TRACE, skip=1) == pytest.approx(449 / 650)


def test_figures_of_a_trace() -> None:
    figures = trace_figures(TRACE)

    assert (figures.requests, figures.rate_per_s) == (3, 1.0)
    assert figures.mean_output_tokens == 20
    assert figures.root_shares == (1.0,)
    assert figures.blocks_per_request == pytest.approx(10 / 3)
    assert figures.distinct_block_share == pytest.approx(5 / 10)
    assert figures.burst_mean == 1.5


def test_quantiles_interpolate_between_ranks() -> None:
    assert quantile([0, 10], 0.25) == 2.5
    assert quantile([7], 0.9) == 7
