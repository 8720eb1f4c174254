"""Measure what copies for a shadow do to the first tokens of the requests that are answered, in virtual time.

    python -m benchmarks.shadow_p99 [--requests 3000] [--instances 8] [--percent 10] [--seeds 5] [--loads 0.7,0.85]

Copies for the shadow's own instances cannot delay anything: nothing else is sent there. Some copies of greedy requests
go to another instance of their own revision, beside requests that are answered. Here all requests are greedy,
the worst case, and these copies go to engines of the run by the rules of a router: to the place of their session, if
nothing waits there, at most half of what may run there runs, and fewer than two copies are under way. The store knows
nothing of them. Each run is made with and without, with the same arrivals.

The traces name no sessions, so each request is drawn as if it were a session that began since the shadow did. A router
draws sessions, and copies none that began before: after a change it makes fewer copies than are made here.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from statistics import mean
from typing import Any

from dualmap.research.studies.plan import DEFAULT_POLICY, FULL, variant_of
from dualmap.router.http.shadow import MOST_AT_ONCE, goes_to_its_own, is_idle, place_of_copies
from dualmap.scheduling.revisions.weights import point
from dualmap.simulation.engine.engine_types import EngineRequest, Event, EventKind
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.trace_figures import quantile

COPY = "copy-"


class WithShadow(Simulation):
    """A run in which a part of all requests is copied when they end."""

    def __init__(self, *given: Any, percent: float) -> None:
        super().__init__(*given)
        self.copies = self.dropped = 0
        self._percent = percent
        self._under_way = Counter[str]()
        self._greedy_since = 0

    def _on_engine_event(self, instance_id: str, event: Event) -> None:
        if event.request_id.startswith(COPY):
            if event.kind is EventKind.FINISHED:
                self._under_way[instance_id] -= 1
            return
        super()._on_engine_event(instance_id, event)

    def _on_finished(self, event: Event) -> None:
        machine = self.replicas[0].requests.live.get(event.request_id)
        super()._on_finished(event)
        if machine is not None and 100 * point(event.request_id, "shadow") < self._percent:
            self._greedy_since += 1
            if goes_to_its_own(self._greedy_since, self._traced(event.request_id).input_tokens):
                self._greedy_since = 0
                self._copy(event.request_id, machine.instance_id)

    def _copy(self, request_id: str, answered_by: str) -> None:
        pool = self.replicas[0].pool
        name = place_of_copies(request_id, pool.members.instances.keys() - {answered_by})
        if name is None or self._under_way[name] >= MOST_AT_ONCE or not is_idle(pool.loads()[name]):
            self.dropped += 1
            return
        traced = self._traced(request_id)
        blocks = traced.hash_ids[: traced.input_tokens // self._trace.block_tokens]
        copy = EngineRequest(f"{COPY}{request_id}", traced.input_tokens, max(1, traced.output_tokens), blocks)
        self._cluster.submit(name, copy, self._now_s)
        self._under_way[name] += 1
        self.copies += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--percent", type=float, default=10.0, help="of the requests that are copied")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loads", default="0.7,0.85", help="parts of the rate that the fleet sustains")
    arguments = parser.parse_args()
    for load in map(float, arguments.loads.split(",")):
        changes = [_change(arguments, load, seed) for seed in range(1, arguments.seeds + 1)]
        for name in ("P50", "P99"):
            each = [change[name] for change in changes]
            print(f"load {load:g}: TTFT {name} {100 * mean(each):+.2f} % in the mean, by seed", end=" ")
            print(" ".join(f"{100 * one:+.1f}" for one in each), flush=True)


def _change(arguments: argparse.Namespace, load: float, seed: int) -> dict[str, float]:
    plan = replace(FULL, seed=seed)
    workload = plan.workload("conversation", requests=arguments.requests)
    workload = replace(workload, instances=arguments.instances)
    job = plan.run(workload, variant_of(DEFAULT_POLICY), plan.rate(workload, load)).job
    trace, found = job.source.load(job.rate_per_s), []
    for percent in (0.0, arguments.percent):
        run = WithShadow(trace, job.scenario, percent=percent)
        record = run.run()
        times_s = sorted(one.ttft_s for one in record.outcomes[record.skip_requests :])
        found.append({"P50": quantile(times_s, 0.5), "P99": quantile(times_s, 0.99)})
    before, after = found
    print(
        f"load {load:g}, seed {seed}: {run.copies} copies beside requests, {run.dropped} dropped;"
        f" TTFT P50 {before['P50']:.3f} and {after['P50']:.3f} s, P99 {before['P99']:.3f} and {after['P99']:.3f} s",
        flush=True,
    )
    return {name: after[name] / before[name] - 1 for name in before}


if __name__ == "__main__":
    main()
