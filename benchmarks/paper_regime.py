"""Which condition of the DualMap paper's evaluation explains its lead? Goodput of its policy and of its peers, one
condition after the other, then all at once.

    python -m benchmarks.paper_regime --trace toolagent --requests-per-instance 75 --seeds 1

The conditions are those of its authors' code (github.com/A-zhudong/DualMap, README.md and start_up.py): 64 GB of host
memory for the KV cache of an instance, 0.16 ms of prefill a token, steps of up to 20,480 tokens that prefill first. All
of its policies run in one process that counts the load itself, so none of them knows it late. Peers send at once, and
engines serve in order of arrival. DualMap holds requests, gives an instance one at a time, and takes the longest hit
first (``double_hash_global_scheduler_utils.py``): that order is none of this product's, and is made here.

A cell is the highest rate with 90 % on time, requests per second, and behind the stroke the hit rate there.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from dualmap.research.run import Run
from dualmap.research.run_cache import RunCache
from dualmap.research.variant import parse_variant
from dualmap.research.workload import PRESET_SHORTHANDS, Workload, traffic_of
from dualmap.scheduling.queues import granting
from dualmap.scheduling.queues.queue_order import PLAN_LIMIT, PlanStep, QueueHead, QueueOrder, QueuePlan
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.capacity.goodput import find_goodput

HOST = "kv_capacity_tokens=184151+host_kv_tokens=1384151"
"""KV memory of the card beside the weights, and as much host memory as 64 GB beside a copy of that."""
SLOWER = "prefill_speed=0.75"
PREFILL_FIRST = "prefill_first+max_num_batched_tokens=20480"
CONDITIONS: Mapping[str, str] = {
    "as in all other tables": "",
    "KV cache in host memory, loaded over PCIe": f":{HOST}",
    "slower prefill": f":{SLOWER}",
    "prefill first, steps of 20,480 tokens": f":{PREFILL_FIRST}",
    "all three": f":{HOST}+{SLOWER}+{PREFILL_FIRST}",
}
"""Changes of the preset by condition."""


@dataclass(frozen=True, slots=True)
class Competitor:
    """A policy, and how what it holds is given to instances."""

    title: str
    policy: str
    options: str = ""
    longest_hit_first: bool = False


COMPETITORS = (
    Competitor("`dualmap`", "dualmap"),
    Competitor("… one at a time", "dualmap", ",dispatch_window_tokens=1"),
    Competitor("… and longest hit first", "dualmap", ",dispatch_window_tokens=1", longest_hit_first=True),
    Competitor("`min-ttft`", "min-ttft"),
    Competitor("`preble`", "preble"),
)


@contextmanager
def longest_hit_first(prompt_tokens: Sequence[int]) -> Iterator[None]:
    """Queues in this order, as the policy's authors have them; requests are numbered as the trace has them."""

    def plan(queue: QueueHead, order: QueueOrder) -> QueuePlan:
        load = queue.load
        has_room = load.dispatched_tokens < load.dispatch_window_tokens
        if not queue.entries or not has_room or load.running_requests >= load.max_running_requests:
            return QueuePlan(load.instance_id, load.version, ())
        entries = queue.entries[:PLAN_LIMIT]
        first = max(entries, key=lambda one: (prompt_tokens[int(one.request_id)] - one.uncached_tokens, -one.rank_ms))
        return QueuePlan(load.instance_id, load.version, (PlanStep(first.request_id),))

    with patch.object(granting, "plan_queue", plan):
        yield


@dataclass(frozen=True, slots=True)
class Cell:
    """One competitor under one condition."""

    competitor: Competitor
    workload: Workload
    seeds: tuple[int, ...]
    start_per_s: float
    tolerance: float
    cache: Path | None

    def figures(self, seed: int) -> tuple[float, float]:
        """Goodput, and the hit rate there."""
        one = self.competitor
        variant = parse_variant(f"{one.policy}={one.policy},queue_order=fifo{one.options}", SchedulingSettings())
        run = Run(self.workload, variant, seed)
        cache = RunCache(None if one.longest_hit_first else self.cache)
        hits: dict[float, float] = {}

        def on_time(rate_per_s: float) -> float:
            found = cache.figures(run.at(rate_per_s).job)
            hits[rate_per_s] = found.hit_rate
            return found.on_time

        requests = self.workload.source(seed).load().requests
        with longest_hit_first([each.input_tokens for each in requests]) if one.longest_hit_first else nullcontext():
            goodput = find_goodput(on_time, self.start_per_s, tolerance=self.tolerance, growth=1.1)
        return goodput.rate_per_s, hits.get(goodput.rate_per_s, 0.0)

    def text(self) -> str:
        found = [self.figures(seed) for seed in self.seeds]
        return f"{fmean(rate for rate, _ in found):.2f} / {100 * fmean(hit for _, hit in found):.0f}"


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", default="toolagent", help="a workload of the laboratory, or a file (%(default)s)")
    parser.add_argument("--preset", default="7b", help="one of the paper's (%(default)s)")
    parser.add_argument("--conditions", help="numbers of those to run, from 1 (all)")
    parser.add_argument("--instances", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--requests-per-instance", type=int, default=150, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--start", type=float, default=9.0, help="rate where searches start, 1/s (%(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="relative width of a goodput (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".laboratory"), help="figures of former runs (%(default)s)")
    arguments = parser.parse_args()
    preset = PRESET_SHORTHANDS.get(arguments.preset, arguments.preset)
    numbers = range(1, len(CONDITIONS) + 1)
    wanted = set(map(int, arguments.conditions.split(","))) if arguments.conditions else set(numbers)
    print("| condition | " + " | ".join(each.title for each in COMPETITORS) + " |")
    print("| --- |" + " ---: |" * len(COMPETITORS))
    for number, (title, change) in zip(numbers, CONDITIONS.items(), strict=True):
        if number not in wanted:
            continue
        requests = arguments.instances * arguments.requests_per_instance
        workload = Workload(traffic_of(arguments.trace), preset + change, arguments.instances, requests)
        seeds = workload.seeds(arguments.seeds)
        print(f"| {title} ", end="", flush=True)
        for competitor in COMPETITORS:
            cell = Cell(competitor, workload, seeds, arguments.start, arguments.tolerance, arguments.cache)
            print(f"| {cell.text()} ", end="", flush=True)
        print("|", flush=True)


if __name__ == "__main__":
    main()
