"""Ports for tests that need some in a row: below those that the kernel gives to processes that ask for any, and in
places of their own for the processes of one test run."""

from __future__ import annotations

import os

PORTS_EACH = 100


def first_port(base: int) -> int:
    """Where this process looks; ``base`` is the use's, so that uses do not meet either."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return base + PORTS_EACH * int(worker.removeprefix("gw"))
