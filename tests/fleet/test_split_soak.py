"""A few hundred split requests while instances die: nothing is lost, nothing is left over, counts are exact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ports import ports_in_a_row

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "split_soak.py"


def test_nothing_is_lost_or_left_over_while_instances_of_either_side_die() -> None:
    command = [sys.executable, str(SOAK), "--requests", "250", "--kills", "6", "--port", str(ports_in_a_row(8))]

    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=SOAK.parents[1])

    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost: 0; left over: nothing" in done.stdout
