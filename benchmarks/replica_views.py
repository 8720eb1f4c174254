"""How much is the shared store worth to a policy? Shares on time of a fleet whose router replicas share nothing, by
what each knows of the load of the instances and of their caches; beside them those of replicas that share a store.

    python -m benchmarks.replica_views --trace toolagent --rate 8.5 --columns shared,8:exact,8:late,1:gauges,8:own

Requests come to the replicas in turn, first come, first served. A cell is the share on time in percent and, behind the
stroke, the share of prompt tokens found in caches, both in the mean over the seeds. A column is a number of replicas
and what each knows of the load (``research.unshared.load_view``), as ``8:late``; behind a further colon, as
``8:late:reported``, instances report their caches to every replica.
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dualmap.research.run import Run
from dualmap.research.run_cache import RunCache
from dualmap.research.unshared.load_view import READ_VIEWS, LoadView
from dualmap.research.variant import Variant, parse_variant
from dualmap.research.workload import PRESET_SHORTHANDS, Workload, traffic_of
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.virtual_time.runs import map_jobs

POLICIES = "dualmap,dualmap-least-cost,min-ttft,preble,dynamo,sglang,llm-d"
COLUMNS = "shared,8:exact,8:late,1:gauges,8:own,8:late:reported"


@dataclass(frozen=True, slots=True)
class Column:
    """One kind of knowledge."""

    replicas: int
    view: LoadView | None
    """None: one store."""
    kv_events: bool

    @classmethod
    def parse(cls, text: str) -> Column:
        """The column of a text like ``8:late:reported``, or ``shared``. Raises ValueError."""
        if text == "shared":
            return cls(1, None, kv_events=False)
        replicas, view, *reported = text.split(":")
        if reported not in ([], ["reported"]):
            raise ValueError(f"a column must read 8:late or 8:late:reported, found {text!r}")
        return cls(int(replicas), LoadView(view), kv_events=bool(reported))

    @property
    def title(self) -> str:
        if self.view is None:
            return "one store"
        return f"{self.replicas} {self.view.value}{', reported' if self.kv_events else ''}"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy, with all kinds of knowledge."""

    policy: str
    order: str
    columns: tuple[Column, ...]
    workload: Workload
    rate_per_s: float
    seeds: tuple[int, ...]
    reading_s: float
    cache: RunCache

    def variant(self, column: Column) -> Variant:
        options = f"queue_order={self.order}"
        if column.view is not None:
            options += f",load_view={column.view.value},replicas={column.replicas}"
        if column.view in READ_VIEWS:
            options += f",reading_interval_s={self.reading_s}"
        if column.kv_events:
            options += ",kv_events=true"
        return parse_variant(f"{self.policy}={self.policy},{options}", SchedulingSettings())

    def cell(self, column: Column) -> str:
        runs = [Run(self.workload, self.variant(column), seed, self.rate_per_s) for seed in self.seeds]
        found = [self.cache.figures(run.job) for run in runs]
        return f"{100 * fmean(one.on_time for one in found):.1f} / {100 * fmean(one.hit_rate for one in found):.0f}"


def line_of(row: Row) -> str:
    return "| " + " | ".join([f"`{row.policy}`", *map(row.cell, row.columns)]) + " |"


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", default="toolagent", help="a workload of the laboratory, or a file (%(default)s)")
    parser.add_argument("--preset", default="7b", help="(%(default)s)")
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--columns", default=COLUMNS, help="(%(default)s)")
    parser.add_argument("--reading-s", type=float, default=1.0, help="time between two readings (%(default)s)")
    parser.add_argument("--policy", default=POLICIES, help="(%(default)s)")
    parser.add_argument("--order", default="fifo", choices=("fifo", "deadline"), help="(%(default)s)")
    parser.add_argument("--instances", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--requests-per-instance", type=int, default=150, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--cache", default=".laboratory", help="figures of former runs (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="(%(default)s)")
    arguments = parser.parse_args()
    preset = PRESET_SHORTHANDS.get(arguments.preset, arguments.preset)
    requests = arguments.instances * arguments.requests_per_instance
    workload = Workload(traffic_of(arguments.trace), preset, arguments.instances, requests)
    columns = tuple(map(Column.parse, arguments.columns.split(",")))
    rows = [
        Row(
            policy, arguments.order, columns, workload, arguments.rate, workload.seeds(arguments.seeds),
            arguments.reading_s, RunCache(Path(arguments.cache)),
        )
        for policy in arguments.policy.split(",")
    ]  # fmt: skip
    print("| " + " | ".join(["policy", *(column.title for column in columns)]) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for line in map_jobs(line_of, rows, arguments.workers):
        print(line, flush=True)


if __name__ == "__main__":
    main()
