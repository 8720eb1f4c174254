"""Ports for tests that need some in a row: below those that the kernel gives to processes that ask for any, and in
places of their own for each process that runs tests on this machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

PORTS_EACH = 50
_PLACES = 20
_DISTANCE = 1000
"""Uses have bases so far apart: PORTS_EACH * _PLACES."""


def first_port(base: int) -> int:
    """Where this process looks; ``base`` is the use's, so that uses do not meet either."""
    return base + PORTS_EACH * _own_place()


@cache
def _own_place() -> int:
    """A number that no other process has while this one lives: its lock ends with the process, however it ends."""
    for place in range(_PLACES):
        descriptor = os.open(Path(tempfile.gettempdir(), f"dualmap-test-ports-{place}"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return place
    raise OSError(f"{_PLACES} processes run tests already; wait until one has ended")


assert PORTS_EACH * _PLACES <= _DISTANCE
