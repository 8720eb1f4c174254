"""Calls of one process over one connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from statestore.errors import StoreUnavailableError
from statestore.redis.calls import BatchedCalls
from tests.statestore.scripted_server import ScriptedServer, connections_to, scripted_server


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as scripted:
        yield scripted


@pytest.fixture
async def calls(server: ScriptedServer) -> AsyncIterator[BatchedCalls]:
    made = BatchedCalls(server.connections({"password": "secret"}), {}, 2.0)
    yield made
    await made.close()


async def test_callers_that_come_while_it_connects_share_the_attempt(
    server: ScriptedServer, calls: BatchedCalls
) -> None:
    await asyncio.gather(*(calls.command("PING") for _ in range(10)))

    assert [command[0] for command in server.commands] == [b"AUTH", b"CLIENT"] + [b"PING"] * 10


async def test_a_caller_that_gives_up_does_not_take_the_attempt_from_the_others(
    server: ScriptedServer, calls: BatchedCalls
) -> None:
    leaver, stayer = (asyncio.ensure_future(calls.command("PING")) for _ in range(2))
    await asyncio.sleep(0)

    leaver.cancel()

    assert await asyncio.wait_for(stayer, 60) == b"OK"


async def test_once_closed_it_stays_closed(server: ScriptedServer, calls: BatchedCalls) -> None:
    await calls.command("PING")
    await calls.close()

    with pytest.raises(StoreUnavailableError):
        await asyncio.sleep(0.01)
        await calls.command("PING")


@pytest.mark.parametrize("waiting", [2, 3])
async def test_at_the_limit_a_transaction_leaves_whole_or_not_at_all(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    calls = BatchedCalls(connections_to(int(valkey_url.rpartition(":")[2].partition("/")[0])), {}, 2.0)
    await calls.command("PING")
    monkeypatch.setattr("statestore.redis.wire.MAX_IN_FLIGHT", 3)

    others = [calls.command("PING") for _ in range(waiting)]
    together = await asyncio.gather(calls.together([("SET", "k", "v"), ("GET", "k")]), return_exceptions=True)
    await asyncio.gather(*others)
    kept = await calls.command("GET", "k")

    if waiting < 3:
        assert (together, kept) == ([[b"OK", b"v"]], b"v")
    else:
        assert (type(together[0]), kept) == (StoreUnavailableError, None)
    await calls.close()
