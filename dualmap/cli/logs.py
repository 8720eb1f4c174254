"""Logging of the serving commands: one line per event on standard error, as text or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message`` and, of an error, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, *, style: str = "text", levels: Mapping[str, str] | None = None) -> None:
    """Configure the process's logging; call once, at start. ``style`` is ``text`` or ``json``; ``levels`` are those of
    single packages or modules, ``{"statestore": "debug"}``; the name of one of ours may leave out ``dualmap.``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if style == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, own_level in (levels or {}).items():
        for logger in (name, f"dualmap.{name}"):
            logging.getLogger(logger).setLevel(own_level.upper())
