"""Logging of the serving commands: one line per event on standard error, with time and logger."""

from __future__ import annotations

import logging


def log_to_stderr(level: str) -> None:
    """Configure the process's logging; call once, at start."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True)
