"""The derivation against the one card that was measured, and against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.simulation.engine.cards import CARDS
from dualmap.simulation.engine.derived_costs import derive_costs, fewest_cards, kv_capacity_tokens
from dualmap.simulation.engine.models import MODELS
from dualmap.simulation.engine.presets import MEASURED_EIGHTH

# The measured instances' model had a small vocabulary.
SHAPE = replace(MODELS["qwen2.5-1.5b"], head_parameters=4096 * 1536)
H200 = CARDS["h200"]
EIGHTH = replace(H200, flops=H200.flops / 8, memory_bytes_per_s=H200.memory_bytes_per_s / 8)


@pytest.mark.parametrize("prompt_tokens", [128, 1024, 2048, 4096, 8192, 16_384, 32_760])
def test_prefill_of_an_eighth_is_derived_up_to_a_third_too_slow(prompt_tokens: int) -> None:
    measured = MEASURED_EIGHTH.engine.costs.prefill_s(prompt_tokens, 2048)

    assert 1.1 < derive_costs(SHAPE, EIGHTH).prefill_s(prompt_tokens, 2048) / measured < 1.35


@pytest.mark.parametrize(("sequences", "context_tokens"), [(1, 128), (8, 2149), (16, 2153), (32, 2161)])
def test_decode_of_an_eighth_alone_has_twice_its_share_of_the_bandwidth(sequences: int, context_tokens: int) -> None:
    batch = (0, 0, sequences, sequences * context_tokens)
    measured = MEASURED_EIGHTH.engine.costs.step_s(*batch)
    twice = derive_costs(SHAPE, replace(EIGHTH, memory_bytes_per_s=2 * EIGHTH.memory_bytes_per_s))

    assert 1.9 < derive_costs(SHAPE, EIGHTH).step_s(*batch) / measured < 2.05
    assert twice.step_s(*batch) == pytest.approx(measured, rel=0.07)


def test_one_card_exchanges_no_sums_and_two_do() -> None:
    model, card = MODELS["llama-3.1-8b"], CARDS["l40s"]
    one, two = derive_costs(model, card, 1), derive_costs(model, card, 2)

    assert one.overhead_s == card.efficiency.step_overhead_s
    assert two.overhead_s == pytest.approx(one.overhead_s + 64 * 15e-6)
    assert two.weights_s == pytest.approx(one.weights_s / 2)
    # each of 64 sums moves one activation of 4,096 values of 2 bytes over 80 % of 32 GB/s
    assert two.token_s == pytest.approx(one.token_s / 2 + 64 * 4096 * 2 / (0.8 * 32e9))


def test_parameters_follow_from_the_configuration() -> None:
    assert MODELS["llama-3.1-70b"].linear_parameters == pytest.approx(68.45e9, rel=1e-3)
    assert MODELS["qwen3-32b"].linear_parameters + 2 * MODELS["qwen3-32b"].head_parameters == pytest.approx(
        32.76e9, rel=2e-3
    )


def test_kv_heads_are_copied_where_cards_are_more() -> None:
    model = MODELS["qwen2.5-7b"]

    assert [model.kv_bytes_per_token_on(cards) for cards in (1, 4, 8)] == [57_344, 57_344, 114_688]


def test_what_no_node_holds_has_no_number_of_cards() -> None:
    huge = replace(MODELS["llama-3.1-70b"], linear_parameters=405e9)

    assert fewest_cards(huge, CARDS["910b4"], 1) is None
    assert kv_capacity_tokens(huge, CARDS["910b4"], 8) < 0
