"""The adapters of an instance by their last use, as scripts keep them (``statestore/lua/shared/adapters.lua``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.values import value

RUNNING_SCORE: Final = 1 << 52
"""The score of an adapter with running requests is their number above this; that of another is its last use in ms."""


@value
class AdapterUse:
    """An adapter in an instance's order."""

    adapter: str
    running: int
    """Its requests that run there."""
    used_ms: int
    """Time of its last use; 0 while some run."""


def uses_from(flat: Sequence[bytes]) -> tuple[AdapterUse, ...]:
    """An instance's adapters, the last used first, from what the store lists in the order of their scores."""
    found = []
    for name, score in zip(flat[::2], map(float, flat[1::2]), strict=True):
        running = running_of(score)
        found.append(AdapterUse(name.decode(errors="replace"), running, 0 if running else int(score)))
    return tuple(reversed(found))


def running_of(score: float) -> int:
    """Requests of an adapter that run, by its score."""
    return max(0, int(score) - RUNNING_SCORE)


def mended_uses(scores: Mapping[bytes, bytes], sent: Iterable[StoredRequest], now_ms: int) -> dict[bytes, int]:
    """The adapters whose number of running requests is wrong, by the requests that an instance was sent, each with its
    right score. One that runs and is not listed was forgotten by its instance, or is not followed there."""
    runs = Counter(each.adapter.encode() for each in sent if each.adapter)
    wrong = {name: runs[name] for name, score in scores.items() if running_of(float(score)) != runs[name]}
    return {name: RUNNING_SCORE + count if count else now_ms for name, count in wrong.items()}
