"""How far can a placement lead the best other with the same queue order? Goodput of ours, of the others, and of fleets
that nothing can be placed better on.

    python -m benchmarks.placement_bound --trace uniform,hotspot --preset 7b --seeds 3

Three ceilings, from the nearest to the farthest:

* ``ideal hits``: the best of all policies, ours included, where every instance finds what any instance has computed.
  No placement could spare more prefill. It assumes that what is left, the balance of load, is done as well as the best
  of these policies does it.
* ``one machine``: besides, the instances are one of so many times the speed: one queue, one batch, one KV memory, steps
  of so many times the tokens in the same time. That is the usual relaxation of scheduling on several machines: there is
  no imbalance, and even a single prompt is spread over the whole fleet, so that its own prefill takes a fraction of its
  time. First come, first served, it is no bound in theory: a placement could keep long prompts on instances of their
  own, and so let short ones overtake them.
* ``ideal``: ``simulation.capacity.bounds``, which no placement and no order can pass. It leaves out the longest prompts
  and all waiting, and most of the decoding of short traces.

Room is the ceiling over the best other, seed by seed, with the 95 % confidence interval of its mean.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from dualmap.research.run import Run, Search
from dualmap.research.run_cache import RunCache
from dualmap.research.suites.suite import BEST_OTHERS, ORDERS
from dualmap.research.targets import TARGETS
from dualmap.research.variant import Variant, parse_variant
from dualmap.research.workload import PAPER_CAPS, PRESET_SHORTHANDS, Workload, traffic_of
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.figures.mean import Mean
from dualmap.simulation.virtual_time.runs import map_jobs
from dualmap.simulation.virtual_time.scenario import Scenario

OURS = "dualmap-least-cost"
CEILINGS = ("ideal hits", "one machine", "ideal")
TRACES = "conversation,toolagent,coding,uniform,hotspot,agents"


def one_machine(engine: EngineConfig, instances: int) -> EngineConfig:
    """One engine of so many times the speed and memory."""
    costs = engine.costs
    return replace(
        engine,
        costs=replace(
            costs,
            token_s=costs.token_s / instances,
            attention_pair_s=costs.attention_pair_s / instances,
            sequence_s=costs.sequence_s / instances,
            context_token_s=costs.context_token_s / instances,
            prompt_s=costs.prompt_s / instances,
        ),
        kv_capacity_tokens=engine.kv_capacity_tokens * instances,
        max_num_batched_tokens=engine.max_num_batched_tokens * instances,
        max_num_seqs=engine.max_num_seqs * instances,
    )


@dataclass(frozen=True, slots=True)
class OneMachineRun(Run):
    """The fleet as one instance, whose cache forgets nothing."""

    def scenario(self) -> Scenario:
        fleet, instances = Run.scenario(self), self.workload.instances
        return replace(
            fleet,
            engine=one_machine(fleet.engine, instances),
            instances=1,
            dispatch_window_tokens=fleet.dispatch_window_tokens * instances,
            endless_cache=True,
        )


def variant_of(policy: str, order: str, *, endless: bool = False) -> Variant:
    text = f"{policy}={policy},queue_order={order}" + (",endless_cache=true" if endless else "")
    return parse_variant(text, SchedulingSettings())


@dataclass(frozen=True, slots=True)
class Place:
    """A workload in one order."""

    workload: Workload
    order: str
    others: tuple[str, ...]
    seeds: tuple[int, ...]
    target: str
    cache: RunCache

    def goodputs(self) -> dict[str, list[float]]:
        """The goodputs of every competitor, seed by seed; those with ideal hits end with ``+``."""
        policies = (OURS, *self.others)
        found = {policy: [self._search(seed, policy) for seed in self.seeds] for policy in policies}
        found |= {
            f"{policy}+": [self._search(seed, policy, endless=True) for seed in self.seeds] for policy in policies
        }
        found["one machine"] = [self._search(seed, OURS, kind=OneMachineRun) for seed in self.seeds]
        return found

    def ideals(self) -> list[float]:
        slo_s = self.workload.traffic.slo_ttft_s or SchedulingSettings().slo_ttft_s
        return [self.workload.bounds(seed, slo_s).ideal_goodput_per_s for seed in self.seeds]

    def _search(self, seed: int, policy: str, *, endless: bool = False, kind: type[Run] = Run) -> float:
        run = kind(self.workload, variant_of(policy, self.order, endless=endless), seed)
        return Search(run, (TARGETS[self.target],)).goodputs(self.cache)[0]


def row_of(place: Place) -> str:
    """One line of the table."""
    found = place.goodputs()
    best_other = max(place.others, key=lambda policy: fmean(found[policy]))
    other = found[best_other]
    with_ideal_hits = [max(values) for values in zip(*(found[name] for name in found if name[-1] == "+"), strict=True)]
    ceilings: Mapping[str, Sequence[float]] = {
        "ideal hits": with_ideal_hits,
        "one machine": found["one machine"],
        **({"ideal": place.ideals()} if place.target == "90" else {}),
    }
    cells = [place.workload.title, place.order, f"{fmean(other):.2f} {best_other}"]
    cells += [f"{fmean(found[OURS]):.2f}", _lead(found[OURS], other)]
    cells += [f"{fmean(ceilings[name]):.2f}, {_lead(ceilings[name], other)}" for name in ceilings]
    return "| " + " | ".join(cells) + " |"


def _lead(own: Sequence[float], other: Sequence[float]) -> str:
    if not all(other):
        return "–"
    mean = Mean.of([100 * (one / two - 1) for one, two in zip(own, other, strict=True)])
    return f"{mean.value:+.1f} ± {mean.half_width:.1f} %"


def places(arguments: Namespace) -> list[Place]:
    folder = Path(os.environ["DUALMAP_TRACES"]) if "DUALMAP_TRACES" in os.environ else None
    made = []
    for name in arguments.trace.split(","):
        for preset in arguments.preset.split(","):
            base, colon, changes = preset.partition(":")
            full = PRESET_SHORTHANDS.get(base, base) + colon + changes
            requests = arguments.instances * arguments.requests_per_instance
            workload = Workload(traffic_of(name, folder), full, arguments.instances, requests)
            seeds = workload.seeds(arguments.seeds)
            others = tuple(arguments.others.split(","))
            for order in arguments.orders.split(","):
                made.append(Place(workload, order, others, seeds, arguments.target, RunCache(Path(arguments.cache))))
    return made


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", default=TRACES, help="workloads of the laboratory (%(default)s)")
    parser.add_argument("--preset", default=",".join(each.split("-")[1] for each in PAPER_CAPS), help="(%(default)s)")
    parser.add_argument("--orders", default=",".join(ORDERS), help="(%(default)s)")
    parser.add_argument("--others", default=",".join(BEST_OTHERS), help="policies to lead (%(default)s)")
    parser.add_argument("--instances", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--requests-per-instance", type=int, default=120, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--target", default="90", choices=TARGETS, help="(%(default)s)")
    parser.add_argument("--cache", default=".laboratory", help="figures of former runs (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="(%(default)s)")
    arguments = parser.parse_args()
    titles = ["fleet", "order", "best other", "ours", "lead", *CEILINGS[: 3 if arguments.target == "90" else 2]]
    print("| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|")
    for row in map_jobs(row_of, places(arguments), arguments.workers):
        print(row, flush=True)


if __name__ == "__main__":
    main()
