"""What the calls of the package mean, against a stand-in for its handle; and the package itself, where it is there."""

from __future__ import annotations

import pytest

from dualmap.simulation.engine.kernel_times import (
    MeasuredKernels,
    NoKernelsError,
    measured_kernels,
    package_version,
)
from dualmap.simulation.engine.silicon_fit import KernelStep, fit_error, fit_kernels
from tests.simulation.engine.kernel_handle import FACTS, Handle

KERNELS = MeasuredKernels(Handle(), FACTS)


def test_the_linear_part_has_neither_attention_nor_states() -> None:
    assert KERNELS.linear_s(100) == pytest.approx(1000.5e-3)


def test_a_prefill_computes_what_is_not_cached_and_attends_to_all() -> None:
    assert KERNELS.step_s(KernelStep(100, 60, 0, 0)) == pytest.approx((1000 + 100 + 0.5 + 0.25 * 100 * 160) / 1000)


def test_a_decode_step_is_the_package_s_own() -> None:
    assert KERNELS.step_s(KernelStep(0, 0, 8, 200)) == pytest.approx((72 + 24 + 200) / 1000)


def test_a_mixed_step_has_its_sequences_own_context_and_states() -> None:
    time_s = KERNELS.step_s(KernelStep(100, 60, 8, 200))

    states, attention = 100 * 1.0 + 8 * 3.0, 0.25 * 100 * 160 + 0.125 * 8 * 200
    assert time_s == pytest.approx((10 * 108 + 0.5 + states + attention) / 1000)


def test_the_time_of_a_step_is_divided_by_where_it_comes_from() -> None:
    sources = KERNELS.sources_s(KernelStep(100, 60, 8, 200))

    assert {source: round(1000 * time_s, 6) for source, time_s in sources.items()} == {
        "silicon": 10 * 108 + 24 + 200,
        "sol": 100,
        "empirical": 0.5,
        "mixed": 4000,
    }


def test_without_the_package_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmap.simulation.engine.kernel_times.package_version", lambda: None)
    with pytest.raises(NoKernelsError, match="aiconfigurator-core is not installed"):
        measured_kernels("some-model", "some-card")


needs_package = pytest.mark.skipif(
    package_version() is None, reason="aiconfigurator-core, of the extra silicon, is not installed"
)


@needs_package
@pytest.mark.parametrize("model", ["qwen3-8b", "Qwen/Qwen3-30B-A3B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_measured_kernels_fit_within_four_percent(model: str) -> None:
    kernels = measured_kernels(model, "h100")
    capacity = kernels.facts.kv_capacity_tokens

    assert fit_error(fit_kernels(kernels, capacity), kernels, capacity).p90 < 0.04


@needs_package
@pytest.mark.parametrize(
    ("model", "card", "reason"),
    [
        ("qwen3", "h100", "no model 'qwen3': take one of Qwen/Qwen3-0.6B"),
        ("qwen3-8b", "910b4", "no card '910b4': take one of .*h100_sxm"),
        ("qwen3-30b-a3b", "l40s", "no memory for KV; take more cards, as -tp2"),
        ("gemma-4-26b-a4b", "a100", "data missing"),
    ],
)
def test_what_the_package_lacks_is_named(model: str, card: str, reason: str) -> None:
    with pytest.raises(NoKernelsError, match=reason):
        measured_kernels(model, card)
