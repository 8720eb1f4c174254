"""Many runs at once: one process per run, over the cores; results in the order of the jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import TypeVar

from dualmap.scheduling.placing.policies.registry import Builder, add_policy, own_builders
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.tenant_mix import TenantMix

Job = TypeVar("Job")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RunJob:
    """One run, complete."""

    source: TraceSource | TenantMix
    scenario: Scenario
    rate_per_s: float | None = None
    """None: the trace's own times."""

    def run(self, on_progress: Callable[[int], None] | None = None) -> RunResult:
        """Run it here and now; ``on_progress`` gets the number of requests that arrived. Raises SimulationError."""
        return simulate(self.source.load(self.rate_per_s), self.scenario, on_progress)


def run_job(job: RunJob) -> RunResult:
    return job.run()


def default_workers() -> int:
    """Processes that this machine can run at once."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def map_jobs(work: Callable[[Job], Answer], jobs: Sequence[Job], workers: int) -> Iterator[Answer]:
    """``work`` of every job, in order; in this process with one worker.

    Processes end with the iterator, and with this process, however it ends. Each knows the policies that other packages
    added to this one.
    """
    if workers <= 1 or len(jobs) <= 1:
        yield from map(work, jobs)
        return
    executor = ProcessPoolExecutor(
        min(workers, len(jobs)), get_context("spawn"), initializer=_begin, initargs=(own_builders(),)
    )
    try:
        yield from executor.map(work, jobs)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _begin(own: dict[str, Builder]) -> None:
    """Prepare a pool's process. A new interpreter knows the product's policies alone, and a job may name another."""
    for name, builder in own.items():
        add_policy(name, builder)
    _end_with_parent()


def _end_with_parent() -> None:
    """A pool's process that lost its parent (killed, for example) would wait for work forever."""
    parent = parent_process()
    assert parent is not None  # called in a child only

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
