"""Instances, requests and replicas that the router's tests speak of."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from dualmap.router.prompts.inference_request import SCHEDULED_PATHS, InferenceRequest
from dualmap.router.prompts.prompt import sent_prompt
from dualmap.router.replica.runtime import Runtime
from dualmap.scheduling.request.breaker import BreakerRule
from dualmap.scheduling.request.retry_budget import RetryBudget
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool.changes import Changes
from tests.support.manual_clock import settle
from tests.support.placements import placement

__all__ = ["Tampered", "break_after", "no_retries", "placement", "request", "settle", "spec"]


def spec(instance_id: str, **changes: Any) -> InstanceSpec:
    fields: dict[str, Any] = {
        "url": f"http://{instance_id}.test:8000",
        "state": InstanceState.READY,
        "prefill_tokens_per_s": 1000.0,
        "dispatch_window_tokens": 1000,
    }
    return InstanceSpec(instance_id, **{**fields, **changes})


_numbers = itertools.count(1)


def request(prompt: str = "hello", *, body: Any = None, **changes: Any) -> InferenceRequest:
    """A completions request, or one with the ``body`` of its path; a fresh id each time."""
    path = changes.get("path", "/v1/completions")
    fields: dict[str, Any] = {
        "request_id": f"request-{next(_numbers)}",
        "model": "default",
        "path": "/v1/completions",
        "prompt": sent_prompt(path, body or {"prompt": prompt}) if path in SCHEDULED_PATHS else None,
        "slo_s": None,
        "stream": True,
    }
    return InferenceRequest(**{**fields, **changes})


class Tampered:
    """A store that lets a test stand between a replica and one pool: ``before[call]`` runs first and may raise or
    answer; ``after[call]`` runs behind a call."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.before: dict[str, Callable[..., Awaitable[Any]]] = {}
        self.after: dict[str, Callable[..., Awaitable[None]]] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def pool(self, name: str) -> Any:
        return TamperedPool(self, self._store.pool(name))


class TamperedPool:
    """A pool, or a part of one."""

    def __init__(self, tampered: Tampered, pool: Any) -> None:
        self._tampered = tampered
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._pool, name)
        if isinstance(real, Changes):
            return TamperedPool(self._tampered, real)
        if not asyncio.iscoroutinefunction(real):
            return real

        async def call(*arguments: Any, **keywords: Any) -> Any:
            tampered = self._tampered
            tampered.calls.append(name)
            if name in tampered.before:
                answer = await tampered.before[name](*arguments, **keywords)
                if answer is not None:
                    return answer
            answer = await real(*arguments, **keywords)
            if name in tampered.after:
                await tampered.after[name](*arguments, **keywords)
            return answer

        return call


def break_after(runtime: Runtime, faults: int) -> None:
    """Breakers of the default pool open after so many faults in a row."""
    runtime.pools.pools["default"].evidence.breakers._rule = BreakerRule(fault_limit=faults)


def no_retries(runtime: Runtime) -> None:
    """There is no budget for retries."""
    runtime.pools.pools["default"].evidence.retries = RetryBudget(0.0, 0.0, 0.0)
