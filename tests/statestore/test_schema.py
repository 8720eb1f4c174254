"""The schema of a pool: who may share it, and how neighbouring versions read each other; on every backend."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import orjson
import pytest
from lupa import lua51  # type: ignore[import-untyped]

from dualmap.scheduling.tenants.budgets import Limit, Measure, Period, budget_of
from dualmap.statestore.errors import StoreSchemaError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.leases import Lease
from dualmap.statestore.pool import PoolStore, schema
from dualmap.statestore.pool.changes import Change
from dualmap.statestore.pool.codec import grant_from, pairs_from
from dualmap.statestore.pool.schema import OLDEST_BESIDE, SCHEMA, PoolSchema
from dualmap.statestore.records import Record
from tests.statestore.samples import HandClock, assert_sums_hold, finish, first_token, instance, lead, place, sweep

KEYS = PoolKeys("dualmap", "default")
NUMBERS = {b"schema": b"%d" % SCHEMA, b"oldest_schema": b"%d" % OLDEST_BESIDE}


async def numbers(pool: PoolStore) -> Mapping[bytes, bytes]:
    """Return what the pool says of the versions that wrote it."""
    meta = pairs_from(await pool._calls.command("HGETALL", KEYS.meta))
    return {name: text for name, text in meta.items() if name in NUMBERS}


async def say(pool: PoolStore, newest: int | str, oldest: int | str) -> None:
    await pool._make(Change([("HSET", KEYS.meta, "schema", newest, "oldest_schema", oldest)]))


async def test_who_enters_a_pool_of_schema_1_packs_what_was_used_of_limits(pool: PoolStore) -> None:
    now_ms, day = await pool.now_ms(), await pool.usage.today()
    limits = [
        Limit(Measure.TOKENS, Period.MINUTE, 6000),
        Limit(Measure.TOKENS, Period.DAY, 50_000, "key:ci"),
        Limit(Measure.TOKENS, Period.MONTH, 90_000),
        Limit(Measure.REQUESTS, Period.IN_FLIGHT, 4),
    ]
    texts = (f"1500500000 {now_ms}", f"700 {day}", f"800 {day:%Y-%m}", "2")
    former = dict(zip([budget_of("acme", each) for each in limits], texts, strict=True))
    former |= {budget_of("acme", replace(limits[1], of="")): "60 1999-01-01", "acme/tokens/year": "9", "odd": "?"}
    for key, pairs in ((KEYS.former_budgets, former), (KEYS.former_shares, {"acme": f"1 1 {now_ms} 1 {now_ms}"})):
        await pool._make(Change([("HSET", key, *pair) for pair in pairs.items()]))

    await asyncio.gather(*[pool.schema.enter() for _ in range(3)])

    asked = [*limits, replace(limits[1], of="")]
    assert await pool.usage.budgets("acme", asked) == pytest.approx([1500.5, 700, 800, 2, 0], abs=1)
    assert await pool._calls.command("EXISTS", KEYS.former_budgets, KEYS.former_shares) == 0


def run_version(monkeypatch: pytest.MonkeyPatch, number: int, oldest_beside: int) -> None:
    """From now on this process is of another version."""
    monkeypatch.setattr(schema, "SCHEMA", number)
    monkeypatch.setattr(schema, "OLDEST_BESIDE", oldest_beside)


async def test_the_first_that_enters_a_pool_says_its_schema_and_others_of_it_change_nothing(pool: PoolStore) -> None:
    await pool.schema.enter()
    assert await numbers(pool) == NUMBERS

    await pool.schema.enter()
    assert await numbers(pool) == NUMBERS


async def test_a_pool_of_a_newer_version_beside_which_this_one_must_not_run_is_refused(pool: PoolStore) -> None:
    lease = await pool.leader_lease.acquire("worker", 60_000)
    assert lease is not None
    await say(pool, SCHEMA + 8, SCHEMA + 1)

    for refused in (
        pool.schema.enter,
        pool.membership,
        lambda: pool.heartbeat("one", 60_000, {}),
        lambda: pool.leader_lease.acquire("worker", 60_000),
        lambda: pool.leader_lease.renew(Lease("worker", lease.fence, 0), 60_000),
    ):
        with pytest.raises(StoreSchemaError, match=r"newer version.* run the newer .*another store\.prefix"):
            await refused()
    assert await numbers(pool) == {b"schema": b"%d" % (SCHEMA + 8), b"oldest_schema": b"%d" % (SCHEMA + 1)}


async def test_a_pool_of_a_newer_version_that_allows_this_one_is_shared(pool: PoolStore) -> None:
    await say(pool, SCHEMA + 1, SCHEMA)

    await pool.schema.enter()
    await pool.membership()
    await pool.heartbeat("one", 60_000, {})

    assert await numbers(pool) == {b"schema": b"%d" % (SCHEMA + 1), b"oldest_schema": b"%d" % SCHEMA}


async def test_a_newer_version_shares_the_pool_of_an_older_one_that_it_allows_and_says_so(
    pool: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.schema.enter()
    await pool.heartbeat("old", 60_000, {})

    run_version(monkeypatch, SCHEMA + 1, SCHEMA)
    await pool.schema.enter()

    assert await numbers(pool) == {b"schema": b"%d" % (SCHEMA + 1), b"oldest_schema": b"%d" % SCHEMA}


@pytest.mark.parametrize("lives", ["replica", "leader"])
async def test_a_newer_version_waits_until_older_ones_that_it_does_not_allow_are_gone(
    pool: PoolStore, clock: HandClock, monkeypatch: pytest.MonkeyPatch, lives: str
) -> None:
    await pool.schema.enter()
    if lives == "replica":
        await pool.heartbeat("the old one", 1000, {})
    else:
        await pool.leader_lease.acquire("the old one", 1000)
    run_version(monkeypatch, SCHEMA + 1, SCHEMA + 1)

    with pytest.raises(StoreSchemaError, match=r"stop the older version first \(the old one\)"):
        await pool.schema.enter()
    assert await numbers(pool) == NUMBERS

    clock.advance(1000)
    await pool.schema.enter()
    assert await numbers(pool) == dict.fromkeys(NUMBERS, b"%d" % (SCHEMA + 1))


async def test_processes_that_say_no_number_are_older_than_all_others(pool: PoolStore, clock: HandClock) -> None:
    lease = orjson.dumps({"expires_ms": clock.now_ms + 1000, "lease_ms": 1000, "info": {}, "beaten": True})
    await pool._make(Change([("HSET", KEYS.replicas, "old", lease)]))

    with pytest.raises(StoreSchemaError, match=r"of schema 0.* \(old\)"):
        await pool.schema.enter()

    clock.advance(1000)
    await pool.schema.enter()
    assert await numbers(pool) == NUMBERS


async def test_a_pool_that_lost_its_numbers_is_entered_beside_living_processes_of_this_version(pool: PoolStore) -> None:
    await pool.heartbeat("one", 60_000, {})
    await pool.leader_lease.acquire("worker", 60_000)
    await pool._make(Change([("DEL", KEYS.meta)]))

    await pool.schema.enter()

    assert await numbers(pool) == NUMBERS


async def test_what_the_store_loses_of_the_numbers_the_next_heartbeat_says_again(pool: PoolStore) -> None:
    await pool.schema.enter()
    await pool._make(Change([("DEL", KEYS.meta)]))

    await pool.heartbeat("one", 60_000, {})

    assert await numbers(pool) == NUMBERS


async def test_numbers_that_somebody_damaged_refuse_nobody_and_are_mended(pool: PoolStore) -> None:
    fence = await lead(pool)
    await say(pool, "many", "none")

    await pool.heartbeat("one", 60_000, {})
    await pool.membership()
    assert await pool.upkeep.mend(fence=fence) == 2

    await pool.heartbeat("one", 60_000, {})
    assert await numbers(pool) == NUMBERS


async def test_fields_that_a_newer_version_added_are_left_out_and_no_count_is_lost(
    pool: PoolStore, clock: HandClock
) -> None:
    """Requests live through all their states on records that a newer version wrote."""
    fence = await lead(pool)
    await pool.heartbeat("one", 60_000, {})
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    for request_id in ("sent", "held"):
        await place(pool, request_id, "a", replica_id="one")
    for request_id in ("sent", "held"):
        for name in ("placed", "told"):
            await _add_field(pool, KEYS.request(request_id), name)
    for key, name in ((KEYS.instances, "a"), (KEYS.instance_records, "a"), (KEYS.replicas, "one")):
        await _add_field(pool, key, name)

    assert [*(await pool.membership()).instances] == ["a"]
    assert [each.replica_id for each in (await pool.snapshot()).replicas] == ["one"]
    assert {each.request_id for each in await pool.requests_of("one")} == {"sent", "held"}
    assert await pool.heartbeat("one", 60_000, {}) is True
    assert (await pool.upkeep.mend(fence=fence), await pool.upkeep.repair(fence=fence)) == (0, 0)
    assert (await first_token(pool, "sent", "a")).done
    await sweep(pool, "a")
    assert (await pool.records(["held"]))["held"].state == "dispatched"
    await assert_sums_hold(pool)
    assert [(await finish(pool, request_id)).done for request_id in ("sent", "held")] == [True, True]
    load = (await pool.loads())["a"]
    assert (load.pending_tokens, load.dispatched_tokens, load.running_requests, load.queued_requests) == (0, 0, 0, 0)


async def _add_field(pool: PoolStore, key: bytes, name: str) -> None:
    text = orjson.loads(await pool._calls.command("HGET", key, name))
    await pool._make(Change([("HSET", key, name, orjson.dumps({**text, "of_a_newer_version": 7}))]))


def test_a_grant_of_a_newer_version_may_tell_more() -> None:
    told = ["r", "a", "one", 1, 400, False, 2, 800]

    assert grant_from(orjson.dumps([*told, "more"])) == grant_from(orjson.dumps(told))


def test_a_field_that_an_older_version_did_not_write_has_a_value_in_python_and_in_scripts() -> None:
    record = Record(("state", "tokens", "added"), {"added": 7})
    older = orjson.dumps({"state": "held", "tokens": 3})

    assert record.fields(older) == {"state": "held", "tokens": 3, "added": 7}
    assert record.fields(b'{"state":"held","tokens":3,"added":1}')["added"] == 1
    functions = record.lua_complete("complete", "found") + record.lua_text("text", "found")
    lua = lua51.LuaRuntime()
    write = lua.execute(
        f"local format = string.format\n{functions}return function(found) complete(found) return text(found) end"
    )
    assert orjson.loads(write(lua.table_from({"state": "held", "tokens": 3}))) == record.fields(older)


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ({}, PoolSchema()),
        ({b"schema": b"3", b"oldest_schema": b"2"}, PoolSchema(3, 2)),
        ({b"schema": b"-1"}, PoolSchema()),
        ({b"schema": b"1", b"oldest_schema": b"2"}, PoolSchema()),
    ],
)
def test_a_pool_without_readable_numbers_is_of_schema_0(said: Mapping[bytes, bytes], known: PoolSchema) -> None:
    assert PoolSchema.of(said) == known
