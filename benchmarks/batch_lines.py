"""Lines of batches beside interactive requests, in virtual time: what they add, and what people notice.

    python -m benchmarks.batch_lines [--rates 1.8 3.6 4.8] [--seeds 1 2] [--requests 1500] [--fixed 8 16 32 64]

Eight instances serve the generator ``toolagent`` at these rates: 0.3, 0.6 and 0.8 of the rate (6/s) at which 92 % of
its requests are on time. Beside them lies an endless batch: 12 shared documents of 4,096 tokens, each line with 300
tokens of its own and an answer of 200.

*alone* has no batch. *as room is* begins lines as the fleet does (``scheduling.batches.slack``). *N at once* keeps N
lines under way, whatever comes: of these numbers, the best one within the bounds (P99 of first tokens and of the time
per token at most 5 % above *alone*, on time at most 0.5 points below) is what a fixed number reaches that knew the load
beforehand.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from statistics import fmean

from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import Percentiles, RequestOutcome
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.generators.conversation import toolagent
from dualmap.simulation.workload.traces import Trace, TraceRequest

INSTANCES = 8
BATCH = "batch"
DOCUMENTS, DOCUMENT_TOKENS, LINE_TOKENS, ANSWER_TOKENS = 12, 4096, 300, 200
LINES = 40_000
FIRST_ID = 1 << 40
"""Above the ids of blocks that the generator gives."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What people had, and what was done of the batch until the last of them came."""

    ttft_p99_s: float
    tpot_p99_s: float
    on_time: float
    lines_per_s: float

    def keeps(self, alone: Figures) -> bool:
        return (
            self.ttft_p99_s <= 1.05 * alone.ttft_p99_s
            and self.tpot_p99_s <= 1.05 * alone.tpot_p99_s
            and self.on_time >= alone.on_time - 0.005
        )


def with_lines(people: Trace, seed: int) -> Trace:
    """The trace, and the lines of a batch in the order of its documents."""
    ids, rng, block = count(FIRST_ID), Random(seed), people.block_tokens
    documents = [tuple(next(ids) for _ in range(DOCUMENT_TOKENS // block)) for _ in range(DOCUMENTS)]
    lines = [
        TraceRequest(
            people.requests[-1].arrival_s,
            DOCUMENT_TOKENS + LINE_TOKENS,
            max(1, round(rng.gauss(ANSWER_TOKENS, ANSWER_TOKENS / 4))),
            (*documents[number * DOCUMENTS // LINES], next(ids)),
            priority=BATCH,
            tenant=BATCH,
        )
        for number in range(LINES)
    ]
    return Trace(people.name, block, (*people.requests, *lines))


def figures_of(trace: Trace, loop: Loop) -> Figures:
    classes = (PriorityClassSettings(name="default"), PriorityClassSettings(name=BATCH, slo_ttft_s=3600.0))
    scenario = Scenario(
        SchedulingSettings(classes=classes), find_preset("qwen2.5-7b-910b4").engine, INSTANCES, loop=loop
    )
    outcomes = Simulation(trace, scenario).run().outcomes
    people = [each for each in outcomes if each.tenant != BATCH]
    ended_s = people[-1].arrival_s
    counted = people[len(people) // 5 :]
    begun_s = counted[0].arrival_s
    done = sum(_is_done(each, begun_s, ended_s) for each in outcomes if each.tenant == BATCH)
    return Figures(
        Percentiles.of([each.ttft_s for each in counted]).p99,
        Percentiles.of([each.tpot_s for each in counted if each.tpot_s is not None]).p99,
        fmean(each.ttft_s <= each.slo_s for each in counted),
        done / (ended_s - begun_s),
    )


def _is_done(line: RequestOutcome, begun_s: float, ended_s: float) -> bool:
    return line.finish_s is not None and begun_s <= line.finish_s <= ended_s


def compare(rate_per_s: float, seed: int, requests: int, fixed: Sequence[int]) -> None:
    people = toolagent(requests, seed).at_rate(rate_per_s)
    both = with_lines(people, seed)
    alone = figures_of(people, Loop())
    rows = {"alone": alone, "as room is": figures_of(both, Loop(lines=BATCH))}
    rows |= {f"{number} at once": figures_of(both, Loop(lines=BATCH, lines_at_once=number)) for number in fixed}
    for name, found in rows.items():
        print(
            f"{rate_per_s:5.1f} {seed:4} {name:>12} {found.lines_per_s:7.2f} {found.ttft_p99_s:9.2f}"
            f" {found.ttft_p99_s / alone.ttft_p99_s - 1:+7.1%} {1000 * found.tpot_p99_s:9.0f}"
            f" {found.tpot_p99_s / alone.tpot_p99_s - 1:+7.1%} {found.on_time:7.1%}"
            f"  {'' if found.keeps(alone) else 'beyond the bounds'}",
            flush=True,
        )


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.8, 3.6, 4.8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--fixed", type=int, nargs="*", default=[8, 16, 32, 64])
    options = parser.parse_args()
    print(" rate seed          way lines/s TTFT P99 s         TPOT P99 ms         on time")
    for rate_per_s in options.rates:
        for seed in options.seeds:
            compare(rate_per_s, seed, options.requests, options.fixed)


if __name__ == "__main__":
    main()
