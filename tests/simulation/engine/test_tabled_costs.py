"""Step costs whose linear layers are a table, against arithmetic by hand."""

from __future__ import annotations

import pytest

from dualmap.simulation.engine.settings import CostSettings
from dualmap.simulation.engine.step_time import StepCosts, TabledCosts, knots_of, table_of

COSTS = TabledCosts(
    overhead_s=1.0,
    weights_s=10.0,
    token_s=2.0,
    attention_pair_s=0.01,
    sequence_s=0.5,
    context_token_s=0.001,
    prompt_s=7.0,
    linear_s=(0.0, 10.0, 10.0, 14.0, 20.0),
    chunk_s=3.0,
    decode_s=5.0,
)


def test_a_step_that_does_both_has_the_table_s_entry_and_both_constants() -> None:
    assert COSTS.step_s(2, 100, 1, 1000, prompts=1) == pytest.approx(1 + 14 + 1 + 3 + 0.5 + 1 + 5 + 7)


def test_a_step_that_only_decodes_has_no_cost_of_a_chunk() -> None:
    assert COSTS.step_s(0, 0, 2, 1000) == pytest.approx(1 + 10 + 1 + 1 + 5)


def test_a_step_that_only_prefills_has_no_cost_of_decoding() -> None:
    assert COSTS.step_s(4, 100, 0, 0) == pytest.approx(1 + 20 + 1 + 3)


def test_tokens_that_the_table_has_not_cost_the_same_each() -> None:
    assert COSTS.step_s(14, 0, 0, 0) == pytest.approx(1 + 20 + 10 * 2 + 3)


def test_a_prompt_is_prefilled_in_chunks() -> None:
    assert COSTS.prefill_s(6, 4) == pytest.approx(7 + (1 + 20 + 0.1 + 3) + (1 + 10 + 0.01 * (2 * 4 + 3) + 3))


def test_a_slower_engine_takes_so_many_times_as_long_in_all() -> None:
    assert COSTS.slowed(1.5).step_s(2, 100, 1, 1000, 1) == pytest.approx(1.5 * COSTS.step_s(2, 100, 1, 1000, 1))


def test_twice_the_prefill_speed_computes_twice_the_tokens_in_the_same_time() -> None:
    fast = COSTS.with_prefill_speed(2)

    assert fast.linear_s == pytest.approx((0, 10, 10, 10, 10))
    assert COSTS.with_prefill_speed(0.5).linear_s == pytest.approx((0, 10, 20, 24, 28))
    assert fast.attention_pair_s == 0.005 and fast.sequence_s == 0.5
    with pytest.raises(ValueError, match="above 0"):
        COSTS.with_prefill_speed(0)


def test_the_least_cost_of_a_token_is_that_of_the_best_step() -> None:
    assert COSTS.full_step_token_s(4) == pytest.approx(15 / 3), "14 + 1 over 3 tokens, less than 21 over 4"
    assert COSTS.full_step_token_s(1000) == pytest.approx((1 + 20 + 2 * 996) / 1000)
    assert StepCosts(1.0, 5.0, 2.0, 0.0, 0.0, 0.0).full_step_token_s(10) == 2.1


def test_knots_keep_a_table_within_their_error() -> None:
    table = [0.0, *(8 + 0.01 * n + (3 if n > 64 else 0) + 0.5 * (n % 16 == 0) for n in range(1, 400))]
    knots = knots_of(table, 0.01)

    assert len(knots) < 80
    assert table_of(knots)[0] == 0.0
    assert table_of(knots)[1:] == pytest.approx(table[1:], rel=0.01001)
    assert table_of(knots_of(table, 0.0)) == pytest.approx(table)


def test_a_line_needs_two_knots() -> None:
    assert knots_of([0.0, *map(float, range(5, 1000))], 1e-9) == [(1, 5.0), (995, 999.0)]


@pytest.mark.parametrize("knots", [[], [(2, 1.0)], [(1, 1.0), (3, 1.0), (3, 2.0)]])
def test_a_table_without_order_is_refused(knots: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        table_of(knots)


def test_settings_replace_what_the_table_does_not_hold() -> None:
    assert CostSettings(overhead_ms=2).applied_to(COSTS).step_s(0, 0, 1, 0) == pytest.approx(0.002 + 10 + 0.5 + 5)
    with pytest.raises(ValueError, match="a table has its linear layers"):
        CostSettings(token_us=2).applied_to(COSTS)
