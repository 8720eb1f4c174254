"""The console that tables are printed on."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_PIPED_WIDTH = 400


def terminal() -> Console:
    """Standard output; a pipe has no width of its own, so tables have all their columns there. Texts are printed as
    they are: names that clients choose are among them."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPED_WIDTH if piped else None, markup=False)
