"""Messages as they are published, also over connections that get lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest
import redis

from dualmap.statestore.redis.subscriber import Subscriber
from tests.statestore.scripted_server import ScriptedServer, connections_to, scripted_server

CHANNEL, MESSAGE = b"channel", b"message"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as scripted:
        yield scripted


async def until(condition: Callable[[], object]) -> None:
    """Poll to a deadline."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_after_a_lost_connection_messages_come_again_without_a_caller(server_url: str) -> None:
    subscriber = Subscriber(connections_to(urlsplit(server_url).port or 0))
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    subscriber.listen(CHANNEL, heard.put_nowait)
    with redis.Redis.from_url(server_url) as client:
        await until(lambda: client.publish(CHANNEL, MESSAGE))
        assert await asyncio.wait_for(heard.get(), 60) == MESSAGE
        while not heard.empty():
            heard.get_nowait()

        client.client_kill_filter(_type="pubsub")
        # Again and again: the server may count the killed connection as a receiver for a moment.
        await until(lambda: client.publish(CHANNEL, MESSAGE) and not heard.empty())
        assert heard.get_nowait() == MESSAGE
        await subscriber.close()
        await until(lambda: not client.publish(CHANNEL, MESSAGE))


@pytest.mark.parametrize("answers", [True, False])
async def test_a_server_that_says_nothing_is_asked_and_given_up_if_it_does_not_answer(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr("dualmap.statestore.redis.subscriber.RETRY_S", 0.05)
    subscribed = b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"
    pong = b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
    by_command = {b"SUBSCRIBE": subscribed, b"PING": pong if answers else None}
    server.answer = lambda command: by_command.get(command[0], b"+OK\r\n")
    subscriber = Subscriber(server.connections())
    subscriber.listen(CHANNEL, lambda message: None)

    await until(lambda: sum(command[0] == b"PING" for command in server.commands) >= 3)
    await subscriber.close()

    assert (len(server.writers) == 1) is answers
