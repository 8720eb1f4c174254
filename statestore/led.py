"""The pool's store as its leader's rounds use it: every write carries the fence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from statestore.base import PoolStore
from statestore.memory.state import PoolState

_FENCED = frozenset(
    name
    for name, method in inspect.getmembers(PoolStore, inspect.isfunction)
    if "fence" in inspect.getfullargspec(method).kwonlyargs
)


class LedPool:
    """The fleet of ``scheduling.leader_jobs``: the store's own calls, with the fence where they take one.

    Each call returns what the store's returns: an awaitable of a ``PoolStore``, the answer itself of a ``PoolState``.
    """

    def __init__(self, pool: PoolStore | PoolState, fence: int, **more: Callable[..., Any]) -> None:
        """``more`` are calls that the store does not have: ``now`` and ``actuate`` of ``scheduling.scale_job``."""
        self._pool = pool
        self._fence = fence
        vars(self).update(more)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._pool, name)
        return partial(call, fence=self._fence) if name in _FENCED else call
