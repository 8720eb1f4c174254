"""Runs the evaluation's jobs over processes, and reports their progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dualmap.simulation.runs import map_jobs

Job = TypeVar("Job")
Answer = TypeVar("Answer")

OnStep = Callable[[str, int, int], None]
"""Called with (what runs, jobs done, jobs in all)."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Runs jobs over processes and reports each that is done."""

    workers: int
    on_step: OnStep = lambda *_: None

    def map(self, name: str, work: Callable[[Job], Answer], jobs: Sequence[Job]) -> list[Answer]:
        answers: list[Answer] = []
        self.on_step(name, 0, len(jobs))
        for answer in map_jobs(work, jobs, self.workers):
            answers.append(answer)
            self.on_step(name, len(answers), len(jobs))
        return answers
