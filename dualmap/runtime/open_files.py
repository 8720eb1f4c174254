"""How many files this process may have open; every connection is one."""

from __future__ import annotations

import errno
import math
import resource
from typing import Final

SHORTAGE_LOG_S: Final = 10.0
"""A shortage of open files is logged this often at most."""


def raise_open_files_limit() -> int:
    """Raise the soft limit, often 1,024, to the hard one as far as the system allows; returns the limit in effect.

    Every serving process calls it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS has a ceiling below its hard limit
        return soft
    return hard


def out_of_files(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, says that this process or its machine has no file descriptor left."""
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    if isinstance(error, BaseExceptionGroup) and any(map(out_of_files, error.exceptions)):
        return True
    return out_of_files(error.__cause__ or error.__context__)


class ShortageLog:
    """When a shortage, which every failed connection reports again, is logged again."""

    def __init__(self) -> None:
        self._logged_s = -math.inf

    def due(self, now_s: float) -> bool:
        """Whether to log now; the next time is SHORTAGE_LOG_S later."""
        if now_s - self._logged_s < SHORTAGE_LOG_S:
            return False
        self._logged_s = now_s
        return True
