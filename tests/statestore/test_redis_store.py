"""A store on Redis finds out about its server, and leaves alone what is not its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.statestore.errors import StoreConfigurationError, StoreError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.statestore.processes import node_port, running
from tests.statestore.samples import SCHEDULING, assert_sums_hold, finish, grant, instance, lead, place, record
from tests.statestore.scripted_server import scripted_server
from tests.support.ports import free_port

Allow = Callable[..., str]


@pytest.fixture
def allow(server_url: str) -> Iterator[Allow]:
    """URL of a user who may do no more than this."""
    with redis.Redis.from_url(server_url) as client:

        def set_user(*rules: str) -> str:
            client.execute_command("ACL", "SETUSER", "fleet", "reset", "on", ">secret", *rules)
            return server_url.replace("redis://", "redis://fleet:secret@")

        yield set_user
        client.execute_command("ACL", "DELUSER", "fleet")


async def until(condition: Callable[[], object]) -> None:
    """Poll to a deadline."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_documented_rights_are_enough(allow: Allow, caplog: pytest.LogCaptureFixture) -> None:
    url = allow("~dualmap:*", "resetchannels", "&dualmap:*", "+@all", "-@dangerous", "+info")
    store = RedisStore(StoreSettings(url=url), scheduling=SCHEDULING)
    try:
        await store.open()
        pool = store.pool("default")
        await pool.members.put_instance(instance("a"))
        assert (await place(pool, "r")).status == "dispatched"
        assert len((await pool.snapshot()).requests) == 1
    finally:
        await store.close()

    assert caplog.text == ""


async def test_a_server_that_keeps_its_facts_to_itself_is_a_store_with_a_warning(
    allow: Allow, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisStore(StoreSettings(url=allow("~*", "&*", "+@all", "-info")), scheduling=SCHEDULING)

    await store.open()
    await store.close()

    assert "is it Redis 6.2 or newer?" in caplog.text


@pytest.mark.parametrize(
    ("info", "refused"),
    [
        ("redis_version:5.0.14", True),
        ("redis_version:6.0.16", True),
        ("redis_version:6.2.0", False),
        ("redis_version:10.1.0", False),
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.0", False),
    ],
)
async def test_a_server_before_redis_6_2_is_refused(info: str, refused: bool) -> None:
    async with scripted_server() as server:
        server.answer = lambda command: b"$%d\r\n%b\r\n" % (len(info), info.encode())
        store = RedisStore(StoreSettings(url=f"redis://127.0.0.1:{server.port}/0"), scheduling=SCHEDULING)
        expected = pytest.raises(StoreConfigurationError, match="is too old") if refused else contextlib.nullcontext()

        with expected:
            await store.open()
        await store.close()


async def test_a_command_that_a_script_may_not_run_is_a_wrong_configuration(allow: Allow) -> None:
    store = RedisStore(StoreSettings(url=allow("~*", "&*", "+@all", "-hset")), scheduling=SCHEDULING)
    try:
        await store.open()
        with pytest.raises(StoreConfigurationError, match="allows this user too little"):
            await store.pool("default").members.put_instance(instance("a"))
    finally:
        await store.close()


async def test_a_sentinel_is_no_store(tmp_path: Path, binary: Path) -> None:
    port = free_port()
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text("sentinel monitor fleet 127.0.0.1 7777 1\n")
    with running(binary, tmp_path, str(configuration), "--sentinel", port=port):
        store = RedisStore(StoreSettings(url=f"redis://127.0.0.1:{port}/0"), scheduling=SCHEDULING)
        with pytest.raises(StoreConfigurationError, match=r"redis\+sentinel://HOST:PORT/MASTER"):
            await store.open()
        await store.close()


async def test_one_node_of_a_cluster_is_a_store_with_a_warning(
    tmp_path: Path, binary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = node_port()
    with running(binary, tmp_path, "--cluster-enabled", "yes", port=port):
        store = RedisStore(StoreSettings(url=f"redis://127.0.0.1:{port}/0"), scheduling=SCHEDULING)
        await store.open()
        await store.close()

    assert "use redis+cluster://" in caplog.text


async def test_a_channel_that_may_not_be_read_is_told_of_and_asked_for_on_the_same_connection(
    allow: Allow, server_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualmap.statestore.redis.subscriber.RETRY_S", 0.01)
    store = RedisStore(StoreSettings(url=allow("~*", "resetchannels", "+@all")), scheduling=SCHEDULING)
    await store.open()
    store.pool("default").on_grant("router-1", lambda grant: None)
    with redis.Redis.from_url(server_url) as client:
        channel = "dualmap:{default}:grants:router-1"
        await until(lambda: "polling alone" in caplog.text)
        connections = client.info("stats")["total_connections_received"]

        allow("~*", "&*", "+@all")
        await until(lambda: client.pubsub_numsub(channel)[0][1])
        assert client.info("stats")["total_connections_received"] == connections
    await store.close()
    assert channel in caplog.text


async def test_an_entry_of_a_queue_whose_request_was_deleted_by_hand_keeps_no_other_waiting(server_url: str) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING)
    await store.open()
    pool = store.pool("default")
    await pool.members.put_instance(instance("a", max_running_requests=1))
    for request_id in ("sent", "lost", "next"):
        await place(pool, request_id)
    with redis.Redis.from_url(server_url) as client:
        client.delete(PoolKeys("dualmap", "default").request("lost"))

    await grant(pool, (await finish(pool, "sent")).queue)

    assert (await record(pool, "next")).state == "dispatched"
    assert await pool.upkeep.repair(fence=await lead(pool)) == 1
    await assert_sums_hold(pool)
    await store.close()


async def test_an_instance_that_others_change_all_the_time_is_given_up(server_url: str) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING)
    other = redis.Redis.from_url(server_url)
    await store.open()
    try:
        pool = store.pool("default")
        await pool.members.put_instance(instance("a"))
        key = PoolKeys("dualmap", "default").instances

        def change(known: InstanceSpec | None) -> InstanceSpec | None:
            other.hset(key, "a", other.hget(key, "a") + b" ")  # after it was read, before it is written
            return known and replace(known, max_queued_requests=7)

        with pytest.raises(StoreError, match="changed by others"):
            await pool.members._describe("a", change)
        assert (await pool.membership()).instances["a"].max_queued_requests != 7
    finally:
        other.close()
        await store.close()
