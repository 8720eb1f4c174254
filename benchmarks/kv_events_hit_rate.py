"""The worth of KV events: hit rate and requests on time by the engines' own reports, and by the fleet's estimate.

Every workload runs twice through the same simulated fleet, with KV memory as the preset has it and with a part of it,
so that caches turn over. In brackets the hit rate that the router expected. The rate is a share of what the fleet
sustains (``simulation.capacity.bounds``). Figures are means over the seeds; the last column is the difference on time,
seed by seed, with its 95 % confidence interval.

    python benchmarks/kv_events_hit_rate.py --requests 1500 --seeds 4
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from statistics import fmean

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.capacity.bounds import bounds_of
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.mean import Mean
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.runs import RunJob, map_jobs
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.workload.generators import GENERATORS
from dualmap.simulation.workload.sources import TraceSource


@dataclass(frozen=True)
class Case:
    workload: str
    memory: float
    seed: int
    kv_events: bool
    options: argparse.Namespace

    def run(self) -> RunResult:
        options = self.options
        engine = find_preset(options.preset).engine
        source = TraceSource(self.workload, requests=options.requests, seed=self.seed)
        slo_s = SchedulingSettings().slo_ttft_s
        whole = bounds_of(source.load(), engine, options.instances, slo_s, share=0.9, skip=0)
        engine = replace(engine, kv_capacity_tokens=round(engine.kv_capacity_tokens * self.memory))
        scenario = Scenario(
            SchedulingSettings(),
            engine,
            options.instances,
            kv_events=self.kv_events,
            skip_requests=options.requests // 5,
        )
        return RunJob(source, scenario, whole.sustainable_per_s * options.load).run()


def run(case: Case) -> RunResult:
    return case.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(GENERATORS))
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--preset", default="qwen2.5-7b-910b4")
    parser.add_argument("--load", type=float, default=1.0, help="share of the sustainable rate")
    parser.add_argument("--memory", type=float, nargs="+", default=[1.0, 0.25], help="parts of the preset's KV memory")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    pairs = [(workload, memory) for memory in options.memory for workload in options.workloads]
    seeds = range(1, options.seeds + 1)
    cases = [Case(*pair, seed, events, options) for pair in pairs for seed in seeds for events in (False, True)]
    results = map_jobs(run, cases, options.workers)
    heads = ("hit rate: estimate (expected)", "events (expected)", "on time: estimate", "events", "difference, points")
    print(f"| workload | KV memory | {' | '.join(heads)} |")
    print(f"| --- | --- |{' --- |' * len(heads)}", flush=True)
    for workload, memory in pairs:
        runs = [next(results) for _ in range(2 * options.seeds)]
        estimate, events = runs[::2], runs[1::2]
        on_time = [[100 * each.effective_capacity for each in kind] for kind in (estimate, events)]
        gain = Mean.of([there - here for here, there in zip(*on_time, strict=True)])
        cells = [f"{mean(kind, 'hit_rate')} ({mean(kind, 'expected_hit_rate')})" for kind in (estimate, events)]
        cells += [mean(kind, "effective_capacity") for kind in (estimate, events)]
        cells += [f"{gain.value:+.1f} ± {gain.half_width:.1f}"]
        print(f"| {workload} | {memory:g} × | {' | '.join(cells)} |", flush=True)


def mean(runs: list[RunResult], share: str) -> str:
    return f"{fmean(getattr(run, share) for run in runs):.1%}"


if __name__ == "__main__":
    main()
