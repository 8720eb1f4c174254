"""Features of an instance and a request, and what weights make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.scheduling.estimates.learned import PAIRS_UNIT, Learned
from dualmap.scheduling.estimates.ttft import expected_ttft_s
from dualmap.scheduling.estimates.weights import (
    PARTS,
    PLAIN_TTFT,
    Form,
    Weights,
    attention_pairs,
    features_of,
    idle_features,
)
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import InstanceLoad

Load = Callable[..., InstanceLoad]
CHAIN = Chain(tuple(range(10)), 100, 1000)
STALL_S = 3.0


def test_features_are_seconds_of_the_instance_s_own_prefill(load: Load) -> None:
    figures = {"pending_tokens": 5000, "deferred_tokens": 1000, "dispatched_tokens": 3000, "hit_blocks": 6}
    seen = load("a", **figures, context_tokens=500_000, stalled_s=1.0, prefill_tokens_per_s=2000.0)

    assert features_of(seen, CHAIN, STALL_S) == Form(
        constant=1.0,
        ahead_s=2.0,
        overtaken_s=0.5,
        kv_demand=0.5,
        compute_s=0.2,
        uncached_tokens=400,
        attention_pairs=400 * 800,
        crowded_compute_s=0.1,
        stall_s=0.0,
        progress_s=1.0,
        prompt_tokens=1000,
    )


@given(hit=st.integers(0, 10), hot_tokens=st.integers(0, 1000), rate=st.floats(1, 1e5))
def test_an_idle_instance_has_the_features_of_one_without_any_count(
    load: Load, hit: int, hot_tokens: int, rate: float
) -> None:
    idle = load("a", hit_blocks=hit, prefill_tokens_per_s=rate)

    found = idle_features(rate, CHAIN.uncached_tokens(hit), CHAIN.prompt_tokens, hot_tokens, 0.0, 0.0)

    assert found == features_of(idle, CHAIN, STALL_S, hot_tokens)


def test_an_instance_that_loads_nothing_has_no_feature_from_that_of_loads_on(load: Load) -> None:
    busy = load("a", pending_tokens=5000, dispatched_tokens=3000, context_tokens=500_000, running_requests=4)

    assert not any(features_of(busy, CHAIN, STALL_S)[Form._fields.index("load_s") :])


def test_every_feature_belongs_to_a_part_of_a_cost() -> None:
    assert [*PARTS] == [*Form._fields]


@pytest.mark.parametrize(("hot_tokens", "hot_compute_s"), [(0, 0.0), (600, 0.0), (700, 0.05), (1000, 0.2)])
def test_own_prefill_of_a_hot_prefix_is_what_of_it_is_not_cached(
    load: Load, hot_tokens: int, hot_compute_s: float
) -> None:
    seen = load("a", hit_blocks=6, prefill_tokens_per_s=2000.0)

    assert features_of(seen, CHAIN, STALL_S, hot_tokens).hot_compute_s == hot_compute_s


@pytest.mark.parametrize(("stalled_s", "stall_s"), [(2.9, 0.0), (3.0, 3.0)])
def test_silence_is_a_stall_once_it_is_long_enough(load: Load, stalled_s: float, stall_s: float) -> None:
    assert features_of(load("a", stalled_s=stalled_s), CHAIN, STALL_S).stall_s == stall_s


@pytest.mark.parametrize(("stalled_s", "progress_s"), [(0.3, 0.3), (0.5, 0.5), (3.5, 0.5), (4.0, 0.0), (7.0, -3.0)])
def test_an_engine_progresses_no_further_than_what_it_was_sent_and_less_if_it_stalls(
    load: Load, stalled_s: float, progress_s: float
) -> None:
    """Half a second of work is dispatched. A decode stall past its time, the engine may hang."""
    silent = load("a", pending_tokens=9000, dispatched_tokens=500, stalled_s=stalled_s)

    assert features_of(silent, CHAIN, STALL_S).progress_s == pytest.approx(progress_s)


def test_a_missed_slo_costs_extra_and_one_that_is_met_exactly_does_not() -> None:
    weights = Weights(cost=Form(ahead_s=1.0), ttft=Form(ahead_s=2.0), missed=Form(constant=100.0))
    features = Form(constant=1.0, ahead_s=2.5)

    assert weights.cost_of(features, slo_s=5.0) == 2.5
    assert weights.cost_of(features, slo_s=4.999) == 102.5


def test_attention_counts_pairs_of_new_tokens_with_all_before_them() -> None:
    # given the first 10,000 tokens of a prompt, and 1000 behind 20,000 cached ones
    assert attention_pairs(uncached_tokens=10_000, prompt_tokens=10_000) == 50e6
    assert attention_pairs(uncached_tokens=1000, prompt_tokens=21_000) == 20.5e6


@given(
    pending=st.integers(0, 100_000),
    deferred_share=st.floats(0, 1),
    hits=st.integers(0, 10),
    stalled_s=st.floats(0, 10),
    rate=st.floats(100, 50_000),
)
def test_the_plain_ttft_is_the_papers_formula(
    load: Load, pending: int, deferred_share: float, hits: int, stalled_s: float, rate: float
) -> None:
    figures = {"pending_tokens": pending, "deferred_tokens": int(deferred_share * pending), "hit_blocks": hits}
    seen = load("a", **figures, stalled_s=stalled_s, prefill_tokens_per_s=rate)

    weighed_s = PLAIN_TTFT.of(features_of(seen, CHAIN, STALL_S))

    assert weighed_s == pytest.approx(expected_ttft_s(seen, CHAIN.uncached_tokens(hits), STALL_S))


def test_the_learned_ttft_takes_progress_off_the_work_ahead(load: Load) -> None:
    # given 4 s ahead of which 1 s is done, 1 s of computing, half a KV memory in use
    seen = load("a", pending_tokens=4000, dispatched_tokens=4000, stalled_s=1.0, context_tokens=500_000)
    learned = Learned(ttft_weights=(0.03, 2.0, 1.5, 7.0, 0.4))

    expected_s = learned.ttft.of(features_of(seen, CHAIN, STALL_S))

    assert expected_s == pytest.approx(0.03 + 2.0 * 3.0 + 1.5 * 1.0 + 7.0 * 500_000 / PAIRS_UNIT + 0.4 * 0.5)
