"""First tokens and ends of requests that share a call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from statestore.errors import StoreUnavailableError
from statestore.redis import RedisStore
from statestore.redis.releases import MAX_RELEASES, Releases
from statestore.settings import StoreSettings
from tests.statestore.samples import SCHEDULING, assert_sums_hold, instance, place


class Server:
    """Does nothing for anybody, and notes what it is called with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[list[Any]] = []
        self.error = error

    async def run(self, *parts: Any) -> list[Any]:
        self.calls.append([*parts[::5]])
        if self.error is not None:
            raise self.error
        return [0] * (len(parts) // 5)


def release(request_id: str) -> tuple[str, str, str, str, str]:
    return (request_id, "", "", "", "")


async def test_those_of_one_turn_share_a_call_up_to_a_limit() -> None:
    server = Server()
    releases = Releases(server.run)
    names = [f"r{number}" for number in range(MAX_RELEASES + 1)]

    told = await asyncio.gather(*[releases.add(release(name)) for name in names])
    await releases.add(release("later"))

    assert server.calls == [names[:MAX_RELEASES], names[MAX_RELEASES:], ["later"]]
    assert [each.done for each in told] == [False] * len(names)


async def test_an_error_reaches_all_who_wait() -> None:
    releases = Releases(Server(StoreUnavailableError("away")).run)

    told = await asyncio.gather(*[releases.add(release(name)) for name in "ab"], return_exceptions=True)

    assert [str(each) for each in told] == ["away", "away"]


async def test_one_who_gave_up_takes_nothing_from_the_others() -> None:
    server = Server()
    releases = Releases(server.run)
    given_up, other = releases.add(release("a")), releases.add(release("b"))

    given_up.cancel()

    assert not (await other).done
    assert server.calls == [["a", "b"]]


@pytest.mark.parametrize("batched", [True, False])
async def test_on_a_server_each_is_released_and_the_last_of_an_instance_is_told_its_queue(
    valkey_url: str, batched: bool
) -> None:
    store = RedisStore(StoreSettings(url=valkey_url), scheduling=SCHEDULING, batched=batched)
    await store.open()
    pool = store.pool("default")
    for name in ("a", "b"):
        await pool.put_instance(instance(name, max_running_requests=2))
    for request_id, name in (("1", "a"), ("2", "a"), ("3", "b"), ("held", "a")):
        await place(pool, request_id, name)

    told = await asyncio.gather(
        pool.first_token("1", "a"), pool.finish("1"), pool.finish("2"), pool.finish("3"), pool.finish("nobody's")
    )

    assert [each.done for each in told] == [True, True, True, True, False]
    assert [each.queue is not None for each in told] == [False, False, True, False, False]
    queue = told[2].queue
    assert queue is not None
    assert ([entry.request_id for entry in queue.entries], queue.load.running_requests) == (["held"], 0)
    await assert_sums_hold(pool)
    await store.close()
