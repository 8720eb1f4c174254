"""A child process ends with its parent, however the parent ends.

The parent holds the write end of a pipe and passes on the read end: the kernel closes the pipe when the parent is
gone, even after ``kill -9``. Works on Linux and macOS.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping

PARENT_PIPE_VARIABLE = "DUALMAP_PARENT_PIPE"
_GRACE_S = 10.0


def end_with_parent(environment: Mapping[str, str]) -> None:
    """Watch the pipe named in the environment, if any; terminate this process cleanly when it closes."""
    if descriptor := environment.get(PARENT_PIPE_VARIABLE):
        threading.Thread(target=_watch, args=(int(descriptor),), name="parent-watch", daemon=True).start()


def _watch(descriptor: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written: this returns at end of file
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
