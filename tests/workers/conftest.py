"""What the tests of the workers share: a clock that only moves when told, a store that can go away."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.errors import StoreError, StoreUnavailableError
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.workers.loop import LoopContext
from dualmap.workers.metrics import WorkerMetrics
from tests.support.placements import placement

AddInstance = Callable[..., Awaitable[None]]
Reserve = Callable[..., Awaitable[PlaceStatus]]


class FakeClock:
    """Monotonic seconds that move by ``advance``; sleepers wake in order of their times."""

    def __init__(self) -> None:
        self._now_s = 1_000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0
        self.naps_s: list[float] = []

    def monotonic_s(self) -> float:
        return self._now_s

    def now_ms(self) -> int:
        """The store's clock, in step with this one."""
        return round(self._now_s * 1000)

    async def sleep(self, delay_s: float) -> None:
        self.naps_s.append(delay_s)
        self._count += 1
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + delay_s, self._count, wake))
        await wake

    def jump(self, delta_s: float) -> None:
        """Time passes and no task runs, as for a suspended process."""
        self._now_s += delta_s

    async def advance(self, delta_s: float) -> None:
        """Let time pass, running each task that wakes meanwhile."""
        until_s = self._now_s + delta_s
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until_s:
            due_s, _, wake = heapq.heappop(self._sleepers)
            if wake.done():
                continue
            self._now_s = max(self._now_s, due_s)
            wake.set_result(None)
            await settle()
        self._now_s = max(self._now_s, until_s)
        await settle()


async def settle() -> None:
    """Let every task run until all of them wait for something."""
    for _ in range(30):
        await asyncio.sleep(0)


class FlakyPool:
    """A pool that can be out of reach: every call then fails as a dead connection does, unless told otherwise."""

    def __init__(self, pool: PoolStore) -> None:
        self.name = pool.name
        self.away = False
        self.error: StoreError = StoreUnavailableError("the store is away")
        self.calls: list[str] = []
        self._pool = pool

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append(method)
            if self.away:
                raise self.error
            return await getattr(self._pool, method)(*arguments, **named)

        return call


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics()


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap")


@pytest.fixture
async def store(clock: FakeClock, scheduling: SchedulingSettings) -> AsyncIterator[MemoryStore]:
    memory = MemoryStore(scheduling, now_ms=clock.now_ms)
    yield memory
    await memory.close()


@pytest.fixture
def pool(store: MemoryStore) -> PoolStore:
    return store.pool("default")


@pytest.fixture
def context(clock: FakeClock, metrics: WorkerMetrics) -> Iterator[LoopContext]:
    yield LoopContext("default", clock, metrics, random.Random(7), tick_timeout_s=5.0, backoff_max_s=2.0)


@pytest.fixture
def flaky(pool: PoolStore) -> FlakyPool:
    return FlakyPool(pool)


@pytest.fixture
def add_instance(pool: PoolStore) -> AddInstance:
    """Enter an instance (ready unless told otherwise): ``await add_instance("a", dispatch_window_tokens=1000)``."""

    async def add(instance_id: str, state: InstanceState = InstanceState.READY, **figures: Any) -> None:
        url = figures.pop("url", f"http://{instance_id}")
        await pool.put_instance(InstanceSpec(instance_id, url, **figures))
        await pool.set_instance_state(instance_id, state)

    return add


@pytest.fixture
def order(scheduling: SchedulingSettings) -> QueueOrder:
    return queue_order_of(scheduling)


@pytest.fixture
def reserve(pool: PoolStore, order: QueueOrder) -> Reserve:
    """Reserve ``tokens`` on an instance: ``await reserve("r1", "a", 5000, other="b")``."""

    async def ask(request_id: str, instance_id: str, tokens: int = 1000, **fields: Any) -> PlaceStatus:
        fields = {"replica_id": "router-1", "slo_ms": 5000, **fields}
        fields["rank_ms"] = order.rank_ms(fields["slo_ms"])
        reply = await pool.place(placement(request_id, instance_id, tokens, **fields))
        return reply.status

    return ask


@pytest.fixture
async def fence(pool: PoolStore) -> int:
    """The fencing number of a leadership that outlasts the test."""
    lease = await pool.acquire_lease("the-leader", 10_000_000)
    assert lease is not None
    return lease.fence


@pytest.fixture
def value(metrics: WorkerMetrics) -> Callable[..., float]:
    """A sample of the worker's metrics: ``value("dualmap_worker_leader", pool="default")``; 0 if not there."""

    def read(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(name, {"pool": "default", **labels}) or 0.0

    return read


class ScriptedServer:
    """An HTTP server whose answers a test writes: path to (status, body), to a pause, or to a dropped connection."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str] | float | None] = {"/health": (200, "")}
        self.requests: list[tuple[str, bytes]] = []
        self.heads: list[str] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"

    async def drop_connections(self) -> None:
        """Close every open connection, as a restart of the process does."""
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.drop_connections()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head.decode())
        path = head.split(b" ", 2)[1].decode()
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0)
        self.requests.append((path, await reader.readexactly(length)))
        answer = self.answers.get(path, (404, ""))
        if answer is None:
            return False
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return False
        status, body = answer
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        return True


@pytest.fixture
async def servers() -> AsyncIterator[Callable[[], Awaitable[ScriptedServer]]]:
    """Start scripted servers: ``server = await servers()``; stopped after the test."""
    started: list[ScriptedServer] = []

    async def start() -> ScriptedServer:
        server = ScriptedServer()
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.stop()


@pytest.fixture
def eventually() -> Callable[..., Awaitable[Any]]:
    """Poll a condition to its deadline and give its value: ``await eventually(lambda: worker.lease)``."""

    async def poll(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            assert asyncio.get_running_loop().time() < deadline_s, "the condition never came true"
            await asyncio.sleep(0.01)

    return poll
