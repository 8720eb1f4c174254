"""Agents that begin a new run when one ends, in virtual time: schedulers of whole runs beside those of requests.

    python -m benchmarks.agents_at_once [--agents 260 340 420] [--seeds 1 2 3 4] [--schedulers "runs wait" default …]
        [--trace tasks] [--instances 8] [--seconds 300] [--skip-s 60] [--lines FILE]

prints a row for each scheduler and number of agents: the mean over the seeds, and the least and the greatest where they
differ in what is shown. With ``--lines`` a simulation that a line of the file has is not run again.

Eight instances hold the contexts of about 260 agents of the generator ``tasks``. Waiting for memory counts in TTFT.
*runs wait* is ``scheduling.admit_runs``, with *misses twice* own prefill weighs double. *default* is the same without
it, and ``sglang``, ``vllm-kv-aware`` and ``llm-d-latency`` are the policies of other projects, all by deadline. *llm-d
program-aware* is the rule of ``llm-d-latency`` behind the queue that releases the program with the least attained
service, and *ThunderAgent* pauses whole programs by instance; both dispatch at once. With *endless* every instance
finds all that any of them has computed: no cache and no order has more hits. *mean run* and *short P90* are of the runs
that began in the first half of the time that counts: the mean of their times, and P90 of the third of them with the
fewest turns.
N agents that always work are N runs, so N over *runs/s* is the time of a run, too.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.router_queue import RouterQueueRule
from dualmap.simulation.virtual_time.scenario import Dispatch, Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.sources import TraceSource

DEVICE_TOKENS = 200_000
REQUESTS = 12_000
SLO_TPOT_S = 0.1
BY_DEADLINE = {"queue_order": "deadline"}
PROGRAMS = SchedulingSettings(policy="llm-d-latency")

Change = Callable[[Scenario], Scenario]

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "turns/s": lambda found: f"{found['answers_per_s']:.1f}",
    "runs/s": lambda found: f"{found['runs']['ended_per_s']:.2f}",
    "mean run, s": lambda found: f"{found['runs']['mean_s']:.0f}",
    "short P90, s": lambda found: f"{found['runs']['short_p90_s']:.0f}",
    "on time, %": lambda found: f"{100 * found['effective_capacity']:.1f}",
    "both SLOs, %": lambda found: f"{100 * found['on_time']['both_slos']:.0f}",
    "P99, s": lambda found: f"{found['ttft_s']['p99']:.0f}",
    "in cache, %": lambda found: f"{100 * found['hit_rate']:.1f}",
}


def _by_deadline(policy: str, **settings: object) -> Change:
    chosen = SchedulingSettings.model_validate({"policy": policy} | BY_DEADLINE | settings)
    return lambda scenario: replace(scenario, scheduling=chosen)


SCHEDULERS: dict[str, Change] = {
    "runs wait": _by_deadline("dualmap-least-cost", admit_runs=True),
    "runs wait, misses twice": _by_deadline(
        "dualmap-least-cost", admit_runs=True, policy_options={"recompute_weight": 6.0, "crowding_weight": 2.0}
    ),
    "default": _by_deadline("dualmap-least-cost"),
    "sglang": _by_deadline("sglang"),
    "vllm-kv-aware": _by_deadline("vllm-kv-aware"),
    "llm-d-latency": _by_deadline("llm-d-latency"),
    "llm-d program-aware": lambda scenario: replace(
        scenario, scheduling=PROGRAMS, dispatch=Dispatch.DIRECT, router_queue=RouterQueueRule.LLM_D_PROGRAM
    ),
    "ThunderAgent": lambda scenario: replace(
        scenario, scheduling=PROGRAMS, dispatch=Dispatch.DIRECT, pauses_programs=True
    ),
    "endless": lambda scenario: replace(_by_deadline("dualmap-least-cost")(scenario), endless_cache=True),
    "runs wait, endless": lambda scenario: replace(
        _by_deadline("dualmap-least-cost", admit_runs=True)(scenario), endless_cache=True
    ),
}


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[260, 340, 420])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--schedulers", nargs="+", default=list(SCHEDULERS), choices=list(SCHEDULERS))
    parser.add_argument("--trace", default="tasks")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--skip-s", type=float, default=60.0)
    parser.add_argument("--lines", type=Path, help="the figures of each simulation, as a line of JSON")
    arguments = parser.parse_args()
    lines: Path | None = arguments.lines
    known = {}
    if lines is not None and lines.exists():
        found = map(orjson.loads, lines.read_bytes().splitlines())
        known = {tuple(line["of"]): line["figures"] for line in found}
    print(f"| agents | scheduler | seeds | {' | '.join(COLUMNS)} |")
    print(f"| ---: | --- | ---: |{' --- |' * len(COLUMNS)}", flush=True)
    of_all = (arguments.trace, arguments.instances, arguments.seconds, arguments.skip_s)
    for agents, name in product(arguments.agents, arguments.schedulers):
        figures = []
        for seed in arguments.seeds:
            of = (name, agents, seed, *of_all)
            if of not in known:
                known[of] = figures_of(*of)
                if lines is not None:
                    with lines.open("ab") as file:
                        line = {"of": of, "figures": known[of]}
                        file.write(orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS) + b"\n")
            figures.append(known[of])
        cells = [_spread([column(each) for each in figures]) for column in COLUMNS.values()]
        print(f"| {agents} | {name} | {len(figures)} | {' | '.join(cells)} |", flush=True)


def figures_of(
    name: str, agents: int, seed: int, trace: str, instances: int, seconds: float, skip_s: float
) -> dict[str, Any]:
    """The figures of one simulation."""
    engine = replace(find_preset("qwen2.5-7b-910b4").engine, kv_capacity_tokens=DEVICE_TOKENS)
    scenario = Scenario(
        SchedulingSettings(), engine, instances, loop=Loop(agents, seconds=seconds), skip_s=skip_s,
        slo_tpot_s=SLO_TPOT_S,
    )  # fmt: skip
    found = simulate(TraceSource(trace, REQUESTS, seed=seed).load(), SCHEDULERS[name](scenario))
    return asdict(replace(found, samples=(), timeline=(), by_instance={}))


def _spread(values: Sequence[str]) -> str:
    digits = len(values[0].partition(".")[2])
    least, most = min(values, key=float), max(values, key=float)
    middle = f"{fmean(map(float, values)):.{digits}f}"
    return middle if least == most else f"{middle} ({least}–{most})"


if __name__ == "__main__":
    main()
