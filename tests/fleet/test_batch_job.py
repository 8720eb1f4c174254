"""A batch of some thousand lines while routers, workers, instances and the store are killed in turn."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_each_line_is_answered_once_while_everything_is_killed_in_turn() -> None:
    command = [sys.executable, "-m", "benchmarks.batch_job", "--lines", "2000", "--kill-every", "1.5"]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as job:
        try:
            said, _ = job.communicate(timeout=540)
        finally:
            # Stopped like this where it is late, so that it stops the fleet that it started.
            job.send_signal(signal.SIGINT)

    assert job.returncode == 0, said
    assert "'completed': 2000, 'failed': 0" in said
    for killed in ("router", "worker", "instance", "store"):
        assert f"'{killed}': " in said, said
