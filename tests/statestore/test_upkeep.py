"""What somebody writes by hand into the store is an error of the store where it is read, and is mended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.scaling.scale_record import ScaleEntry, ScaleRecord
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceState, Role
from dualmap.statestore.errors import StoreError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import KvChange
from dualmap.statestore.leases import Lease
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.changes import Change
from tests.statestore.samples import CHAIN, assert_sums_hold, instance, placement

pytestmark = pytest.mark.parametrize("store", ["valkey"], indirect=True)  # nobody writes by hand into a process
KEYS = PoolKeys("dualmap", "default")
MEMBERS = {name: instance(name) for name in "abc"}
HASHES = (
    *("meta", "instances", "instances:records", "instances:notes", "replicas", "subscribers", "leader", "learned"),
    *("names", "settings", "hotness:tree", "scaling", "scaling:decode", "migrations", "kv_events:a"),
    *("request:running", "request:held"),
)
DAMAGE = {
    "text": b"abc",
    "nothing": b"",
    "negative": b"-5",
    "huge": b"9" * 40,
    "binary": b"\xff\xfe\x00\x01",
    "another object": b'{"a":1}',
    "a list": b"[1]",
    "null": b"null",
}
Read = Callable[[PoolStore], Awaitable[object]]
READS: dict[str, Read] = {
    "membership": lambda pool: pool.membership(),
    "snapshot": lambda pool: pool.snapshot(),
    "overview": lambda pool: pool.overview(),
    "loads": lambda pool: pool.loads(),
    "observe": lambda pool: pool.observe(["a", "b"], CHAIN),
    "records": lambda pool: pool.records(["running", "held"]),
    "queue_head": lambda pool: pool.queue_head("a"),
    "queue": lambda pool: pool.queues.queue("a"),
    "notes": lambda pool: pool.members.notes(),
    "arrivals": lambda pool: pool.publications.arrivals("0", 100),
    "samples": lambda pool: pool.publications.samples("0", 100),
    "scaling": lambda pool: pool.publications.scaling(),
    "scaling of decode instances": lambda pool: pool.publications.scaling("decode"),
    "scaling_log": lambda pool: pool.publications.scaling_log(10),
    "settings_history": lambda pool: pool.settings.history(10),
    "expired_replicas": lambda pool: pool.upkeep.expired_replicas(),
    "kv_event_records": lambda pool: pool.kv_events.records(),
    "recent_blocks": lambda pool: pool.publications.recent_blocks(["a"], 10),
    "heartbeat": lambda pool: pool.heartbeat("one", 60_000, {"version": "1"}),
    "renew_subscriber": lambda pool: pool.kv_events.renew_subscriber("worker", 60_000),
    "place": lambda pool: pool.place(placement("held", "b", "c")),
}


async def write(pool: PoolStore, *command: str | bytes | float) -> None:
    await pool._make(Change([command]))


@pytest.fixture
async def filled(pool: PoolStore) -> PoolStore:
    """A pool that has something of every kind."""
    lease = await leads(pool)
    await _fill(pool, lease)
    return pool


async def _fill(pool: PoolStore, lease: Lease) -> None:
    for spec in MEMBERS.values():
        await pool.members.put_instance(spec)
    for number, request_id in enumerate(("running", "second", "third", "held")):
        await pool.place(placement(request_id, "a", replica_id="one" if number else "two"))
    await pool.heartbeat("one", 60_000, {"version": "1"})
    await pool.kv_events.renew_subscriber("worker", 60_000)
    await pool.kv_events.claim("a", "worker")
    await pool.members.add_name("adapter", "lora")
    await pool.settings.change({"max_deferred_s": 9.0}, by="somebody")
    await pool.members.note_instance("a", "a word", fence=lease.fence)
    await pool.publications.publish_tree(HotnessTree({1: 1}), {}, fence=lease.fence)
    await pool.publications.publish_learned(
        Learned(transfer=(0.1, 0.001), tpot_s=0.01), {"a": 5000.0}, fence=lease.fence
    )
    await pool.publications.record_scaling(
        ScaleRecord(decision_id=9), ScaleEntry(9, 1, "decided", "more"), fence=lease.fence
    )
    await pool.publications.record_scaling(
        ScaleRecord(role="decode", decision_id=9), ScaleEntry(9, 1, "decided", "more"), fence=lease.fence
    )


async def leads(pool: PoolStore) -> Lease:
    """A leader renews by its fence, and campaigns where it cannot."""
    held = getattr(pool, "held_by_test", None)
    with contextlib.suppress(StoreError):
        if held is not None:
            return await pool.leader_lease.renew(held, 60_000)
    lease = await pool.leader_lease.acquire("worker", 60_000)
    assert lease is not None
    pool.held_by_test = lease  # type: ignore[attr-defined]
    return lease


async def fields_of(pool: PoolStore, key: bytes) -> dict[bytes, bytes]:
    flat = await pool._calls.command("HGETALL", key)
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def is_read(pool: PoolStore, read: Read) -> bool:
    """Any other exception fails the test: that ends a process, or is a 500."""
    try:
        await read(pool)
    except StoreError:
        return False
    return True


async def heal(pool: PoolStore) -> None:
    """What a fleet does within seconds: lead, mend, repair, and enter what members it knows and the store does not."""
    lease = await leads(pool)
    await pool.upkeep.mend(fence=lease.fence)
    known = (await pool.membership()).instances
    for name in MEMBERS.keys() - known.keys():
        await pool.members.put_instance(MEMBERS[name])
    await pool.upkeep.mend(fence=lease.fence)
    await pool.upkeep.repair(fence=lease.fence)


async def assert_whole(pool: PoolStore, damage: str) -> None:
    for name, read in READS.items():
        assert await is_read(pool, read), (damage, name)
    members = (await pool.membership()).instances
    assert members.keys() == MEMBERS.keys(), damage
    assert all(spec.state is InstanceState.READY for spec in members.values()), damage
    await assert_sums_hold(pool)
    learned = (await pool.membership()).learned
    assert learned.tpot_s is None or isinstance(learned.tpot_s, float | int), damage
    assert learned.transfer is None or len(learned.transfer) == 2, damage
    assert await pool.upkeep.mend(fence=(await leads(pool)).fence) == 0, damage


@pytest.mark.parametrize("key", HASHES)
async def test_a_damaged_field_is_a_store_error_at_most_and_is_mended(filled: PoolStore, key: str) -> None:
    name = KEYS.base + key.encode()
    fields = await fields_of(filled, name)
    assert fields or key in ("migrations", "kv_events:a")

    for field in fields or (b"some",):
        for damage, text in DAMAGE.items():
            await write(filled, "HSET", name, field, text)
            for read in READS.values():
                await is_read(filled, read)
            await heal(filled)
            await assert_whole(filled, f"{field!r} is {damage}")


@pytest.mark.parametrize(
    "wrong", [b'"abc"', b"-5", b"null", b"[1]", b"1e40", b"0.5", b"true"], ids=lambda each: each.decode()
)
async def test_a_damaged_figure_within_a_text_is_mended(filled: PoolStore, wrong: bytes) -> None:
    for key in ("instances", "instances:records", "replicas"):
        name, field = KEYS.base + key.encode(), b"one" if key == "replicas" else b"a"
        for figure in (await fields_of(filled, name))[field].split(b',"'):
            text = (await fields_of(filled, name))[field]
            if figure in text and b":" in figure:
                label, _, rest = figure.partition(b":")
                ends = b"}" if rest.endswith(b"}") else b""
                await write(filled, "HSET", name, field, text.replace(figure, label + b":" + wrong + ends))
                for read in READS.values():
                    await is_read(filled, read)
                await heal(filled)
                await assert_whole(filled, f"{key} {figure!r} is {wrong!r}")


@pytest.mark.parametrize("record", ["placed", "told"])
@pytest.mark.parametrize("wrong", [None, 7, [1]], ids=["null", "figure", "list"])
async def test_a_request_with_a_damaged_word_or_figure_counts_nowhere_or_is_whole(
    filled: PoolStore, record: str, wrong: object
) -> None:
    lease = await leads(filled)
    key = KEYS.request("held")
    for word in orjson.loads((await fields_of(filled, key))[record.encode()]):
        text = (await fields_of(filled, key))[record.encode()]
        await write(filled, "HSET", key, record, orjson.dumps(orjson.loads(text) | {word: wrong}))
        for known in (await filled.records(["held"])).values():
            await filled.queues.migrate(
                known, "b" if known.instance_id == "a" else "a", reason="drain", fence=lease.fence
            )
        await heal(filled)
        await assert_whole(filled, f"{word} of {record} is {wrong}")
        await filled.release([Release("held")])
        await filled.place(placement("held", "a", replica_id="one"))


async def test_names_of_kv_events_that_cannot_be_read_are_left_out(filled: PoolStore) -> None:
    claim = await filled.kv_events.claim("a", "worker")
    assert claim is not None
    for number, text in enumerate((b"", b"rubbish", b"\xff\x00", b"[1]", b"\x07")):
        await write(filled, "RPUSH", KEYS.kv_names("a"), text)
        change = KvChange(number + 1, 1.0, names={b"n%d" % number: b"known"})
        await filled.kv_events.apply("a", claim.fence, change)

    assert await filled.kv_events.names("a") == {b"n%d" % number: b"known" for number in range(5)}


async def test_entries_of_lists_that_are_none_are_left_out(filled: PoolStore) -> None:
    for text in DAMAGE.values():
        for key in (KEYS.queue("a"), KEYS.running("a"), KEYS.kv("a"), KEYS.least_loaded(Role.MIXED)):
            await write(filled, "ZADD", key, 1, text)
        for key in (KEYS.settings_history, KEYS.scaling_log):
            await write(filled, "LPUSH", key, text)
        for key in (KEYS.arrivals, KEYS.samples):
            await write(filled, "XADD", key, "MAXLEN", "~", 100, "*", "at", text)

    await heal(filled)

    await assert_whole(filled, "strays")
    head = await filled.queue_head("a")
    assert head is not None
    assert {entry.request_id for entry in head.entries} == {"third", "held"}


async def test_a_key_of_another_type_is_deleted_and_named(filled: PoolStore, caplog: pytest.LogCaptureFixture) -> None:
    for key in (
        KEYS.leader,
        KEYS.meta,
        KEYS.instances,
        KEYS.instance_records,
        KEYS.replicas,
        KEYS.samples,
        KEYS.settings,
        KEYS.books,
        KEYS.shares_active,
    ):
        await write(filled, "DEL", key)
        await (
            write(filled, "HSET", key, "stray", 1)
            if key == KEYS.shares_active
            else write(filled, "ZADD", key, 1, "stray")
        )
        if key != KEYS.leader:
            await is_read(filled, READS["membership"])

    await heal(filled)

    await assert_whole(filled, "other types")
    for name, kind in (("meta", "zset"), ("books", "zset"), ("shares:active", "hash")):
        assert f"key=dualmap:{{default}}:{name}: it was a {kind}, and is deleted" in caplog.text


async def test_an_instance_whose_record_is_gone_gets_another_with_what_runs_there(filled: PoolStore) -> None:
    former = (await filled.loads())["a"]
    await write(filled, "DEL", KEYS.instance_records)

    await filled.upkeep.mend(fence=(await leads(filled)).fence)

    load = (await filled.loads())["a"]
    assert (await filled.membership()).instances == MEMBERS
    assert (load.pending_tokens, load.running_requests) == (former.pending_tokens, former.running_requests)
    assert load.pending_tokens > 0


@pytest.mark.parametrize("field", ["placed", "told"])
async def test_nothing_is_left_of_a_damaged_request_that_is_over(filled: PoolStore, field: str) -> None:
    for damage in DAMAGE.values():
        await filled.place(placement("over", "b"))
        await write(filled, "HSET", KEYS.request("over"), field, damage)
        await write(filled, "DEL", KEYS.running("b"))

        (told,) = await filled.release([Release("over", replica_id="one")])

        assert not told.done
        assert await filled._calls.command("EXISTS", KEYS.request("over")) == 0
    await heal(filled)
    await assert_whole(filled, "requests")


async def test_a_damaged_request_that_was_passed_on_is_listed_no_more_when_it_is_over(filled: PoolStore) -> None:
    await filled.register(placement("passed", replica_id="one").request, None)
    await write(filled, "HSET", KEYS.request("passed"), "placed", "?")

    (told,) = await filled.release([Release("passed", replica_id="one")])

    assert not told.done
    assert await filled._calls.command("ZSCORE", KEYS.passed_on, "passed") is None


async def test_a_counter_that_cannot_be_read_continues_ahead_of_all_that_was_counted(
    filled: PoolStore, clock: Any
) -> None:
    await write(filled, "HSET", KEYS.meta, "epoch", "abc")

    await heal(filled)

    assert (await filled.membership()).epoch >= clock.now_ms


async def test_the_requests_of_a_replica_whose_lease_was_damaged_are_finished_unless_it_lives(
    filled: PoolStore, clock: Any
) -> None:
    await write(filled, "HSET", KEYS.replicas, "two", "abc")

    await heal(filled)
    clock.advance(20_000)
    lease = await leads(filled)
    for replica_id in await filled.upkeep.expired_replicas():
        await filled.upkeep.reap(replica_id, fence=lease.fence)

    assert {request.request_id for request in (await filled.snapshot()).requests} == {"second", "third", "held"}
    await assert_sums_hold(filled)


async def test_a_message_that_is_no_grant_is_left_alone(filled: PoolStore) -> None:
    delivered: list[object] = []
    filled.on_grant("one", delivered.append)

    for text in DAMAGE.values():
        await write(filled, "PUBLISH", KEYS.grants("one"), text)
    await write(filled, "PUBLISH", KEYS.grants("one"), '["held","a","one",1,400,false,1,450]')

    async with asyncio.timeout(10):
        while not delivered:
            await write(filled, "PUBLISH", KEYS.grants("one"), '["held","a","one",1,400,false,1,450]')
            await asyncio.sleep(0.01)
    assert {grant.request_id for grant in delivered} == {"held"}  # type: ignore[attr-defined]
