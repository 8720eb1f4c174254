"""`dualmap top` over a real fleet, on a real terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time

from tests.fleet.fleet_process import Fleet


def test_once_prints_the_fleet_and_a_terminal_is_redrawn_until_q(fleet: Fleet) -> None:
    fleet.placement("a prompt that is counted")

    printed = fleet.dualmap("top", "--once", "--store.url", fleet.store_url)

    assert "instance-1" in printed
    assert "4/4 ready" in " ".join(printed.split())

    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dualmap", "top", "--interval-s", "0.2", "--store.url", fleet.store_url],
        stdin=other_end, stdout=other_end, stderr=other_end, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(other_end)
    try:
        seen, deadline_s = b"", time.monotonic() + 60
        while b"q quit" not in seen and time.monotonic() < deadline_s:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 65536)
        assert b"instance-4" in seen
        os.write(terminal, b"hq")
        while process.poll() is None and time.monotonic() < deadline_s:
            if select.select([terminal], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # its other end is closed once the process has ended
                    os.read(terminal, 65536)
        assert process.poll() == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
