"""The store of a fleet on one machine: private, and there again after it died."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from dualmap.cli.private_store import private_store

DEADLINE_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a short name, as a socket's path has to fit."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


async def test_nobody_else_on_this_machine_reaches_it(folder: Path) -> None:
    async with private_store(folder, print) as url:
        assert url == f"unix://{folder}/store.sock"
        with redis.Redis.from_url(url) as client:
            assert client.config_get("port") == {"port": "0"}
        assert (folder / "store.sock").stat().st_mode & 0o077 == 0


async def test_a_store_that_died_is_there_again_at_the_same_place(folder: Path) -> None:
    said: list[str] = []
    async with private_store(folder, said.append) as url:
        os.kill(int((folder / "store.pid").read_text()), signal.SIGKILL)

        deadline_s = time.monotonic() + DEADLINE_S
        while not (said and answers(url)):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)

    assert said == ["the store ended; starting an empty one in its place"]
    assert not answers(url)
