"""Names of keys: one hash tag per pool, readable, made in one place."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from redis.crc import key_slot

from dualmap.scheduling.batches.batch import RangeDone, Status
from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, PullEnd, Tier
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.queues.queue_order import DEFERRED_RANK_MS, PlanStep, QueuePlan
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.revisions.weights import Home, with_weights
from dualmap.scheduling.runs.turn import RunName, Turn, TurnEnd
from dualmap.scheduling.scaling.scale_record import ScaleEntry, ScaleRecord
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter
from dualmap.scheduling.tenants.allotments import Division
from dualmap.scheduling.tenants.budgets import Budget, Draw, Draws, Limit, Measure, Period, drawn_text
from dualmap.scheduling.tenants.shares import Share
from dualmap.statestore.batches.batch_book import BatchBook, FileRecord
from dualmap.statestore.call_values import DiscoveryStatus
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import KvChange, KvViewStatus, TierChange
from dualmap.statestore.pool import PoolStore, revisions, scripts, stored_responses
from dualmap.statestore.pool.allotments import Allotment
from dualmap.statestore.pool.chronicle import ChronicleRecord, Happened, PoolSample
from dualmap.statestore.pool.runs import TurnStatus
from dualmap.statestore.pool.stored_responses import StoredConversation
from dualmap.statestore.records import INSTANCE, PLACED, REPORTED
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.tenants.allotment_ledger import LedgerEntry
from dualmap.statestore.tenants.tenant_book import Edition
from tests.statestore.samples import (
    CHAIN,
    LEAST_TTFT,
    SCHEDULING,
    chain,
    finish,
    first_token,
    instance,
    lead,
    place,
    placement,
    record,
)
from tests.support.batches import NEW_BATCH

ROOT = Path(__file__).parents[2]
DESCRIPTION = (ROOT / "docs/reference/redis-keys.md").read_text("utf-8")


def test_all_keys_of_a_pool_share_a_slot_and_pools_do_not() -> None:
    first, second = PoolKeys("dualmap", "first"), PoolKeys("dualmap", "second")

    of_first = (first.meta, first.arrivals, first.request("r"), first.queue("a:8000"), first.kv("a:8000"))
    slots = {key_slot(key) for key in of_first}

    assert len(slots) == 1
    assert key_slot(second.meta) not in slots


def test_keys_are_readable() -> None:
    keys = PoolKeys("dualmap", "default")

    assert keys.queue("npu-0") == b"dualmap:{default}:queue:npu-0"
    assert keys.request("chatcmpl-3") == b"dualmap:{default}:request:chatcmpl-3"
    assert keys.grants("router-1") == b"dualmap:{default}:grants:router-1"


async def pulled(pool: PoolStore) -> None:
    """A request pulls its prompt from an instance that leaves."""
    for name in ("source", "target"):
        await pool.members.put_instance(instance(name))
        end = PullEnd(name, 5710, "x", LoadPrice(0.0, 1e-6))
        await pool.tiers.describe(name, InstanceTiers(pulls=end))
    prompt = chain(*range(31, 37), prompt_tokens=601)
    await place(pool, "had", "source", chain=prompt)
    await first_token(pool, "had", "source")
    await pool.members.set_instance_state("source", InstanceState.DRAINING)
    reply = await place(pool, "pulls", "source", "target", chain=prompt, weights=LEAST_TTFT)
    assert reply.chosen.loads.source is not None


async def live_through_everything(pool: PoolStore) -> None:
    """Do everything that leaves a key or a field behind, at least once."""
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name, dispatch_window_tokens=1, adapter_slots=1))
    await pool.heartbeat("one", 60_000, {})
    fence = await lead(pool)
    await place(pool, "over", account="acme ci - m")
    await first_token(pool, "over", "a", note='{"features": null}')
    await finish(pool, "over", note='{"text_bytes": 9, "tokens": 2}', used="1 9 0 2 0 0 0 completed reported")
    await pool.register(placement("lost", account="acme ci - m").request, None)
    lease = await pool._calls.command("HGET", pool._keys.replicas, "one")
    await pool.release([Release("lost", replica_id="one", used="1 0 0 0 0 1 0 lost expected")], lease=lease)
    await pool.observe(["a"], CHAIN)
    await place(pool, "sent", "a", "b", adapter="sql")
    await first_token(pool, "sent", "a")
    limit = Limit(Measure.REQUESTS, Period.IN_FLIGHT, 8)
    division = Division(("default", "other"), 0, begins=True)
    draws = Draws.of(Draw(Budget("acme/requests/in_flight", limit, division), 1))
    await pool.allotments.allot(Allotment("other/requests/in_flight", 8, 4, 1, 4))
    await pool.register(placement("passed on", account="acme ci - m").request, None)
    about = {"tenant": "acme", "drawn": drawn_text(draws), "shares_as": "acme"}
    await place(pool, "drawing", "a", draws=draws, share=Share("acme", 1.0, 2), **about)
    await place(pool, "busy", "a", leg=Leg.PREFILL)
    for request_id in ("held", "moves", "late"):
        await place(pool, request_id, "a", "b", slo_ms=1, rebalances=True)
    await pool.queues.migrate(await record(pool, "moves"), "b", reason="rebalance", fence=fence)
    queue = await pool.queue_head("a")
    assert queue is not None
    await pool.commit(QueuePlan("a", queue.load.version, (PlanStep("late", DEFERRED_RANK_MS),)))
    await pool.publications.publish_tree(HotnessTree({CHAIN.hashes[0]: 1}), {}, fence=fence)
    await pool.publications.publish_learned(Learned(), {}, fence=fence)
    await pool.members.note_instance("b", "connection refused", fence=fence)
    await pool.members.add_name("sql", "lora")
    await pool.adapters.restore({"chat": RegisteredAdapter("/adapters/chat")})
    await pool.adapters.note_failure("a", "chat", "it answered 404")
    await pool.settings.change({"max_hold_s": 9.0}, by="one")
    await pool.revisions.change(lambda known: with_weights(known, {"v1": 100.0}), "v1 100 %", by="one")
    for name in "abc":
        await pool.revisions.settle(name, Home("v1", 1), None)
    for response in ("first", "second", "third"):
        await pool.responses.keep(response, StoredConversation(7))
    await pool.tiers.describe("b", InstanceTiers((InstanceTier(Tier.HOST, 1000, LoadPrice(0.01, 1e-6)),)))
    await pulled(pool)
    await turns_wait(pool)
    await pool.kv_events.renew_subscriber("worker-1", 60_000)
    claim = await pool.kv_events.claim("a", "worker-1")
    assert claim is not None
    await pool.kv_events.mark("a", claim.fence, KvViewStatus.EXACT)
    await pool.kv_events.apply(
        "a", claim.fence, KvChange(0, 1.0, [9], (), {b"name": b"known"}, tiers={Tier.HOST: TierChange([9], [8], 9)})
    )
    await pool.chronicle.record(ChronicleRecord(1), PoolSample(1, 5.0), [Happened(1, "state", "words")], after=None)
    await pool.chronicle.member_changed("ada", "drain", "a")
    status = DiscoveryStatus(at_ms=1, state="watching", pods=2)
    await pool.publications.record_discovery(status, fence=fence)
    await pool.publications.record_scaling(
        ScaleRecord(decision_id=1), ScaleEntry(1, 1, "decided", "1 -> 2"), fence=fence
    )
    await pool.publications.record_scaling(
        ScaleRecord(role="decode", decision_id=1), ScaleEntry(1, 1, "decided", "decode: 1 -> 2"), fence=fence
    )


async def turns_wait(pool: PoolStore) -> None:
    """Let some runs end their turns and others wait, one of them late."""
    waits_s = (9.0, 9.0, 9.0, 9.0, 9.0, 0.0)
    turns = [
        Turn(f"t{number}", "one", RunName(f"r{number}"), chain(*range(10 * number, 10 * number + 3)), each)
        for number, each in enumerate(waits_s)
    ]
    statuses = await pool.runs.admit(turns, 1300)
    ended = [turn for turn, status in zip(turns, statuses, strict=True) if status is TurnStatus.GOES]
    for turn in ended:
        await place(pool, turn.turn_id, "a", chain=turn.chain)
        await pool.release([Release(turn.turn_id, replica_id="one", turn=TurnEnd(turn.turn_id, "one", 5))])
    await pool.runs.admit([replace(turns[0], turn_id="again"), *turns[len(ended) :]], 1300)


async def live_through_a_batch(book: BatchBook) -> None:
    running = replace(NEW_BATCH.entered(Status.IN_PROGRESS, 1), lines=40)
    await book.put_file(
        FileRecord(file_id="file-1", tenant="acme", name="a", purpose="batch", size_bytes=1, created_s=1)
    )
    await book.create(NEW_BATCH)
    await book.change(NEW_BATCH, running)
    for task in ("0", "1"):
        claim = await book.claim(running, task, "one", 10_000)
        assert claim is not None
    assert await book.finish_range(running, claim, RangeDone("p", 16, 0))
    await book.exchange_lines("one", {"default/a": 3})
    await book.unnamed(["file-9"])


@pytest.fixture
async def lived_in(server_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A client of a server on which a pool lived through everything."""
    monkeypatch.setattr(stored_responses, "STORED_RESPONSES", 2)
    monkeypatch.setattr(scripts, "PREFIX_SAMPLES", 4)
    monkeypatch.setattr(revisions, "MAX_HOMES", 1)
    monkeypatch.setattr(scripts, "MAX_CONTEXTS", 1)
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING)
    await store.open()
    await live_through_everything(store.pool("default"))
    await store.tenants.change(Edition(), {"acme": b"{}"}, by="ada", action="create", before={}, after={})
    await store.allotments.enter("acme/requests/in_flight", LedgerEntry(), LedgerEntry(1, 8, {"default": 8}))
    await live_through_a_batch(store.batches)
    await store.close()
    with redis.Redis.from_url(server_url) as client:
        yield client


def test_every_key_that_a_fleet_makes_is_described_and_no_other(lived_in: Any) -> None:
    described = set(
        re.findall(r"^\| \[`([a-z_:]+?)(?::TIER)?(?::ID|:ROLE|:DAY|:NAME|:TENANT)?`\]", DESCRIPTION, re.MULTILINE)
    )

    names = (re.sub(r"^dualmap:\{(default|fleet)\}:", "", key.decode()) for key in lived_in.scan_iter())
    of_one = "queue|queue_log|run|running|kv|kv_tier|adapters|kv_events|kv_names|least_loaded|request|usage"
    of_one += "|batches:(?:of|files|claims|done)"
    made = {re.sub(rf"^({of_one}):(?!log|lost).*", r"\1", name) for name in names}

    assert made == described


def test_every_field_that_a_fleet_makes_is_described_and_no_other(lived_in: Any) -> None:
    keys = PoolKeys("dualmap", "default")
    requests = [keys.request(name) for name in ("sent", "busy", "held", "moves", "late")]
    made = {
        "meta": [field.decode() for field in lived_in.hkeys(keys.meta)],
        "instances": [*orjson.loads(lived_in.hget(keys.instances, "a"))],
        "instances:records": [*INSTANCE.fields(lived_in.hget(keys.instance_records, "a"))],
        "learned": [field.decode() for field in lived_in.hkeys(keys.learned)],
        "kv_events:ID": [field.decode() for field in lived_in.hkeys(keys.kv_events("a"))],
        "request:ID": [
            *(name for key in requests for name in PLACED.fields(lived_in.hget(key, "placed"))),
            *(name for key in requests for name in REPORTED.fields(lived_in.hget(key, "told"))),
        ],
    }

    assert {name: set(fields) for name, fields in made.items()} == {name: fields_described(name) for name in made}


def fields_described(name: str) -> set[str]:
    """The rows of the table in the key's section."""
    section = DESCRIPTION.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    return {field for row in rows for field in re.findall(r"`(\w+)`", row)}


def test_nothing_else_formats_a_key() -> None:
    formatting = re.compile(r":\{\{|:queue:|:kv:|:request:")
    offenders = [
        path.relative_to(ROOT)
        for path in (ROOT / "dualmap" / "statestore").rglob("*.py")
        if path.name != "keys.py" and formatting.search(path.read_text())
    ]

    assert offenders == []
