"""The fit of kernel times, against kernels that are a formula."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dualmap.simulation.engine.silicon_fit import (
    LONGEST_STEP_TOKENS,
    MOST_SEQUENCES,
    KernelStep,
    fit_error,
    fit_kernels,
    random_steps,
)
from dualmap.simulation.engine.step_time import attention_pairs


@dataclass(frozen=True)
class Formula:
    """Kernels of a mixture of experts: the more tokens, the more experts are read; products cost by tiles of 16."""

    off: float = 0.0
    sequence_s: float = 2e-6

    def linear_s(self, tokens: int) -> float:
        return 2e-3 + 6e-3 * (1 - 0.95**tokens) + 12e-6 * 16 * -(-tokens // 16)

    def step_s(self, step: KernelStep) -> float:
        time_s = self.linear_s(step.tokens)
        if step.prefill_tokens:
            pairs = attention_pairs(step.cached_tokens, step.prefill_tokens)
            time_s += 1.5e-3 + 1e-6 * step.prefill_tokens + 8e-10 * pairs
        if step.sequences:
            time_s += 4e-4 + self.sequence_s * step.sequences + 4e-8 * step.sequences * step.context_tokens
        return time_s * (1 + self.off * (-1) ** step.tokens)


def test_the_coefficients_of_a_formula_are_found_again() -> None:
    costs = fit_kernels(Formula(), 400_000)

    assert (costs.chunk_s, costs.decode_s) == pytest.approx((1.5e-3, 4e-4), rel=1e-6)
    assert (costs.attention_pair_s, costs.context_token_s) == pytest.approx((8e-10, 4e-8), rel=1e-6)
    assert costs.sequence_s == pytest.approx(2e-6 - 1e-6, rel=1e-6), "the table has a prefilled token's own cost"
    assert costs.overhead_s == 0.0 and costs.prompt_s == 0.0
    assert fit_error(costs, Formula(), 400_000).worst < 0.003, "what the table's knots leave out"


def test_a_sequence_may_cost_less_than_a_prefilled_token() -> None:
    cheap = Formula(sequence_s=0.0)
    costs = fit_kernels(cheap, 400_000)

    assert costs.sequence_s == pytest.approx(-1e-6, rel=1e-3)
    assert fit_error(costs, cheap, 400_000).worst < 0.003


def test_what_does_not_fit_is_reported() -> None:
    error = fit_error(fit_kernels(Formula(), 400_000), Formula(off=0.05), 400_000)

    assert error.p90 == pytest.approx(0.05, abs=0.005) and error.worst < 0.06
    assert max(error.prefill_p90, error.mixed_p90, error.decode_p90) == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("kv_capacity_tokens", [8_000, 150_000, 2_000_000])
def test_random_steps_are_those_that_an_engine_can_have(kv_capacity_tokens: int) -> None:
    steps = random_steps(3, kv_capacity_tokens)

    assert steps == random_steps(3, kv_capacity_tokens) != random_steps(4, kv_capacity_tokens)
    assert all(1 <= step.tokens <= LONGEST_STEP_TOKENS and step.sequences <= MOST_SEQUENCES for step in steps)
    held = [step.sequences * step.context_tokens for step in steps]
    assert max(held) <= max(kv_capacity_tokens, 64 * MOST_SEQUENCES)
    assert [sum(step.kind == kind for step in steps) for kind in ("mixed", "prefill", "decode")] == [240, 80, 80]
    assert any(step.cached_tokens > 10_000 for step in steps) and any(step.cached_tokens == 0 for step in steps)
