"""The benchmark that follows one request through the modules of a running replica."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HOPS = Path(__file__).resolve().parents[2] / "benchmarks" / "request_hops.py"
FIGURES = re.compile(r"^(\d+) modules, (\d+) calls, (\d+) changes of module$", re.MULTILINE)
ROW = re.compile(r"^ *(\d+) +(\d+)  ([a-z_.]+)$", re.MULTILINE)


@pytest.mark.parametrize("options", [(), ("--split",)])
def test_the_path_of_a_request_is_told_by_module(options: tuple[str, ...]) -> None:
    command = [sys.executable, str(HOPS), *options]

    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=HOPS.parents[1])

    assert done.returncode == 0, done.stdout + done.stderr
    until_written, until_settled = done.stdout.split("until settled:")
    figures = []
    for part in (until_written, until_settled):
        ((modules, calls, changes),) = [tuple(map(int, each)) for each in FIGURES.findall(part)]
        rows = [(int(called), int(entered), name) for called, entered, name in ROW.findall(part)]
        assert len(rows) == modules and sum(called for called, _, _ in rows) == calls
        assert sum(entered for _, entered, _ in rows) == changes + 1, "the first module is come to from none"
        assert all(1 <= entered <= called for called, entered, _ in rows)
        assert {"router.http.client", "router.http.upstream", "statestore.redis.wire"} < {name for *_, name in rows}
        figures.append((modules, calls, changes))
    assert all(written < settled for written, settled in zip(*figures, strict=True))
    assert "router.answers.machine" not in until_written and "router.answers.machine" in until_settled
