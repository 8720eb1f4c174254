"""The meaning of an instance's status for the request and for the instance: pure rules.

The client's own errors judge no instance. A status that may be either's fault is *disputed*: the request is tried on
another instance, and what that one answers decides. If all that were tried say the same, it is the answer.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final


class Verdict(StrEnum):
    BLAMELESS = "blameless"
    """Nothing is held against the instance: a success, an error that every instance would give, or an end that the
    fleet wanted. An answer of this verdict goes to the client as it is."""
    FAULT = "fault"
    """The instance failed."""
    BUSY = "busy"
    """The instance takes nothing now, and works."""
    DISPUTED = "disputed"
    """The fault is the instance's if its peers answer otherwise: it redirects, wants a key, or knows no such path."""


_BLAMELESS: Final = Verdict.BLAMELESS


_CLIENTS_OWN: Final = frozenset({400, 406, 409, 411, 412, 413, 414, 415, 416, 417, 422, 424, 428, 431})
_NOT_IMPLEMENTED: Final = frozenset({501, 505})
"""The request needs what no server of this kind does."""
_BUSY: Final = 429
_UNAVAILABLE: Final = 503

SHORTEST_PAUSE_S: Final = 1.0
"""An instance that is busy and names no time is left alone for this long."""
LONGEST_PAUSE_S: Final = 60.0


def judge_status(status: int, *, names_pause: bool = False) -> Verdict:
    """The verdict that an answer of this status gives; ``names_pause``: it says when to come back (``retry-after``)."""
    if status < 300 or status in _CLIENTS_OWN or status in _NOT_IMPLEMENTED:
        return _BLAMELESS
    if status == _BUSY or (status == _UNAVAILABLE and names_pause):
        return Verdict.BUSY
    return Verdict.FAULT if status >= 500 else Verdict.DISPUTED


def is_server_fault(status: int) -> bool:
    """Whether the status is an error of the server in any case: not one of the client's request."""
    return status >= 500 and status not in _NOT_IMPLEMENTED


def pause_s(named_s: float | None) -> float:
    """How long a busy instance is left alone that names this time, or none."""
    if named_s is None or math.isnan(named_s):
        return SHORTEST_PAUSE_S
    return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, named_s))
