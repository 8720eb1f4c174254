"""Counts as people write them: ``100k`` tokens, ``2M``, ``50_000_000``."""

from __future__ import annotations

import re
from decimal import Decimal

_AMOUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)(k|K|M|G|)")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}


def whole_amount(text: str) -> int:
    """The count of ``600``, ``50_000``, ``100k`` (thousands), ``1.5M`` (millions) or ``1G``. Raises ValueError."""
    found = _AMOUNT.fullmatch(text.strip())
    amount = Decimal(found[1].replace("_", "")) * _UNITS[found[2]] if found is not None else None
    if amount is None or amount != int(amount):
        raise ValueError(f"{text!r} is no whole number such as 600, 100k or 2M")
    return int(amount)
