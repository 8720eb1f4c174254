import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.runs import RunJob, map_jobs, run_all, run_job
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.workload.sources import TraceSource

SCENARIO = Scenario(SchedulingSettings(policy="dualmap"), find_preset("qwen2.5-7b-910b4").engine, instances=2)

WAITING_POOL = """
import os, sys, time
from dualmap.simulation.virtual_time.runs import map_jobs

def work(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(0.01)

if __name__ == "__main__":
    for _ in map_jobs(work, [sys.argv[1]] * 100_000, 2):
        pass
"""


def test_runs_in_processes_give_what_runs_here_give_in_the_order_of_the_jobs() -> None:
    small = TraceSource("uniform", requests=60)
    jobs = [RunJob(small, SCENARIO, rate) for rate in (8.0, 2.0, 5.0)]

    here = list(map_jobs(run_job, jobs, workers=1))

    assert list(map_jobs(run_job, jobs, workers=2)) == here
    assert [round(result.rate_per_s) for result in here] == [8, 2, 5]


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_report_how_far_they_are(workers: int) -> None:
    jobs = [RunJob(TraceSource("uniform", requests=requests), SCENARIO, 2.0) for requests in (250, 150)]
    arrived: dict[int, list[int]] = {0: [], 1: []}

    results = run_all(jobs, workers, lambda place, count: arrived[place].append(count))

    assert results == [job.run() for job in jobs]
    assert all(counts == sorted(counts) for counts in arrived.values())
    assert (arrived[0][-1], arrived[1][-1]) == (200, 100), "it is reported every 100 requests"


@dataclass(frozen=True)
class _Failing:
    fails: bool

    def run(self, on_progress: Callable[[int], None] | None = None) -> None:
        if self.fails:
            raise ZeroDivisionError


def test_a_run_that_fails_in_a_process_fails_all() -> None:
    with pytest.raises(ZeroDivisionError):
        run_all([_Failing(False), _Failing(True)], 2, lambda place, count: None)


def test_an_error_in_a_process_reaches_the_caller() -> None:
    try:
        list(map_jobs(_divide, [1, 0], workers=2))
    except ZeroDivisionError:
        return
    raise AssertionError("the error was lost")


def _divide(by: int) -> float:
    return 1 / by


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(WAITING_POOL)
    folder = tmp_path / "pids"
    folder.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        stderr=subprocess.DEVNULL,
    )
    _until(lambda: len(list(folder.iterdir())) == 2)

    parent.send_signal(signal.SIGKILL)
    parent.wait()

    _until(lambda: not any(_alive(int(path.name)) for path in folder.iterdir()))


def _until(holds: object) -> None:
    assert callable(holds)
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
