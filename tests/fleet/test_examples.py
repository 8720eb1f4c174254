"""The examples against a real fleet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fleet.fleet_process import Fleet

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_openai_client_is_told_where_its_requests_went(fleet: Fleet) -> None:
    words = [sys.executable, str(EXAMPLES / "openai_client.py"), f"{fleet.endpoint}/v1"]

    done = subprocess.run(words, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert " on instance-" in lines[0]
    assert lines[-2].endswith("wanted in 10000 ms")
    assert lines[-1].endswith("/ui")
