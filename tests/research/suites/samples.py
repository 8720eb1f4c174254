"""A made-up outcome, small enough to work its report out by hand."""

from __future__ import annotations

from dataclasses import replace

from dualmap.research.figures import Figures
from dualmap.research.suites.results import GoodputResult, Rate, RateResult, SuiteResult
from dualmap.research.suites.suite import Suite
from dualmap.research.variant import parse_variant
from dualmap.research.workload import Traffic, Workload
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.capacity.bounds import Bounds

WORKLOAD = Workload(Traffic("uniform", "uniform"), "qwen2.5-7b-910b4", 8, 800)
FIGURES = Figures(
    on_time=0.9, on_time_tokens=0.7, on_time_q1=1.0, on_time_q2=0.95, on_time_q3=0.9, on_time_q4=0.75,
    both_slos=0.85, refused=0.02, refused_q4=0.08, tpot_p50_s=0.04, tpot_p90_s=0.08,
    ttft_p50_s=1.0, ttft_p90_s=2.0, e2e_p99_s=60.0, hit_rate=0.5, infinite_hit_rate=0.6,
    longest_hold_s=12.0, error_p50=0.1, error_p90=0.3, error_p50_s=0.2, error_p90_s=0.7,
    undisturbed_share=0.25, undisturbed_error_p50=0.05, undisturbed_error_p90=0.15, migrations=3,
)  # fmt: skip


def outcome(seeds: tuple[int, ...] = (1, 2)) -> SuiteResult:
    """Ours is 10 and 20 % better than the peer, and 10 points more on time; the third is behind."""
    return SuiteResult(
        suite=Suite("made", variants=()),
        variants=tuple(
            parse_variant(text, SchedulingSettings())
            for text in ("ours=dualmap,max_hold_s=60", "peer=llm-d", "other=preble")
        ),
        seeds={WORKLOAD: seeds},
        goodputs=(
            GoodputResult(
                WORKLOAD,
                {"ours": (11.0, 12.0), "peer": (10.0, 10.0), "other": (5.0, 5.0)},
                saturation_per_s=(10.0, 10.0),
                bounds=(Bounds(20.0, 15.0), Bounds(24.0, 15.0)),
            ),
        ),
        rates=(
            RateResult(
                WORKLOAD,
                Rate(1.5, of_saturation=True),
                (15.0, 15.0),
                {
                    "ours": (FIGURES, FIGURES),
                    "peer": (replace(FIGURES, on_time=0.8), replace(FIGURES, on_time=0.8)),
                    "other": (replace(FIGURES, on_time=0.1), replace(FIGURES, on_time=0.85)),
                },
            ),
        ),
    )


CROSSED = (
    "a deadline=dualmap-least-cost,queue_order=deadline", "a fifo=dualmap-least-cost,queue_order=fifo",
    "b deadline=preble,queue_order=deadline", "b fifo=preble,queue_order=fifo", "c fifo=llm-d,queue_order=fifo",
)  # fmt: skip
CROSSED_VARIANTS = tuple(parse_variant(text, SchedulingSettings()) for text in CROSSED)
CROSSED_GOODPUT = {
    "a deadline": (12.0, 12.0), "a fifo": (9.0, 9.0),
    "b deadline": (10.0, 10.0), "b fifo": (10.0, 10.0), "c fifo": (8.0, 8.0),
}  # fmt: skip


def crossed() -> SuiteResult:
    """Placements of three policies, two of them in both orders."""
    made = outcome()
    shares = {name: rate / 15 for name, (rate, _) in CROSSED_GOODPUT.items()}
    figures = {name: (replace(FIGURES, on_time=share),) * 2 for name, share in shares.items()}
    return replace(
        made,
        variants=CROSSED_VARIANTS,
        goodputs=(replace(made.goodputs[0], goodput_per_s=CROSSED_GOODPUT, further={"99": CROSSED_GOODPUT}),),
        rates=(replace(made.rates[0], figures=figures),),
    )
