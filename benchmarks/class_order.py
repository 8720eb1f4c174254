"""Shows what priority classes get of an overloaded fleet whose late requests are served, in virtual time.

    python benchmarks/class_order.py [--seconds 60] [--seeds 1 2 3] [--loads 0.8 1.2 1.6 2] [--parts 0.2 0.5 0.8]

Prints a Markdown table: for each mix, the part of the load that is of the higher class, and the load of all as a
multiple of what the fleet sustains, the means over the seeds of both classes' share on time, and the longest TTFT of
any seed. 8 × 7B, policy ``dualmap-least-cost``. *Overtaken by* counts requests of the lower class that came after a
late one of the higher class and were dispatched on its instance before it, in the mean over these late ones.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Sequence
from itertools import product
from statistics import fmean

from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.simulation.commands.tenant_options import tenant_mix
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RequestOutcome
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.trace_figures import quantile

ENGINE = find_preset("qwen2.5-7b-910b4").engine
INSTANCES = 8
TRACES = ("conversation", "toolagent")
PARTS = (0.2, 0.5, 0.8)
"""Parts of the load that are of the higher class."""
CLASSES = (PriorityClassSettings(name="high"), PriorityClassSettings(name="low"))
COLUMNS = (
    *("trace", "high", "load", "high on time", "high P99 s", "high longest s", "overtaken by"),
    *("low on time", "low P99 s", "low longest s", "all on time", "work s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3))
    parser.add_argument("--loads", type=float, nargs="+", default=(0.8, 1.2, 1.6, 2.0))
    parser.add_argument("--traces", nargs="+", default=TRACES)
    parser.add_argument("--parts", type=float, nargs="+", default=PARTS)
    arguments = parser.parse_args()
    row(*COLUMNS)
    row(*["---"] * len(COLUMNS))
    for trace, part, load in product(arguments.traces, arguments.parts, arguments.loads):
        runs = [outcomes(trace, part, load, arguments.seconds, seed) for seed in arguments.seeds]
        row(trace, f"{part:.0%}", f"{load:g} ×", *figures(runs))


def outcomes(trace: str, part: float, load: float, seconds: float, seed: int) -> Sequence[RequestOutcome]:
    """The requests of one run."""
    shares = {"high": part, "low": 1 - part}
    texts = [f"{name}={trace}@{share * load:g}x@class={name}" for name, share in shares.items()]
    mix = tenant_mix(texts, seconds, ENGINE, INSTANCES, seed)
    scenario = Scenario(SchedulingSettings(classes=CLASSES), ENGINE, instances=INSTANCES)
    return Simulation(mix.load(), scenario).run().outcomes


def figures(runs: Sequence[Sequence[RequestOutcome]]) -> list[str]:
    """The cells of a row."""
    cells = []
    for name in ("high", "low"):
        own = [[each for each in run if each.tenant == name] for run in runs]
        ttfts_s = [sorted(each.ttft_s for each in one) for one in own]
        cells += [
            f"{fmean(on_time(one) for one in own):.1%}",
            f"{fmean(quantile(one, 0.99) for one in ttfts_s):.1f}",
            f"{max(one[-1] for one in ttfts_s):.1f}",
        ]
        if name == "high":
            cells.append(f"{fmean(map(overtaken, runs)):.1f}")
    last_s = [run[-1].arrival_s for run in runs]
    work_s = fmean(sum(each.work_s(at_s) for each in run) for run, at_s in zip(runs, last_s, strict=True))
    return [*cells, f"{fmean(map(on_time, runs)):.1%}", f"{work_s:.0f}"]


def on_time(requests: Sequence[RequestOutcome]) -> float:
    return sum(each.on_time for each in requests) / max(1, len(requests))


def overtaken(requests: Sequence[RequestOutcome]) -> float:
    """The requests of the lower class that came after a late one of the higher class and were dispatched on its
    instance before it, in the mean over these."""
    by_instance: dict[str, list[RequestOutcome]] = {}
    for each in requests:
        if each.tenant == "low" and each.dispatched_s is not None:
            by_instance.setdefault(each.instance_id, []).append(each)
    gone = []
    for each in requests:
        if each.tenant == "high" and not each.on_time:
            dispatched_s, low = each.arrival_s + each.held_s, by_instance.get(each.instance_id, [])
            later = low[bisect_right([one.arrival_s for one in low], each.arrival_s) :]
            gone.append(sum(one.arrival_s + one.held_s < dispatched_s for one in later))
    return fmean(gone) if gone else 0.0


def row(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
