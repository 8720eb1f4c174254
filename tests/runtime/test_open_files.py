"""A process takes all open files that it may have."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from dualmap.runtime.open_files import SHORTAGE_LOG_S, ShortageLog, out_of_files, raise_open_files_limit

_LOWERED = """
import resource
from dualmap.runtime.open_files import raise_open_files_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
assert raise_open_files_limit() == 128
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, 128)
assert raise_open_files_limit() == 128
"""


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    subprocess.run([sys.executable, "-c", _LOWERED], check=True, timeout=60)  # a hard limit cannot be raised again


def test_a_system_that_refuses_leaves_the_limit_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr("dualmap.runtime.open_files.resource.getrlimit", lambda _: (256, 1 << 63))
    monkeypatch.setattr("dualmap.runtime.open_files.resource.setrlimit", refuse)

    assert raise_open_files_limit() == 256


def test_a_shortage_is_found_behind_the_error_that_came_of_it() -> None:
    shortage = OSError(errno.EMFILE, "Too many open files")
    caused = RuntimeError("no connection")
    caused.__cause__ = ExceptionGroup("every address", [OSError(errno.ECONNREFUSED, "refused"), shortage])

    assert out_of_files(shortage) and out_of_files(OSError(errno.ENFILE, "in the whole machine"))
    assert out_of_files(caused)
    assert not out_of_files(OSError(errno.ECONNREFUSED, "refused")) and not out_of_files(None)


def test_a_shortage_is_told_at_once_and_then_now_and_then() -> None:
    log = ShortageLog()
    every_s = SHORTAGE_LOG_S

    told = [log.due(now_s) for now_s in (100.0, 100.1, 99.9 + every_s, 100.0 + every_s, 100.1 + every_s)]

    assert told == [True, False, False, True, False]
