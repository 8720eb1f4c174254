"""The server within the process replies what a real one does, to what the lockstep test's traffic does not say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest
import redis as redis_client

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.steps import at_once
from dualmap.statestore.errors import StoreError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.memory.calls import MemoryCalls
from dualmap.statestore.memory.server import MemoryServer
from dualmap.statestore.pool.scripts import NO_SCRIPTS
from tests.statestore.samples import SCHEDULING, instance

K = b"{unit}:key"
SET = ((b"ZADD", K, 3, b"c", 1, b"a", 2.5, b"b", 1, b"aa", b"-1e300", b"z"),)
LOG = tuple((b"XADD", K, b"MAXLEN", b"~", 1000, b"*", b"at", number) for number in range(5))

CASES: dict[str, tuple[tuple[tuple[Any, ...], ...], tuple[Any, ...]]] = {
    "count below": (SET, (b"ZCOUNT", K, b"-inf", b"(2.5")),
    "count up to": (SET, (b"ZCOUNT", K, b"-inf", b"2.5")),
    "newest": (SET, (b"ZREVRANGE", K, 0, 2)),
    "newest of few": (SET, (b"ZREVRANGE", K, 0, 99)),
    "first with scores": (SET, (b"ZRANGE", K, 0, 1, b"WITHSCORES")),
    "some from a score on": (SET, (b"ZRANGEBYSCORE", K, b"1", b"+inf", b"WITHSCORES", b"LIMIT", 0, 2)),
    "some up to a score": (SET, (b"ZRANGEBYSCORE", K, b"-inf", b"1", b"LIMIT", 0, 2)),
    "pop of ties": (SET, (b"ZPOPMIN", K, 3)),
    "pop of nothing": ((), (b"ZPOPMIN", K, 3)),
    "drop by rank": (SET, (b"ZREMRANGEBYRANK", K, 0, 1)),
    "drop by score": (SET, (b"ZREMRANGEBYSCORE", K, b"-inf", b"1")),
    "never lower": (SET, (b"ZADD", K, b"GT", 2, b"c", 9, b"a", 4, b"new")),
    "only new": (SET, (b"ZADD", K, b"NX", 2, b"c", 4, b"new")),
    "scores": (SET, (b"ZMSCORE", K, b"a", b"b", b"missing", b"z")),
    "last of a list": (((b"LPUSH", K, b"1"), (b"LPUSH", K, b"2"), (b"RPUSH", K, b"3")), (b"LRANGE", K, 0, 1)),
    "trimmed": (((b"LPUSH", K, b"1"), (b"LPUSH", K, b"2"), (b"LTRIM", K, 0, 0)), (b"LRANGE", K, 0, -1)),
    "grows": (((b"HSET", K, b"n", 5),), (b"HINCRBY", K, b"n", -7)),
    "set again": (((b"HSET", K, b"n", 5),), (b"HSET", K, b"n", 6, b"m", b"x")),
    "set only where missing": (((b"HSETNX", K, b"n", 5), (b"HSETNX", K, b"n", 6)), (b"HGETALL", K)),
    "fields": (((b"HSET", K, b"n", 5, b"m", b"0.1"),), (b"HGETALL", K)),
    "gone with its last field": (((b"HSET", K, b"n", 5), (b"HDEL", K, b"n", b"m")), (b"EXISTS", K)),
    "gone with its last member": (((b"ZADD", K, 1, b"a"), (b"ZREM", K, b"a", b"b")), (b"EXISTS", K)),
    "unlinked": (SET, (b"UNLINK", K, K + b"2")),
    "renamed over": ((*SET, (b"HSET", K + b"2", b"n", 1), (b"RENAME", K, K + b"2")), (b"ZCARD", K + b"2")),
}
SCRIPTS = {
    "numbers are cut": "return { 1.9, -1.9, '1.9' }",
    "ends at nil": "return { 1, nil, 3 }",
    "truth": "return { true, false, 'x' }",
    "nothing": "return nil",
    "a missing field": "return { redis.call('HGET', KEYS[1], 'n') == false }",
    "fields": "redis.call('HSET', KEYS[1], 'n', 2^53, 'm', 0.1, 'k', ARGV[1]) return redis.call('HGETALL', KEYS[1])",
    "missing fields": "return redis.call('HMGET', KEYS[1], 'n', 'm')",
    "many entries": "local all = {} for n = 1, 20000 do all[n] = n end return { all, 'end' }",
    "a gap after many entries": "local all = {} for n = 1, 3000 do all[n] = n end all[2500] = nil return all",
    "empty tables": "return { {}, { {} }, {} }",
    "an empty table": "return {}",
    "json": "local each = cjson.decode(ARGV[2]) return { each.text, each.list[2], each.half * 4, each.yes }",
}
FRACTION = re.compile(rb"-?\d+\.\d+(e[-+]\d+)?")
ARGUMENTS = (b"\xff\x00 binary", '{"text":"ü","list":[1,2],"yes":true,"half":0.5}'.encode())


@pytest.fixture
def client(server_url: str) -> Any:
    with redis_client.Redis.from_url(server_url, protocol=2) as client:
        yield client


def same_text(reply: Any) -> Any:
    """A reply whose fractions have the fewest digits that tell their value, as Valkey writes them: Redis writes 17
    digits, which readers take for the same number."""
    if isinstance(reply, list):
        return [same_text(each) for each in reply]
    if isinstance(reply, bytes) and FRACTION.fullmatch(reply):
        return repr(float(reply)).encode()
    return reply


@pytest.mark.parametrize("name", CASES)
def test_a_command_replies_and_leaves_what_it_does_on_a_server(client: Any, name: str) -> None:
    server, (before, command) = MemoryServer(), CASES[name]
    client.response_callbacks.clear()
    for each in before:
        server.run(*each)
        client.execute_command(*each)

    assert same_text(server.run(*command)) == same_text(client.execute_command(*command))
    for left in ((b"EXISTS", K, K + b"2"),):
        assert server.run(*left) == client.execute_command(*left)


def test_entries_of_a_log_are_read_on_from_the_last_one(client: Any) -> None:
    server = MemoryServer()
    client.response_callbacks.clear()
    for command in LOG:
        server.run(*command)
        client.execute_command(*command)

    def read(run: Any) -> list[Sequence[bytes]]:
        first = run(b"XRANGE", K, b"(0", b"+", b"COUNT", 2)
        rest = run(b"XRANGE", K, b"(" + first[-1][0], b"+", b"COUNT", 10)
        return [flat for _, flat in (*first, *rest)]

    assert read(server.run) == read(client.execute_command)
    assert len(read(server.run)) == len(LOG)


def test_a_log_keeps_the_last_entries() -> None:
    server = MemoryServer()
    for number in range(7):
        server.run(b"XADD", K, b"MAXLEN", b"~", 3, b"*", b"at", number)
    entries = server.run(b"XRANGE", K, b"(0", b"+", b"COUNT", 10)
    assert [flat for _, flat in entries] == [[b"at", b"4"], [b"at", b"5"], [b"at", b"6"]]
    assert server.run(b"XRANGE", K, b"(" + entries[0][0], b"+", b"COUNT", 1) == [entries[1]]


def run_script(source: str, arguments: Sequence[bytes] = ()) -> Any:
    """The reply of a script, as the only function of a library."""
    server = MemoryServer()
    server.load_functions(f"#!lua name=one\nredis.register_function('f', function(KEYS, ARGV) {source}\nend)")
    return server.run_function("f", K, arguments)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_replies_what_it_does_on_a_server(client: Any, name: str) -> None:
    source = SCRIPTS[name]
    assert same_text(run_script(source, ARGUMENTS)) == same_text(client.eval(source, 1, K, *ARGUMENTS))


def test_what_a_script_refuses_and_what_a_command_refuses_is_raised() -> None:
    with pytest.raises(StoreError, match="no longer the leader"):
        run_script("return redis.error_reply('FENCED no longer the leader')")
    with pytest.raises(StoreError, match="no such key"):
        MemoryServer().run(b"RENAME", K, K + b"2")
    with pytest.raises(StoreError, match="no such key"):
        run_script("return redis.call('RENAME', 'a', 'b')")


async def test_who_waits_for_a_member_gets_it_when_it_comes() -> None:
    server = MemoryServer()
    calls = MemoryCalls(server, NO_SCRIPTS, lambda: 0)
    waiting = asyncio.create_task(calls.command("BZPOPMIN", K, 60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await calls.command("ZADD", K, 7, "a")
    assert await waiting == [K, b"a", b"7"]
    assert await calls.command("BZPOPMIN", K, 0.001) is None


async def test_messages_come_after_the_call_that_published_them() -> None:
    server = MemoryServer()
    calls = MemoryCalls(server, NO_SCRIPTS, lambda: 0)
    heard: list[tuple[bytes, int]] = []
    server.listen(b"news", lambda message: heard.append((message, server.run(b"HLEN", K))))
    await calls.together([("PUBLISH", "news", "one"), ("PUBLISH", "other", "two"), ("HSET", K, "n", 1)])
    assert heard == [(b"one", 1)]


async def test_a_call_that_would_wait_has_no_answer_at_once() -> None:
    pool = MemoryStore(SchedulingSettings()).pool("default")
    assert at_once(pool.queues.wanted_rebalances(0)) == []
    with pytest.raises(RuntimeError, match="waits"):
        at_once(pool.queues.wanted_rebalances(1.0))


async def test_a_pool_can_be_made_of_known_members() -> None:
    known = MemoryStore(SCHEDULING).pool("default")
    for name in ("a", "b"):
        await known.members.put_instance(instance(name))
    await known.members.add_name("adapter", "lora")
    await known.settings.change({"max_hold_s": 9.0}, by="an operator")
    told = await known.membership()

    made = MemoryStore(SCHEDULING).pool_of("default", told, {"a": 77.0})

    assert await made.membership() == told
    assert (await made.loads())["a"].prefill_tokens_per_s == 77.0


def test_pools_of_one_store_share_nothing() -> None:
    store = MemoryStore(SCHEDULING)
    at_once(store.pool("one").members.put_instance(instance("a")))
    assert at_once(store.pool("two").membership()).instances == {}
    assert store.pool("one") is store.pool("one")
    assert all(key.startswith(PoolKeys("dualmap", "one").base) for key in store.server.contents)
