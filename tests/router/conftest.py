"""What the router's tests share: hand-driven time, and replicas over an in-memory store."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from dualmap.router.app import create_app
from dualmap.router.inference_request import SCHEDULED_PATHS, InferenceRequest
from dualmap.router.prompt import sent_prompt
from dualmap.router.runtime import Runtime
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.request.breaker import BreakerRule
from dualmap.scheduling.request.retry_budget import RetryBudget
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.memory import MemoryStore
from tests.support.placements import placement


class ManualClock:
    """Time that passes only when told: sleepers and timers wake in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._wakes: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def monotonic_s(self) -> float:
        return self.now_s

    def now_ms(self) -> int:
        return round(self.now_s * 1000)

    async def sleep(self, delay_s: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self.call_later(delay_s, lambda: None if woken.done() else woken.set_result(None))
        await woken

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(callback)
        heapq.heappush(self._wakes, (self.now_s + delay_s, next(self._order), timer.fire))
        return timer

    async def advance(self, by_s: float) -> None:
        """Let time pass, and everything that is woken by it run to its next wait."""
        until_s = self.now_s + by_s
        await settle()
        while self._wakes and self._wakes[0][0] <= until_s:
            at_s, _, wake = heapq.heappop(self._wakes)
            self.now_s = max(self.now_s, at_s)
            wake()
            await settle()
        self.now_s = until_s


class ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


async def settle(rounds: int = 20) -> None:
    """Let every task that can run do so."""
    for _ in range(rounds):
        await asyncio.sleep(0)


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
    def __init__(self, tampered: Tampered, pool: Any) -> None:
        self._tampered = tampered
        self._pool = pool
        self.name = pool.name

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._pool, name)
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


class Toolbox:
    """The helpers of this file, for test modules that cannot import it."""

    break_after = staticmethod(break_after)
    no_retries = staticmethod(no_retries)

    spec = staticmethod(spec)
    request = staticmethod(request)
    placement = staticmethod(placement)
    settle = staticmethod(settle)
    Tampered = Tampered


@pytest.fixture
def tools() -> Toolbox:
    return Toolbox()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap", block_tokens=16)


@pytest.fixture
def store(clock: ManualClock, scheduling: SchedulingSettings) -> MemoryStore:
    return MemoryStore(scheduling, now_ms=clock.now_ms)


StartRuntime = Callable[..., Awaitable[Runtime]]


@pytest.fixture
async def start_runtime(
    clock: ManualClock, scheduling: SchedulingSettings, store: MemoryStore
) -> AsyncIterator[StartRuntime]:
    """Starts replicas over the one store; all stopped in the end. ``through`` wraps the store that a replica
    sees; other keywords are router settings."""
    started: list[Runtime] = []

    async def start(
        *,
        instances: tuple[InstanceSpec, ...] = (),
        pools: tuple[PoolSettings, ...] = (PoolSettings(),),
        through: Callable[[MemoryStore], Any] = lambda store: store,
        **settings: Any,
    ) -> Runtime:
        for pool in pools:
            for instance in instances:
                await store.pool(pool.name).put_instance(instance)
        settings.setdefault("replica_id", f"replica-{len(started) + 1}")
        runtime = Runtime(
            RouterSettings(**settings), scheduling, through(store), pools, clock=clock, call_later=clock.call_later
        )
        await runtime.start()
        await settle()
        started.append(runtime)
        return runtime

    yield start
    for runtime in started:
        await runtime.stop()


@pytest.fixture
async def client_of() -> AsyncIterator[Callable[..., httpx.AsyncClient]]:
    """HTTP clients of replicas' operation sides, without a socket."""
    clients: list[httpx.AsyncClient] = []

    def client(runtime: Runtime, **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(create_app(runtime), raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://replica", **options))
        return clients[-1]

    yield client
    for each in clients:
        await each.aclose()
