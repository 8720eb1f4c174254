"""Costs are found again from the times that they give."""

from __future__ import annotations

import pytest

from dualmap.simulation.calibrate.fit import DecodeTime, PrefillTime, fit_costs
from dualmap.simulation.engine.least_squares import non_negative
from dualmap.simulation.engine.presets import PRESETS
from dualmap.simulation.engine.step_time import StepCosts

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = tuple((size, size * context) for size in (1, 2, 4, 8, 16, 32) for context in (64, 2048))
CPU = StepCosts(0.0016, 0.0, 8e-6, 2e-9, 1e-4, 1e-7, prompt_s=0.005)


def measured(costs: StepCosts, noise: float = 0.0) -> tuple[list[PrefillTime], list[DecodeTime]]:
    prefills = [
        PrefillTime(length, costs.prefill_s(length, 2048) * (1 + noise * (-1) ** place))
        for place, length in enumerate(LENGTHS)
    ]
    decodes = [
        DecodeTime(size, context, costs.step_s(0, 0, size, context) * (1 + noise * (-1) ** place))
        for place, (size, context) in enumerate(BATCHES)
    ]
    return prefills, decodes


@pytest.mark.parametrize(
    "name", ["cpu", "qwen2.5-7b-910b4", "qwen2.5-14b-910b3", "qwen2.5-1.5b-h200-eighth", "llama-3.1-70b-h100"]
)
def test_an_engine_is_found_again_from_its_times(name: str) -> None:
    costs = CPU if name == "cpu" else PRESETS[name].engine.costs
    fitted = fit_costs(*measured(costs), 2048)
    assert fitted.prefill_error < 0.02 and fitted.decode_error < 0.02
    for length in (100, 3000, 20_000):
        assert fitted.costs.prefill_s(length, 2048) == pytest.approx(costs.prefill_s(length, 2048), rel=0.06)
    assert fitted.costs.step_s(0, 0, 12, 30_000) == pytest.approx(costs.step_s(0, 0, 12, 30_000), rel=0.03)


def test_noise_makes_no_cost_negative() -> None:
    fitted = fit_costs(*measured(CPU, noise=0.15), 2048)
    costs = fitted.costs
    assert min(costs.overhead_s, costs.token_s, costs.attention_pair_s, costs.sequence_s, costs.context_token_s) >= 0
    assert fitted.prefill_error < 0.2


def test_too_few_measurements_are_refused() -> None:
    prefills, decodes = measured(CPU)
    with pytest.raises(ValueError, match="three lengths"):
        fit_costs(prefills[:2], decodes, 2048)


def test_coefficients_below_zero_are_left_out() -> None:
    rows = [[1.0, float(x)] for x in range(1, 6)]
    assert non_negative(rows, [10.0 - x for x in range(1, 6)])[1] == 0.0
    assert non_negative(rows, [3.0 + 2 * x for x in range(1, 6)]) == pytest.approx([3.0, 2.0])
