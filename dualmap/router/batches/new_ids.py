"""Ids of files and batches: random, so that no client guesses those of others."""

from __future__ import annotations

import re
import secrets
from typing import Final

_ID: Final = re.compile(r"(file-|batch_)[0-9a-f]{24}")


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


def is_id(text: str) -> bool:
    """Whether a text may be an id that was given here."""
    return _ID.fullmatch(text) is not None
