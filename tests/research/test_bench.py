"""What the bench sends to other processes can be sent there."""

from __future__ import annotations

from dualmap.research.bench import Bench
from dualmap.research.run import Run, Search
from dualmap.research.variant import parse_variant
from dualmap.research.workload import Traffic, Workload
from dualmap.scheduling.settings import SchedulingSettings

WORKLOAD = Workload(Traffic("uniform", "uniform"), "qwen2.5-7b-910b4", 2, 40)
SEARCHES = [
    Search(Run(WORKLOAD, parse_variant(f"{policy}={policy}", SchedulingSettings())), tolerance=0.3)
    for policy in ("least-loaded", "round-robin")
]


def test_processes_find_what_one_process_finds_though_the_progress_is_shown_here() -> None:
    steps: list[tuple[int, int]] = []

    def on_step(_: str, done: int, jobs: int) -> None:
        steps.append((done, jobs))

    assert Bench(2, on_step=on_step).goodputs("search", SEARCHES) == Bench().goodputs("search", SEARCHES)
    assert steps == [(0, 2), (1, 2), (2, 2)]
