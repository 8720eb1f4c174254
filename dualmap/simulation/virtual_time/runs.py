"""Many runs at once: one process per run, over the cores; results in the order of the jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from multiprocessing import get_context, parent_process
from pathlib import Path
from struct import calcsize, pack_into, unpack_from
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Protocol, TypeVar

from dualmap.scheduling.placing.policies.registry import Builder, add_policy, own_builders
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.tenant_mix import TenantMix

Job = TypeVar("Job")
Answer = TypeVar("Answer")
Ran = TypeVar("Ran", covariant=True)
_COUNT = "q"
_COUNT_BYTES = calcsize(_COUNT)
_LOOK_S = 0.25
"""Time between two looks at how far the runs in other processes are."""


class Runnable(Protocol[Ran]):
    """A run that reports how many of its requests have arrived."""

    def run(self, on_progress: Callable[[int], None] | None = None) -> Ran: ...


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
    with _processes(workers, len(jobs)) as executor:
        yield from executor.map(work, jobs)


def run_all(runs: Sequence[Runnable[Answer]], workers: int, on_arrivals: Callable[[int, int], None]) -> list[Answer]:
    """All runs, as ``map_jobs`` does them. ``on_arrivals`` is called meanwhile with the place of a run and how many of
    its requests have arrived."""
    if workers <= 1 or len(runs) <= 1:
        return [each.run(partial(on_arrivals, place)) for place, each in enumerate(runs)]
    with TemporaryDirectory() as folder, _processes(workers, len(runs)) as executor:
        counts = Path(folder) / "arrived"
        counts.write_bytes(bytes(_COUNT_BYTES * len(runs)))
        futures = [executor.submit(_run_counted, each, counts, place) for place, each in enumerate(runs)]
        running = set(futures)
        while running:
            ended, running = wait(running, _LOOK_S, FIRST_COMPLETED)
            for each in ended:
                each.result()
            for place, (arrived,) in enumerate(_counts(counts)):
                on_arrivals(place, arrived)
        return [each.result() for each in futures]


def _run_counted(run: Runnable[Answer], counts: Path, place: int) -> Answer:
    with counts.open("r+b") as file, mmap(file.fileno(), 0) as shared:
        return run.run(lambda arrived: pack_into(_COUNT, shared, _COUNT_BYTES * place, arrived))


def _counts(counts: Path) -> Iterator[tuple[int]]:
    data = counts.read_bytes()
    return (unpack_from(_COUNT, data, start) for start in range(0, len(data), _COUNT_BYTES))


@contextmanager
def _processes(workers: int, jobs: int) -> Iterator[ProcessPoolExecutor]:
    executor = ProcessPoolExecutor(
        min(workers, jobs), get_context("spawn"), initializer=_begin, initargs=(own_builders(),)
    )
    try:
        yield executor
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
