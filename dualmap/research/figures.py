"""The figures of one run: a flat row of numbers, for means and for a cache."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from dualmap.simulation.figures.results import RunResult


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's figures; shares are 0..1, times in seconds."""

    on_time: float
    on_time_tokens: float
    """Share on time by prompt tokens."""
    on_time_q1: float
    """Share on time by quartile of prompt length, the shortest first."""
    on_time_q2: float
    on_time_q3: float
    _: KW_ONLY
    on_time_q4: float
    both_slos: float
    """Share on time and no slower than the traffic's SLO a token, which is 100 ms unless it has another."""
    refused: float
    """Share of all."""
    refused_q4: float
    """Share refused of the longest quarter of the prompts."""
    tpot_p50_s: float
    """Time per output token after the first."""
    tpot_p90_s: float
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
    """Error of the TTFT estimates in seconds."""
    error_p90_s: float
    undisturbed_share: float
    """Share of the answered whose instance was given no other request between their decision and first token."""
    undisturbed_error_p50: float
    """|expected - actual| / actual TTFT over these."""
    undisturbed_error_p90: float
    migrations: int
    both_tight: float = 0.0
    """Share on time and no slower than 50 ms a token; 0 in files of former versions, like the fields after it."""
    split_share: float = 0.0
    """Share of the answered that had a decode leg of their own."""
    rate_per_s: float = 0.0
    ttft_p99_s: float = 0.0
    e2e_p50_s: float = 0.0
    e2e_p90_s: float = 0.0
    tpot_mean_s: float = 0.0
    hit_share_of_bound: float = 0.0
    load_cv: float | None = None
    """Coefficient of variation of pending tokens over the instances; None: they were never loaded."""
    answers_per_s: float = 0.0
    """Answers that ended between the first arrival and the last, a second."""
    runs_per_s: float = 0.0
    """Runs of agents that ended meanwhile, a second; 0, like the next two, where the trace has no sessions."""
    run_mean_s: float = 0.0
    """Mean time of a run, see ``simulation.figures.run_times``."""
    short_run_p90_s: float = 0.0
    """P90 of the third of the runs with the fewest turns."""

    @classmethod
    def of(cls, result: RunResult) -> Figures:
        shares = result.on_time
        q1, q2, q3, q4 = shares.by_length
        runs = result.runs
        return cls(
            on_time=shares.by_requests,
            on_time_tokens=shares.by_prompt_tokens,
            on_time_q1=q1,
            on_time_q2=q2,
            on_time_q3=q3,
            on_time_q4=q4,
            both_slos=shares.both_slos,
            refused=shares.refused,
            refused_q4=shares.refused_by_length[-1],
            tpot_p50_s=result.tpot_s.p50,
            tpot_p90_s=result.tpot_s.p90,
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
            migrations=result.migrations,
            both_tight=shares.both_tight,
            split_share=result.split_share,
            rate_per_s=result.rate_per_s,
            ttft_p99_s=result.ttft_s.p99,
            e2e_p50_s=result.e2e_s.p50,
            e2e_p90_s=result.e2e_s.p90,
            tpot_mean_s=result.tpot_s.mean,
            hit_share_of_bound=result.hit_share_of_bound,
            load_cv=result.load_cv,
            answers_per_s=result.answers_per_s,
            runs_per_s=0.0 if runs is None else runs.ended_per_s,
            run_mean_s=0.0 if runs is None else runs.mean_s,
            short_run_p90_s=0.0 if runs is None else runs.short_p90_s,
        )
