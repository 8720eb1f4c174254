"""The adapters of an instance by their last use, as scripts keep them (``statestore/lua/shared/adapters.lua``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from dualmap.scheduling.state.request import StoredRequest

RUNNING_SCORE: Final = 1 << 52
"""The score of an adapter with running requests is their number above this; that of another is its last use in ms."""


def running_of(score: float) -> int:
    """Requests of an adapter that run, by its score."""
    return max(0, int(score) - RUNNING_SCORE)


def mended_uses(scores: Mapping[bytes, bytes], sent: Iterable[StoredRequest], now_ms: int) -> dict[bytes, int]:
    """The adapters whose number of running requests is wrong, by the requests that an instance was sent, each with its
    right score. One that runs and is not listed was forgotten by its instance, or is not followed there."""
    runs = Counter(each.adapter.encode() for each in sent if each.adapter)
    wrong = {name: runs[name] for name, score in scores.items() if running_of(float(score)) != runs[name]}
    return {name: RUNNING_SCORE + count if count else now_ms for name, count in wrong.items()}
