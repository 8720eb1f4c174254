"""A call that the network holds back until its caller has given it up changes nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import date, timedelta
from typing import Any
from urllib.parse import urlsplit

import hiredis
import pytest
import redis

from dualmap.scheduling.batches.batch import RangeDone, Status
from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, Tier
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.learning import DisprovedTier
from dualmap.scheduling.queues.queue_order import QueuePlan
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.revisions.rollout import Move, Rollout
from dualmap.scheduling.revisions.weights import Home, RevisionShare, RevisionWeights
from dualmap.scheduling.runs.turn import RunName, Turn
from dualmap.scheduling.scaling.scale_record import ScaleEntry, ScaleRecord
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter
from dualmap.statestore.batches.batch_book import BatchBook, Claim, FileRecord
from dualmap.statestore.call_values import DiscoveryStatus
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.kv_views import KvChange, KvViewStatus, TierChange
from dualmap.statestore.leases import Lease
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.allotments import Allotment
from dualmap.statestore.pool.changes import Changes
from dualmap.statestore.pool.chronicle import ChronicleRecord
from dualmap.statestore.pool.stored_responses import StoredConversation
from dualmap.statestore.redis import RedisStore, wire
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.tenants.allotment_ledger import LedgerEntry
from dualmap.statestore.tenants.tenant_book import Edition, TenantBook
from tests.statestore.holding_proxy import HoldingProxy, holding_proxy
from tests.statestore.samples import CHAIN, SCHEDULING, chain, instance, placement, record
from tests.support.batches import NEW_BATCH

TIMEOUT_S = 0.2
"""For a call: as long as the test has to wait until the caller has given up."""
READS = frozenset(
    [
        "membership",
        "members.notes",
        "members.adapters",
        "adapters.failures",
        "adapters.records",
        "snapshot",
        "overview",
        "records",
        *("loads", "loads_of"),
        "queue_head",
        "queues.queue",
        "requests_of",
        "now_ms",
        "publications.arrivals",
        "publications.samples",
        "publications.scaling",
        "publications.scaling_log",
        "publications.discovery",
        "settings.history",
        "publications.recent_blocks",
        "upkeep.expired_replicas",
        "kv_events.records",
        "kv_events.names",
        "tiers.described",
        "responses.conversation",
        "schema.refuse_newer",
        "usage.today",
        "usage.of_day",
        "usage.records",
        "usage.work",
        "usage.taken_back",
        "usage.budgets",
        "allotments.changes",
        "allotments.wanted",
        "allotments.of",
        "allotments.entered",
        *("chronicle.now_ms", "chronicle.last_step", "chronicle.last_record", "chronicle.samples"),
        *("chronicle.happened", "chronicle.member_changes", "queues.waits"),
        *("runs.ledger", "runs.turns_of"),
        *("revisions.weights", "revisions.history", "revisions.rollout"),
    ]
)
"""Calls that change nothing."""
WITHIN_THE_PROCESS = frozenset(
    [
        "settings.in_force",
        "settings.in_force_after",
        *("close", "queues.close", "on_grant", "on_turn", "runs.on_turn"),
        *("settings.override_from", "settings.overrides_from", "settings.order_from"),
    ]
)
HINTS = frozenset({"queues.wanted_rebalances"})
"""What it takes too late is a hint: the next sweep finds the queue."""

OF_A_SCRIPT = b"}:\r\n"
"""Only calls of scripts have the beginning of keys as an argument."""

_HOST = InstanceTiers((InstanceTier(Tier.HOST, 2000, LoadPrice(0.01, 0.0000125)),), takes_limits=True)
_TIERS = {Tier.HOST: TierChange((5,), (), 9)}

Change = Callable[[PoolStore, Lease], Awaitable[Any]]


async def _commit(pool: PoolStore, _: Lease) -> None:
    head = await pool.queue_head("a")
    assert head is not None
    await pool.commit(QueuePlan("a", head.load.version, (), 7))


async def _migrate(pool: PoolStore, lease: Lease) -> None:
    await pool.queues.migrate(await record(pool, "held"), "b", reason="rebalance", fence=lease.fence)


async def _drift(pool: PoolStore, lease: Lease) -> None:
    assert await pool.upkeep.repair(fence=lease.fence)


_ADAPTER = RegisteredAdapter("/adapters/known")
_WEIGHTS = RevisionWeights({"v1": RevisionShare(95.0), "v2": RevisionShare(5.0)}, version=1)
_TURN = Turn("late", "one", RunName("late"), CHAIN, 5.0)

CHANGES: dict[str, Change] = {
    "admit": lambda pool, _: pool.admit([_TURN], 10**6),
    "runs.admit": lambda pool, _: pool.runs.admit([_TURN], 10**6),
    "place": lambda pool, _: pool.place(placement("late", "a")),
    "register": lambda pool, _: pool.register(placement("late", "a").request, None),
    "observe": lambda pool, _: pool.observe(["a"], CHAIN),
    "commit": _commit,
    "release": lambda pool, _: pool.release([Release("running")]),
    "members.put_instance": lambda pool, _: pool.members.put_instance(instance("late")),
    "members.enter_all": lambda pool, _: pool.members.enter_all([instance("late")]),
    "members.update_instance": lambda pool, _: pool.members.update_instance("a", {"kv_capacity_tokens": 77}),
    "members.describe_instance": lambda pool, lease: pool.members.describe_instance(
        "a", lambda _: replace(instance("a"), kv_capacity_tokens=77), fence=lease.fence
    ),
    "members.set_instance_state": lambda pool, _: pool.members.set_instance_state("a", InstanceState.DOWN),
    "members.remove_instance": lambda pool, _: pool.members.remove_instance("c"),
    "members.forget_cache": lambda pool, _: pool.members.forget_cache("a"),
    "members.note_adapters": lambda pool, lease: pool.members.note_adapters(
        instance("a", adapter_slots=2), ["late"], fence=lease.fence
    ),
    "members.note_instance": lambda pool, lease: pool.members.note_instance("a", "late", fence=lease.fence),
    "members.add_name": lambda pool, _: pool.members.add_name("late", ""),
    "members.remove_name": lambda pool, _: pool.members.remove_name("known"),
    "members.restore_names": lambda pool, _: pool.members.restore_names({"late": "lora"}),
    "adapters.change": lambda pool, _: pool.adapters.change("late", lambda former, known: _ADAPTER),
    "adapters.take_back": lambda pool, _: pool.adapters.take_back("known", _ADAPTER, None),
    "adapters.restore": lambda pool, _: pool.adapters.restore({"late": _ADAPTER}),
    "adapters.note_failure": lambda pool, _: pool.adapters.note_failure("a", "late", "late"),
    "settings.restore": lambda pool, _: pool.settings.restore({"max_deferred_s": 9.0}),
    "settings.change": lambda pool, _: pool.settings.change({"max_deferred_s": 9.0}, by="late"),
    "queues.migrate": _migrate,
    "adopt": lambda pool, _: _adopt(pool),
    "leader_lease.acquire": lambda pool, _: pool.leader_lease.acquire("one", 60_000),
    "leader_lease.renew": lambda pool, lease: pool.leader_lease.renew(lease, 90_000),
    "leader_lease.release": lambda pool, lease: pool.leader_lease.release(lease),
    "heartbeat": lambda pool, _: pool.heartbeat("late", 60_000, {}),
    "schema.enter": lambda pool, _: pool.schema.enter(),
    "retire": lambda pool, _: pool.retire("one"),
    "upkeep.reap": lambda pool, lease: pool.upkeep.reap("dead", fence=lease.fence),
    "upkeep.repair": _drift,
    "upkeep.mend": lambda pool, lease: pool.upkeep.mend(fence=lease.fence),
    "publications.publish_tree": lambda pool, lease: pool.publications.publish_tree(
        HotnessTree({1: 1}), {}, fence=lease.fence
    ),
    "publications.publish_learned": lambda pool, lease: pool.publications.publish_learned(
        Learned(), {"a": 5.0}, fence=lease.fence
    ),
    "publications.record_scaling": lambda pool, lease: pool.publications.record_scaling(
        ScaleRecord(decision_id=9), ScaleEntry(9, 1, "decided", "late"), fence=lease.fence
    ),
    "publications.record_discovery": lambda pool, lease: pool.publications.record_discovery(
        DiscoveryStatus(at_ms=9, by="late"), fence=lease.fence
    ),
    "kv_events.renew_subscriber": lambda pool, _: pool.kv_events.renew_subscriber("late", 60_000),
    "kv_events.claim": lambda pool, _: pool.kv_events.claim("b", "late"),
    "kv_events.release": lambda pool, _: pool.kv_events.release("a", 4_000_000_000_000),
    "kv_events.mark": lambda pool, _: pool.kv_events.mark("a", 4_000_000_000_000, KvViewStatus.EXACT),
    "kv_events.apply": lambda pool, _: pool.kv_events.apply(
        "a", 4_000_000_000_000, KvChange(1, 1.0, (5,), (), tiers=_TIERS)
    ),
    "usage.drop_old": lambda pool, lease: pool.usage.drop_old(fence=lease.fence),
    "allotments.allot": lambda pool, _: pool.allotments.allot(
        Allotment("acme/requests/minute", 60, 30, 4_000_000_000_000, 7)
    ),
    "tiers.describe": lambda pool, lease: pool.tiers.describe("a", _HOST, fence=lease.fence),
    "tiers.correct": lambda pool, lease: pool.tiers.correct(DisprovedTier("a", "host", 5_000), fence=lease.fence),
    "responses.keep": lambda pool, _: pool.responses.keep("late", StoredConversation(5)),
    "revisions.change": lambda pool, _: pool.revisions.change(lambda _: _WEIGHTS, "late", by="late"),
    "revisions.conduct": lambda pool, _: pool.revisions.conduct(
        lambda rollout, weights, now_ms: Move(Rollout("v2"), _WEIGHTS, "late"), by="late"
    ),
    "revisions.restore": lambda pool, _: pool.revisions.restore(_WEIGHTS, Rollout("v2")),
    "revisions.home": lambda pool, _: pool.revisions.home("known"),
    "revisions.settle": lambda pool, _: pool.revisions.settle("late", Home("v2", 1), None),
    "chronicle.record": lambda pool, _: pool.chronicle.record(ChronicleRecord(5), None, (), after=None),
    "chronicle.note": lambda pool, _: pool.chronicle.note("operator", "late"),
    "chronicle.member_changed": lambda pool, _: pool.chronicle.member_changed("late", "drain", "a"),
}


async def _adopt(pool: PoolStore) -> int:
    return await pool.adopt([replace(await record(pool, "running"), request_id="late")])


@pytest.fixture
async def proxy(server_url: str) -> AsyncIterator[HoldingProxy]:
    async with holding_proxy(urlsplit(server_url).port or 0) as made:
        yield made


@pytest.fixture
async def store(proxy: HoldingProxy) -> AsyncIterator[RedisStore]:
    settings = StoreSettings(url=f"redis://127.0.0.1:{proxy.port}/0", command_timeout_s=TIMEOUT_S)
    store = RedisStore(settings, scheduling=SCHEDULING)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def pool(store: RedisStore) -> PoolStore:
    return store.pool("default")


async def _filled(pool: PoolStore, client: redis.Redis) -> Lease:
    """A pool in which every call has something to change."""
    lease = await pool.leader_lease.acquire("one", 3_600_000)
    assert lease is not None
    for name in "abc":
        await pool.members.put_instance(instance(name))
    for request_id in ("running", "second", "held"):
        await pool.place(placement(request_id, "a", chain=chain(*(hash(request_id) % 999 + n for n in range(4)))))
    await pool.members.add_name("known", "")
    await pool.adapters.restore({"known": _ADAPTER})
    await pool.heartbeat("one", 60_000, {})
    client.hset("dualmap:{default}:replicas", "dead", b'{"expires_ms":1,"lease_ms":1,"beaten":true,"info":{}}')
    client.hset(
        "dualmap:{default}:kv_events:a", mapping={"fence": 4_000_000_000_000, "owner": "x", "status": "partial"}
    )
    client.zadd("dualmap:{default}:running:c", {"stray": 1})
    client.zadd("dualmap:{default}:kv_tier:host:a", {b"unused": 1})
    client.hset("dualmap:{default}:instances:notes", "a", b"unreadable")
    client.hset("dualmap:{default}:revisions:homes:old", "known", "1 v1")
    client.hdel("dualmap:{default}:meta", "oldest_schema")
    client.hset(f"dualmap:{{default}}:usage:{date.today() - timedelta(50)}", "acme ci - m", "1 2 3 4 5 6 7")
    return lease


def _kept(client: redis.Redis) -> dict[bytes, Any]:
    """All that the server has."""
    return {key: client.dump(key) for key in client.scan_iter("*")}


def test_every_call_of_a_pool_is_known_to_read_or_is_tried_late() -> None:
    pool = MemoryStore(SCHEDULING).pool("default")
    parts = {name: part for name, part in vars(pool).items() if isinstance(part, Changes) and not name.startswith("_")}
    calls = {call for call in dir(pool) if not call.startswith("_") and callable(getattr(pool, call))}
    for name, part in parts.items():
        calls |= {f"{name}.{call}" for call in dir(part) if not call.startswith("_")}

    assert calls == READS | WITHIN_THE_PROCESS | HINTS | CHANGES.keys()


async def test_only_scripts_change_what_the_server_has(
    pool: PoolStore, store: RedisStore, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: set[str] = set()

    def pack(command: tuple[Any, ...]) -> bytes:
        sent.add(str(command[0]))
        return hiredis.pack_command(command)

    with redis.Redis.from_url(server_url) as client:
        monkeypatch.setattr(wire, "pack", pack)
        for call in sorted(CHANGES):
            client.flushdb()
            lease = await _filled(pool, client)
            await CHANGES[call](pool, lease)
        await pool.queues.wanted_rebalances(0.0)
        book, edition = await _book(store)
        for change in TENANT_CHANGES.values():
            await change(book, edition)
        infos = client.command()

    assert sent & {"EVALSHA", "FCALL"}
    of_transactions = {"MULTI", "EXEC"}
    known = {name: infos[name.lower()]["flags"] for name in sent - of_transactions if name.lower() in infos}
    changing = {name for name, flags in known.items() if "readonly" not in flags}
    assert changing <= {"FCALL", "FUNCTION", "EVALSHA", "EVAL", "SCRIPT", "TIME"}


@pytest.mark.parametrize("call", sorted(CHANGES))
async def test_what_a_caller_gave_up_changes_nothing_when_it_is_delivered(
    call: str, pool: PoolStore, proxy: HoldingProxy, server_url: str
) -> None:
    with redis.Redis.from_url(server_url) as client:
        lease = await _filled(pool, client)
        if call == "members.remove_instance":
            client.delete("dualmap:{default}:running:c")
        proxy.mark = OF_A_SCRIPT
        before = _kept(client)

        with pytest.raises(StoreUnavailableError):
            await CHANGES[call](pool, lease)
        assert proxy.holds, "the call was under way"
        proxy.deliver()
        await _replied(proxy)

        assert b"LATE" in proxy.replies
        assert _kept(client) == before


TENANT_READS = frozenset({"news", "history", "now_ms"})
TENANT_CHANGES: dict[str, Callable[[TenantBook, Edition], Awaitable[Any]]] = {
    "change": lambda book, known: book.change(
        known, {"acme": None, "late": b"1"}, by="late", action="set", before={}, after={}
    ),
    "mend": lambda book, known: book.mend(known, 5),  # of which the book has one
}


async def _book(store: RedisStore) -> tuple[TenantBook, Edition]:
    """A book in which every call has something to change."""
    edition = await store.tenants.change(Edition(), {"acme": b"1"}, by="ada", action="create", before={}, after={})
    assert edition is not None
    return store.tenants, edition


def test_every_call_of_the_book_of_tenants_is_known_to_read_or_is_tried_late() -> None:
    book = MemoryStore(SCHEDULING).tenants

    assert {call for call in dir(book) if not call.startswith("_")} == TENANT_READS | TENANT_CHANGES.keys()


@pytest.mark.parametrize("call", sorted(TENANT_CHANGES))
async def test_a_change_of_tenants_that_was_given_up_changes_nothing_when_it_is_delivered(
    call: str, store: RedisStore, proxy: HoldingProxy, server_url: str
) -> None:
    with redis.Redis.from_url(server_url) as client:
        client.flushdb()
        book, edition = await _book(store)
        proxy.mark = OF_A_SCRIPT
        before = _kept(client)
        assert len(before) == 3

        await _comes_late(TENANT_CHANGES[call](book, edition), proxy)

        assert _kept(client) == before


_RUNNING = replace(NEW_BATCH.entered(Status.IN_PROGRESS, 1), lines=40)
_FILE = FileRecord(file_id="file-2", tenant="acme", name="a", purpose="batch", size_bytes=1, created_s=1)
BATCH_READS = frozenset(
    {"file", "files", "batch", "batches", "open", "progress", "ranges_done", "done", "claims", "now_s"}
)
BATCH_CHANGES: dict[str, Callable[[BatchBook, Claim], Awaitable[Any]]] = {
    "put_file": lambda book, _: book.put_file(_FILE),
    "remove_file": lambda book, _: book.remove_file("acme", "file-1"),
    "create": lambda book, _: book.create(replace(NEW_BATCH, batch_id="batch_2")),
    "change": lambda book, _: book.change(_RUNNING, _RUNNING.cancelled(2)),
    "claim": lambda book, _: book.claim(_RUNNING, "1", "late", 60_000),
    "renew": lambda book, claim: book.renew(claim, 90_000),
    "give_back": lambda book, claim: book.give_back(claim),
    "exchange_lines": lambda book, _: book.exchange_lines("one", {"default/a": 3}),
    "begin_cleaning": lambda book, _: book.begin_cleaning(60),
    "unnamed": lambda book, _: book.unnamed(["file-9"]),
    "finish_range": lambda book, claim: book.finish_range(_RUNNING, claim, RangeDone("late", 16, 0)),
}


async def _batch_book(store: RedisStore) -> tuple[BatchBook, Claim]:
    """A book in which every call has something to change."""
    book = store.batches
    await book.put_file(replace(_FILE, file_id="file-1"))
    await book.create(NEW_BATCH)
    assert await book.change(NEW_BATCH, _RUNNING)
    claim = await book.claim(_RUNNING, "0", "one", 60_000)
    assert claim is not None
    return book, claim


def test_every_call_of_the_book_of_batches_is_known_to_read_or_is_tried_late() -> None:
    book = MemoryStore(SCHEDULING).batches

    assert {call for call in dir(book) if not call.startswith("_")} == BATCH_READS | BATCH_CHANGES.keys()


@pytest.mark.parametrize("call", sorted(BATCH_CHANGES))
async def test_a_change_of_batches_that_was_given_up_changes_nothing_when_it_is_delivered(
    call: str, store: RedisStore, proxy: HoldingProxy, server_url: str
) -> None:
    with redis.Redis.from_url(server_url) as client:
        client.flushdb()
        book, claim = await _batch_book(store)
        proxy.mark = OF_A_SCRIPT
        before = _kept(client)

        await _comes_late(BATCH_CHANGES[call](book, claim), proxy)

        assert _kept(client) == before


async def _comes_late(call: Awaitable[object], proxy: HoldingProxy) -> None:
    """Have a call given up, deliver it then, and wait until it is refused."""
    with pytest.raises(StoreUnavailableError):
        await call
    assert proxy.holds, "the call was under way"
    proxy.deliver()
    await _replied(proxy)
    assert b"LATE" in proxy.replies


async def _replied(proxy: HoldingProxy) -> None:
    async with asyncio.timeout(60):
        while b"LATE" not in proxy.replies:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_call_that_is_held_for_less_than_its_time_is_carried_out(pool: PoolStore, proxy: HoldingProxy) -> None:
    await pool.members.put_instance(instance("a"))
    proxy.mark = OF_A_SCRIPT

    placing = asyncio.create_task(pool.place(placement("r", "a")))
    async with asyncio.timeout(60):
        while not proxy.holds:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    proxy.deliver()

    assert (await placing).status == "dispatched"


@pytest.mark.parametrize("call", ["place", "heartbeat"])
async def test_a_call_after_one_that_was_given_up_is_carried_out(
    call: str, pool: PoolStore, proxy: HoldingProxy, server_url: str
) -> None:
    with redis.Redis.from_url(server_url) as client:
        lease = await _filled(pool, client)
        proxy.mark = OF_A_SCRIPT
        with pytest.raises(StoreUnavailableError):
            await CHANGES[call](pool, lease)
        proxy.open_for_new()

        async with asyncio.timeout(60):
            while True:
                try:
                    await CHANGES[call](pool, lease)
                    break
                except StoreUnavailableError:
                    await asyncio.sleep(0.01)

        assert "late" in {
            *await pool.records(["late"]),
            *(each.replica_id for each in (await pool.overview()).replicas),
        }


def test_every_call_of_the_ledger_of_allotments_is_known_to_read_or_is_tried_late() -> None:
    ledger = MemoryStore(SCHEDULING).allotments

    assert {call for call in dir(ledger) if not call.startswith("_")} == {"entry", "scan", "enter"}


async def test_an_entry_of_the_ledger_that_was_given_up_is_not_made_when_it_is_delivered(
    store: RedisStore, proxy: HoldingProxy, server_url: str
) -> None:
    with redis.Redis.from_url(server_url) as client:
        client.flushdb()
        assert await store.allotments.enter("other/requests/minute", LedgerEntry(), LedgerEntry(1, 60, {"a": 60}))
        before, former = _kept(client), await store.allotments.entry("acme/requests/minute")
        proxy.mark = OF_A_SCRIPT

        await _comes_late(store.allotments.enter("acme/requests/minute", former, LedgerEntry(1, 60, {"a": 60})), proxy)

        assert _kept(client) == before
