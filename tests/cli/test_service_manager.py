"""What a service manager is told: that the process serves, and that its event loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualmap.cli.service_manager import ServiceManager

DEADLINE_S = 60.0


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    """The manager's end, under a short name as a socket's path has to be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(Path(folder) / "notify"))
        end.settimeout(DEADLINE_S)
        yield end


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), **more}


async def test_the_manager_is_told_that_the_loop_runs_for_as_long_as_it_does(manager: socket.socket) -> None:
    async with ServiceManager(environment(manager, WATCHDOG_USEC="30000")).watched():
        told = [await asyncio.to_thread(manager.recv, 100) for _ in range(3)]
        manager.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while manager.recv(100):
                pass
        time.sleep(0.1)  # noqa: ASYNC251 - a loop that hangs
        with pytest.raises(BlockingIOError):
            manager.recv(100)

    assert told == [b"WATCHDOG=1"] * 3


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}])
async def test_a_manager_that_watches_nobody_or_another_is_told_only_of_readiness(
    manager: socket.socket, watchdog: dict[str, str]
) -> None:
    told = ServiceManager(environment(manager, **watchdog))
    async with told.watched():
        told.ready()
        await asyncio.sleep(0.02)

    assert manager.recv(100) == b"READY=1"
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)


async def test_without_a_manager_nothing_is_told() -> None:
    nobody = ServiceManager({"WATCHDOG_USEC": "1000"})
    async with nobody.watched():
        nobody.ready()


async def test_a_manager_that_is_gone_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({"NOTIFY_SOCKET": "/nowhere/notify"}).ready()

    assert "READY=1" in caplog.text


@pytest.mark.parametrize("command", [("router", "--router.port", "0"), ("worker",)])
def test_routers_and_workers_say_when_they_serve(
    command: tuple[str, ...], manager: socket.socket, valkey_url: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dualmap", *command, "--store.url", valkey_url],
        env=environment(manager, PATH=os.environ["PATH"], WATCHDOG_USEC="200000"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        told = {manager.recv(100)}
        while len(told) < 2:
            told.add(manager.recv(100))
    finally:
        process.kill()
        process.wait()

    assert told == {b"READY=1", b"WATCHDOG=1"}
