"""The campaign of hostile tenants, in small: over three replicas and a kill nothing passes a limit or a right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)
def test_nothing_passes_a_limit_or_a_right() -> None:
    command = [
        *(sys.executable, "-m", "benchmarks.hostile_tenants", "--requests", "250", "--clients", "10"),
        *("--kill-every", "90", "--quota-requests", "10", "--quota-tokens", "2500"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False, cwd=ROOT)

    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    checks = {line["check"]: line["past"] for line in lines if "check" in line}
    assert len(checks) == 8 and not any(checks.values())
    limited = {line["tenant"]: line["refused"] for line in lines if "quota" in line}
    assert len(limited) == 3 and all(limited.values()), "a limit was never reached, so it was not tested"
