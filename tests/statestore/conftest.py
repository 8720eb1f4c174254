"""The store contract's backends: one suite, every implementation."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis
from fakeredis import FakeServer, TcpFakeServer

from scheduling.settings import SchedulingSettings
from statestore.connect import Store
from statestore.memory import MemoryStore
from statestore.pool import PoolStore
from statestore.redis import RedisStore
from statestore.settings import StoreSettings
from tests.statestore.samples import SCHEDULING, HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


class BusyTcpFakeServer(TcpFakeServer):
    request_queue_size = 64  # of connections that are not accepted yet


@pytest.fixture(scope="session")
def fakeredis_server() -> Iterator[TcpFakeServer]:
    """fakeredis behind a real socket, so that the product's own connection and scripts meet it."""
    server = BusyTcpFakeServer(("127.0.0.1", 0), server_type="valkey")
    server.RequestHandlerClass = _keeping_connections(server.RequestHandlerClass)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def _keeping_connections(handler: type[Any]) -> type[Any]:
    """The handler, answering an error and reading on: as it comes it closes the connection after every error."""

    class KeepingHandler(handler):
        def setup(self) -> None:
            super().setup()
            client = self.current_client
            read_response = client.read_response

            def read_or_error() -> Any:
                try:
                    return read_response()
                except redis.ResponseError as error:
                    return error

            client.read_response = read_or_error

    return KeepingHandler


def redis_store(
    url: str,
    clock: Callable[[], int] | None,
    prefix: str = "dualmap",
    scheduling: SchedulingSettings = SCHEDULING,
) -> RedisStore:
    settings = StoreSettings(url=url, prefix=prefix, command_timeout_s=5.0)
    return RedisStore(settings, scheduling=scheduling, own_clock=clock)


@pytest.fixture
def scheduling() -> SchedulingSettings:
    """Of the store's pools; modules of other settings have a fixture of their own."""
    return SCHEDULING


@pytest.fixture(params=["memory", "valkey", "fakeredis"])
async def store(
    request: pytest.FixtureRequest, clock: HandClock, scheduling: SchedulingSettings
) -> AsyncIterator[Store]:
    """An open, empty store of each kind on the hand clock."""
    if request.param == "memory":
        opened: Store = MemoryStore(scheduling, now_ms=clock)
    elif request.param == "valkey":
        opened = redis_store(request.getfixturevalue("valkey_url"), clock, scheduling=scheduling)
    else:
        server = request.getfixturevalue("fakeredis_server")
        server.fake_server = FakeServer(server_type="valkey")
        url = f"redis://127.0.0.1:{server.server_address[1]}/0"
        opened = redis_store(url, clock, scheduling=scheduling)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def pool(store: Store) -> PoolStore:
    return store.pool("default")
