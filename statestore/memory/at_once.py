"""The calls of a pool in memory without an event loop: they never wait, so each has its answer when it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AtOnce:
    """Called as a ``PoolStore`` is; returns what that would be awaited for."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._pool, name)

        def answer(*arguments: Any, **named: Any) -> Any:
            told = call(*arguments, **named)
            if not hasattr(told, "send"):
                return told
            try:
                told.send(None)
            except StopIteration as done:
                return done.value
            told.close()
            raise RuntimeError(f"{name} waits, which a call without an event loop cannot")

        self.__dict__[name] = answer
        return answer
