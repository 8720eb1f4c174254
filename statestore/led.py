"""The pool's store as its leader's rounds use it: every write carries the fence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from scheduling.scale_record import ScaleRecord
from statestore.pool import PoolStore


def _is_fenced(method: Any) -> bool:
    fence = inspect.signature(method).parameters.get("fence")
    return fence is not None and fence.kind is fence.KEYWORD_ONLY


_FENCED = frozenset(name for name, method in inspect.getmembers(PoolStore, inspect.isfunction) if _is_fenced(method))


class LedPool:
    """The fleet of ``scheduling.leader_jobs``: the store's own calls, with the fence where they take one.

    Each call returns what the store's returns: an awaitable of a ``PoolStore``, the answer itself of ``AtOnce``.
    """

    def __init__(self, pool: Any, fence: int) -> None:
        self._pool = pool
        self._fence = fence

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._pool, name)
        return partial(call, fence=self._fence) if name in _FENCED else call


class LedScaling(LedPool):
    """The fleet of ``scheduling.scale_job``."""

    def __init__(self, pool: Any, fence: int, *, now: Callable[[], Any], actuate: Callable[[ScaleRecord], Any]) -> None:
        """``now`` gives a ``FleetNow``, ``actuate`` an ``ActuatorReply`` or None while the actuator works."""
        super().__init__(pool, fence)
        self.now = now
        self.actuate = actuate
