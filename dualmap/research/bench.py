"""The bench that runs are made on: processes, a cache of figures, and a callback for the progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from dualmap.research.figures import Figures
from dualmap.research.run import Run, Search
from dualmap.research.run_cache import RunCache
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.runs import map_jobs, run_job

Job = TypeVar("Job")
Answer = TypeVar("Answer")

OnStep = Callable[[str, int, int], None]
"""Callback with (what runs, jobs done, jobs in all)."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Deterministic: runs and code decide the figures, and neither the cache nor the number of processes does."""

    workers: int = 1
    cache: RunCache = field(default_factory=lambda: RunCache(None))
    on_step: OnStep = lambda *_: None

    def figures(self, name: str, runs: Sequence[Run]) -> list[Figures]:
        """The figures of each run, kept in the cache: all that most tables need."""
        return self.map(name, self.cache.figures, [run.job for run in runs])

    def results(self, name: str, runs: Sequence[Run]) -> list[RunResult]:
        """Each run's whole result, for what happened in its course. Too large to keep: they are made every time."""
        return self.map(name, run_job, [run.job for run in runs])

    def goodputs(self, name: str, searches: Sequence[Search]) -> list[tuple[float, ...]]:
        """The result of each search, for each of its targets; searches of variants that differ in name only
        run once."""
        different = list(dict.fromkeys(search.without_name for search in searches))
        found = dict(
            zip(different, self.map(name, partial(_searched, self.cache), different) if different else [], strict=True)
        )
        return [found[search.without_name] for search in searches]

    def map(self, name: str, work: Callable[[Job], Answer], jobs: Sequence[Job]) -> list[Answer]:
        """``work`` of every job, in order, over the processes."""
        answers: list[Answer] = []
        self.on_step(name, 0, len(jobs))
        for answer in map_jobs(work, jobs, self.workers):
            answers.append(answer)
            self.on_step(name, len(answers), len(jobs))
        return answers


def _searched(cache: RunCache, search: Search) -> tuple[float, ...]:
    """The work as it is sent to a process: without the bench, whose callback cannot be sent."""
    return search.goodputs(cache)
