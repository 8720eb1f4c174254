"""JSON values as an engine understands them: by the lax rules of pydantic, with which vLLM reads its requests.

Clients send ``"100"``, ``1024.0`` or ``"true"``, and engines serve them. None is whatever else a field holds: it is the
engine's to refuse, and nothing is known from it here.
"""

from __future__ import annotations

import re
from typing import Any, Final

_MAX_DIGITS: Final = 4300
_LEADING_ZEROS: Final = re.compile(r"\A([+-]?)0[0_]*(?=[0-9])")
"""Zeros that pydantic drops before it reads the rest, with any underscores among them: ``0__50`` is 50. It takes a
minus behind them as well, which is left out here: no engine accepts a negative count."""
_WHOLE_NUMBER: Final = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")
_MAX_WHOLE_FLOAT: Final = 2.0**63

_FLAGS: Final = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


def lax_int(value: Any) -> int | None:
    """A whole number, or what counts as one."""
    if value is None:
        return None
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE_FLOAT else None
    if isinstance(value, str):
        number = _LEADING_ZEROS.sub(r"\1", value.strip())
        whole = number.partition(".")[0]
        if len(whole) <= _MAX_DIGITS and _WHOLE_NUMBER.fullmatch(number):
            return int(whole)
    return None


def lax_bool(value: Any) -> bool | None:
    """True or false, or what counts as one."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    return _FLAGS.get(value.lower()) if isinstance(value, str) else None
