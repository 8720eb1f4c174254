"""Times of an instance: the prior, the parts of a TTFT, and its linear form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.instance import InstanceSpec
from scheduling.latency import TYPICAL_PROMPT_TOKENS, Latency, TtftParts, attention_pairs

SPEC = InstanceSpec("a", "http://a", prefill_tokens_per_s=8000.0)
LATENCY = Latency(
    step_tokens=2048.0,
    step_s=0.02,
    token_s=1e-4,
    pair_s=3e-9,
    context_token_s=1e-7,
    pairs_per_token=2000.0,
    typical_context_tokens=100_000.0,
    queueing_weight=0.9,
    joining_weight=0.4,
    waiting_s=0.01,
    waiting_context_s=2e-8,
)


def test_before_anything_is_learned_the_rate_is_as_configured() -> None:
    prior = Latency.prior(SPEC)

    assert prior.tokens_per_s == pytest.approx(8000.0)
    assert prior.compute_s(TYPICAL_PROMPT_TOKENS, 0, 0) == pytest.approx(TYPICAL_PROMPT_TOKENS / 8000, rel=0.1)


def test_a_prefill_takes_its_fixed_cost_tokens_attention_and_the_decoding_of_others() -> None:
    expected_s = 0.02 + 4096e-4 + 3e-9 * (4096 * 1000 + 4096**2 / 2) + 1e-7 * 50_000 * 3

    assert LATENCY.compute_s(4096, 1000, 50_000) == pytest.approx(expected_s)


def test_the_rate_counts_what_the_steps_decode() -> None:
    assert 1 / LATENCY.tokens_per_s == pytest.approx(1e-4 + 3e-9 * 2000 + (0.02 + 1e-7 * 100_000) / 2048)
    assert LATENCY.mean_token_s(0) < LATENCY.mean_token_s(1_000_000)


def test_a_ttft_weighs_the_wait_and_adds_the_own_prefill() -> None:
    assert LATENCY.expected_ttft_s(TtftParts(2000, 500, 100, 1_000_000)) == pytest.approx(
        0.01 + 0.02 + 0.9 * 2.0 + 0.4 * 0.1 + 0.5
    )


def test_no_more_than_a_step_is_shared_with_the_work_ahead() -> None:
    short, long = (LATENCY.parts(0.5, ahead, 100, 0, 0) for ahead in (2048, 50_000))

    assert short.joining_ms == long.joining_ms == round(1000 * 2048 * LATENCY.mean_token_s(0))


def test_a_dispatch_window_without_limit_leaves_a_prior_that_can_be_used() -> None:
    prior = Latency.prior(replace(SPEC, dispatch_window_tokens=1 << 60))

    assert prior.tokens_per_s == pytest.approx(8000.0)
    assert prior.compute_s(100, 0, 0) < 0.3


def test_pairs_are_those_of_each_new_token_with_every_token_before_it() -> None:
    assert attention_pairs(3, 10) == pytest.approx(sum(10 + new + 0.5 for new in range(3)))


counts = st.integers(0, 40_000)


@given(ahead=counts, uncached=st.integers(1, 40_000), cached=counts, context=st.integers(0, 1_000_000))
def test_the_linear_form_is_the_expectation_where_it_is_taken_and_near_it(
    ahead: int, uncached: int, cached: int, context: int
) -> None:
    slopes = LATENCY.slopes(ahead * LATENCY.mean_token_s(context), ahead, uncached, cached, context)

    def expected_s(ahead: int, uncached: int, cached: int, context: int) -> float:
        queueing_s = ahead * LATENCY.mean_token_s(context)
        return LATENCY.expected_ttft_s(LATENCY.parts(queueing_s, ahead, uncached, cached, context))

    assert slopes.ttft_s(ahead, uncached, context) == pytest.approx(expected_s(ahead, uncached, cached, context))
    more = 0.01 + 0.01 * expected_s(ahead, uncached, cached, context)
    assert slopes.ttft_s(ahead, uncached, context + 5000) == pytest.approx(
        expected_s(ahead, uncached, cached, context + 5000), abs=more
    )
    if ahead + 100 <= LATENCY.step_tokens or ahead >= LATENCY.step_tokens:
        assert slopes.ttft_s(ahead + 100, uncached, context) == pytest.approx(
            expected_s(ahead + 100, uncached, cached, context), abs=more
        )
    if cached >= 100:
        assert slopes.ttft_s(ahead, uncached + 100, context) == pytest.approx(
            expected_s(ahead, uncached + 100, cached - 100, context), abs=more
        )


def test_a_latency_survives_as_floats() -> None:
    assert Latency.from_floats(LATENCY.floats()) == LATENCY


@pytest.mark.parametrize("floats", [(), LATENCY.floats()[:-1], (*LATENCY.floats()[:-1], float("nan"))])
def test_floats_that_are_no_latency_are_refused(floats: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        Latency.from_floats(floats)
