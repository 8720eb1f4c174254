"""The figures of one run in the laboratory: a flat row of numbers, for means and for a cache."""

from __future__ import annotations

from dataclasses import dataclass

from simulation.results import RunResult


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's figures; shares are 0..1, times in seconds."""

    on_time: float
    ttft_p50_s: float
    ttft_p90_s: float
    e2e_p99_s: float
    hit_rate: float
    infinite_hit_rate: float
    longest_hold_s: float
    error_p50: float
    """|expected - actual| / actual TTFT."""
    error_p90: float
    error_p50_s: float
    """The same in seconds."""
    error_p90_s: float
    undisturbed_share: float
    """Share of the answered whose instance was given no other request between their decision and first token."""
    undisturbed_error_p50: float
    """|expected - actual| / actual TTFT over these."""
    undisturbed_error_p90: float
    refused: int
    migrations: int

    @classmethod
    def of(cls, result: RunResult) -> Figures:
        return cls(
            on_time=result.effective_capacity,
            ttft_p50_s=result.ttft_s.p50,
            ttft_p90_s=result.ttft_s.p90,
            e2e_p99_s=result.e2e_s.p99,
            hit_rate=result.hit_rate,
            infinite_hit_rate=result.infinite_hit_rate,
            longest_hold_s=result.longest_hold_s,
            error_p50=result.ttft_error_p50,
            error_p90=result.ttft_error_p90,
            error_p50_s=result.ttft_error_s.p50,
            error_p90_s=result.ttft_error_s.p90,
            undisturbed_share=result.undisturbed_share,
            undisturbed_error_p50=result.undisturbed_error_p50,
            undisturbed_error_p90=result.undisturbed_error_p90,
            refused=result.refused,
            migrations=result.migrations,
        )
