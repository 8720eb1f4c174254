"""How many files this process may have open; every connection is one."""

from __future__ import annotations

import resource


def raise_open_files_limit() -> int:
    """Raise the soft limit, often 1,024, to the hard one as far as the system lets; returns the limit in effect.

    It stands here because this is the lowest room that touches the system; every serving process calls it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS has a ceiling below its hard limit
        return soft
    return hard
