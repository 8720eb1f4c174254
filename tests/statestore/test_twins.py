"""Rules that stand in Python and, written by hand, in the scripts: both give the same, on every server.
``docs/contribute/scripts.md`` lists them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import redis

from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.prompts.cache_groups import ends_left, last_end
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_order import QueueEntry, QueueHead, QueueOrder, plan_queue
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState, Role
from dualmap.scheduling.state.legs import Leg, serves
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.tenants.allotments import in_force
from dualmap.scheduling.tenants.budgets import KINDS
from dualmap.scheduling.tenants.shares import grown
from dualmap.statestore.keys import KEY_NAMES, PoolKeys
from dualmap.statestore.kv_views import KvChange
from dualmap.statestore.leases import lease_runs
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool.codec import BUDGET, WORK, budget_used, is_inner, period_at
from dualmap.statestore.pool.scripts import load_scripts
from dualmap.statestore.pool.usage import day_of
from dualmap.statestore.records import InstanceRecord, listed_as
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.statestore.samples import DEADLINE, SCHEDULING, HandClock, chain, finish, first_token, instance, place

NOW_MS = 1_795_369_287_264
MODULES = "\n".join(
    source.source.rpartition("\n")[0]
    for name, source in load_scripts(SCHEDULING).by_name.items()
    if name == "place_requests"
)
"""The modules of the script that uses most of them, without its run."""
CASES = 100


def said_in_lua(url: str, expression: str, cases: Sequence[Sequence[Any]]) -> list[Any]:
    """The value of an expression of the modules for each case, of which it has the values as ``a``, ``b``, …"""
    names = ", ".join("abcdef"[: len(cases[0])])
    code = f"""{MODULES}
    local reply = {{}}
    for place, case in ipairs(cjson.decode(ARGV[1])) do
      local {names} = unpack(case)
      local found = {expression}
      reply[place] = type(found) == 'number' and string.format('%.17g', found) or found and tostring(found) or 'false'
    end
    return reply"""
    with redis.Redis.from_url(url) as client:
        return [json.loads(each) for each in client.eval(code, 1, "pool:", json.dumps([*map(list, cases)]))]


def test_a_lease_runs_in_both(server_url: str) -> None:
    rng = random.Random(1)
    cases = [(NOW_MS + rng.randrange(-900, 4000), rng.choice((0, 1000)), NOW_MS) for _ in range(CASES)]

    found = said_in_lua(server_url, "loaded['shared.leases'].lease_runs(a, b, c)", cases)

    assert found == [lease_runs(*each) for each in cases]


def test_an_instance_takes_requests_of_a_leg_in_both(server_url: str) -> None:
    cases = [(state, role, leg) for state in InstanceState for role in Role for leg in Leg]

    found = said_in_lua(server_url, "loaded['shared.instances'].takes_requests({ state = a, role = b }, c)", cases)

    assert found == [state is InstanceState.READY and serves(role, leg) for state, role, leg in cases]


def test_an_instance_has_room_in_both(server_url: str) -> None:
    rng = random.Random(2)
    cases = [
        (rng.choice([*InstanceState]), rng.randrange(9), rng.randrange(1, 9), rng.randrange(4), rng.randrange(1, 4))
        for _ in range(CASES)
    ]
    counts = "dispatched_tokens = b, dispatch_window_tokens = c, running_requests = d, max_running_requests = e"

    found = said_in_lua(server_url, f"loaded['shared.instances'].has_room({{ state = a, {counts} }})", cases)

    in_order, entries = queue_order_of(SCHEDULING), (QueueEntry("r", NOW_MS, 1),)
    loads = [
        InstanceLoad(
            "a",
            state,
            dispatched_tokens=sent,
            dispatch_window_tokens=window,
            running_requests=ran,
            max_running_requests=most,
        )
        for state, sent, window, ran, most in cases
    ]
    assert found == [bool(plan_queue(QueueHead(NOW_MS, load, entries), in_order).steps) for load in loads]


def test_tokens_left_to_prefill_are_the_same_in_both(server_url: str) -> None:
    rng = random.Random(3)
    cases = [(rng.randrange(1, 2000), rng.choice((16, 37, 128)), rng.randrange(130)) for _ in range(CASES)]

    found = said_in_lua(server_url, "loaded['shared.kv'].prefill_tokens(a, b, c)", cases)

    assert found == [Chain((), block, prompt).uncached_tokens(hit) for prompt, block, hit in cases]


async def test_a_hit_of_an_instance_with_groups_is_the_same_in_both() -> None:
    """Where each block of a chain is not listed, a hit end or inner, and what a prompt leaves there."""
    rng, clock = random.Random(11), HandClock()
    pool = MemoryStore(SCHEDULING, now_ms=clock).pool("default")
    await pool.kv_events.renew_subscriber("worker", 10**9)
    hits: list[int] = []
    for number in range(CASES):
        name, blocks = f"i{number}", range(1, rng.randrange(2, 130))
        await pool.members.put_instance(instance(name))
        record = await pool.kv_events.claim(name, "worker")
        assert record is not None
        reported = rng.randrange(len(blocks) + 1)
        inner: list[bool | None] = [rng.random() < 0.97 if block <= reported else None for block in blocks]
        held = [[block for block in blocks if inner[block - 1] is wanted] for wanted in (False, True)]
        step = rng.choice((100, 200, 300))
        change = KvChange(0, 1.0, held[0], inner=held[1], hit_step_tokens=step)
        await pool.kv_events.apply(name, record.fence, change)
        prompt = chain(*blocks, prompt_tokens=100 * len(blocks) + rng.choice((0, 50)))
        hit = last_end(inner, (prompt.prompt_tokens - 1) // 100)

        found = (await pool.observe([name], prompt)).loads[name].hit_blocks
        placed = await place(pool, name, name, chain=prompt)
        stamps = await pool._calls.command(
            "ZMSCORE", pool._keys.kv(name), *(each.to_bytes(8, "big") for each in blocks)
        )

        assert (found, placed.chosen.uncached_tokens) == (hit, prompt.uncached_tokens(hit))
        ends = ends_left(prompt.prompt_tokens, 100, step, hit, reported)
        booked = blocks[reported:]
        assert [not is_inner(float(stamps[block - 1])) for block in booked] == [block in ends for block in booked]
        hits.append(hit)
    assert sum(0 < each < 100 for each in hits) > 20


def test_what_is_used_of_a_budget_is_the_same_in_both(server_url: str) -> None:
    rng = random.Random(4)
    since = (0, NOW_MS - 3000, NOW_MS + 50, period_at("day", NOW_MS), period_at("month", NOW_MS))
    cases = [
        (kind, rng.choice((0, rng.randrange(9000))), rng.choice(since), rng.choice((0.0, rng.uniform(0.0, 90.0))))
        for kind in range(len(KINDS))
        for _ in range(20)
    ]
    book = "{ false, 0, 0, 0, 0, 0, 0, 0, a, b, c }"

    found = said_in_lua(server_url, f"loaded['shared.budgets'].settle({book}, 9, d, {NOW_MS})", cases)

    written = [WORK.pack(*[0.0] * 7) + BUDGET.pack(kind, used, begun) for kind, used, begun, _ in cases]
    wanted = [budget_used(text, kind, NOW_MS, leak) for text, (kind, _, _, leak) in zip(written, cases, strict=True)]
    assert found == pytest.approx(wanted, rel=1e-12)


def test_days_and_months_are_the_same_in_both(server_url: str) -> None:
    rng = random.Random(5)
    cases = [(rng.randrange(4_102_444_800_000),) for _ in range(CASES)]

    days = said_in_lua(server_url, "'\"' .. loaded['shared.calendar'].utc_day(a) .. '\"'", cases)
    months = said_in_lua(server_url, "loaded['shared.calendar'].utc_month(a)", cases)

    assert days == [day_of(at_ms).isoformat() for (at_ms,) in cases]
    assert months == [period_at("month", at_ms) for (at_ms,) in cases]


def test_the_part_of_a_divided_budget_is_the_same_in_both(server_url: str) -> None:
    rng = random.Random(6)
    cases = [(rng.randrange(5000), rng.choice((6000, 9000)), rng.choice((6000, 7000))) for _ in range(CASES)]

    text = "a .. ' ' .. b .. ' 1 0'"
    found = said_in_lua(server_url, f"(loaded['shared.allotments'].part_of({text}, c, 0))", cases)

    assert found == [in_force(*each) for each in cases]


def test_work_decays_and_held_memory_adds_to_it_in_both(server_url: str) -> None:
    rng = random.Random(8)
    cases = [(rng.uniform(0.0, 90.0), rng.choice((0.0, rng.random())), rng.randrange(200_000)) for _ in range(CASES)]
    text = f"struct.pack('{WORK.format}', 0, a, {NOW_MS}, 1, {NOW_MS}, b, 0)"
    book = f"""(function()
      redis.call('HSET', KEYS[1] .. '{KEY_NAMES["books"]}', 'acme', {text})
      local books = loaded['shared.books']
      books.begin()
      books.read_books({{ 'acme' }}, {NOW_MS} + c)
      return books.kept.books.acme[books.GIVEN]
    end)()"""

    found = said_in_lua(server_url, book, cases)

    assert found == pytest.approx([grown(work_s, held, NOW_MS, NOW_MS + ms) for work_s, held, ms in cases], rel=1e-9)


@pytest.mark.parametrize("stamp", ["work_since_ms", "running_since_ms"])
def test_work_begins_in_both(server_url: str, stamp: str) -> None:
    records = [
        InstanceRecord(
            "ready", "mixed", 1, 1, 1, 1, 1.0, pending_tokens=pending, deferred_tokens=deferred, running_requests=ran
        )
        for pending, deferred, ran in itertools.product((0, 7), (0, 7), (0, 1))
    ]
    requests = [
        StoredRequest(
            "r",
            "one",
            "a",
            state,
            1,
            uncached_tokens=5,
            prompt_tokens=9,
            expected_output_tokens=3,
            slo_ms=1,
            deferred=deferred,
        )
        for state, deferred in itertools.product(RequestState, (False, True))
    ]
    told = {"prompt_tokens": 9, "stored_tokens": 0, "expected_output_tokens": 3}
    cases = [
        ({**asdict(record), "id": "a"}, {**asdict(request), "deferred": int(request.deferred), "id": "r", "told": told})
        for record, request in itertools.product(records, requests)
    ]

    found = said_in_lua(
        server_url,
        f"(function() loaded['shared.requests'].enter(a, b, 1, {NOW_MS}) return a.{stamp} == {NOW_MS} end)()",
        cases,
    )

    assert found == [stamp in record.begins(request.counts) for record, request in itertools.product(records, requests)]


async def test_a_held_request_is_listed_by_the_script_as_python_lists_it(server_url: str) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=DEADLINE)
    await store.open()
    pool, order, keys = store.pool("default"), queue_order_of(DEADLINE), PoolKeys("dualmap", "default")
    await pool.members.put_instance(instance("a", dispatch_window_tokens=1, max_running_requests=1))
    await place(pool, "first")
    await place(pool, "held", rank_ms=order.rank_ms(5000), slo_ms=5000, band=3)

    held = (await pool.records(["held"]))["held"]
    listed = await pool._calls.command("ZRANGE", keys.queue("a"), 0, -1, "WITHSCORES")

    await store.close()
    assert (listed[0].decode(), int(listed[1])) == (listed_as(held), order.rank_of(held))


async def test_what_goes_at_once_is_what_a_plan_of_its_queue_would_dispatch() -> None:
    """One that is held although a plan would dispatch it is planned at once: the reply has the queue."""
    clock, rng = HandClock(), random.Random(7)
    pool, order = MemoryStore(DEADLINE, now_ms=clock).pool("default"), queue_order_of(DEADLINE)
    seen: dict[bool, int] = {True: 0, False: 0}
    for number in range(600):
        name = f"i{number}"
        spec = instance(
            name,
            dispatch_window_tokens=rng.choice((200, 900)),
            max_running_requests=rng.randrange(1, 5),
            kv_capacity_tokens=rng.choice((900, 5000)),
            prefill_tokens_per_s=rng.choice((100.0, 1000.0)),
        )
        await pool.members.put_instance(spec)
        for before in range(rng.randrange(4)):
            asked = f"{name}-{before}"
            reply = await place(pool, asked, name, slo_ms=10**6, rank_ms=10**6, defers=True, chain=_chain(rng))
            if reply.status is PlaceStatus.DISPATCHED and rng.random() < 0.7:
                await first_token(pool, asked, name)
            elif reply.status is PlaceStatus.HELD:
                await finish(pool, asked)
        load = (await pool.queue_head(name)).load
        slo_ms, asked_chain = rng.choice((50, 800, 60_000)), _chain(rng)
        reply = await place(pool, name, name, slo_ms=slo_ms, rank_ms=slo_ms, defers=True, chain=asked_chain)
        tokens = reply.chosen.uncached_tokens
        waiting = replace(load, pending_tokens=load.pending_tokens + tokens, queued_requests=1)
        entry = QueueEntry(name, clock.now_ms + slo_ms, tokens)
        goes = reply.status is PlaceStatus.DISPATCHED
        assert not goes or _is_dispatched(QueueHead(clock.now_ms, waiting, (entry,)), order), (load, entry)
        seen[goes] += 1
    assert min(seen.values()) > 50


def _is_dispatched(queue: QueueHead, order: QueueOrder) -> bool:
    """Whether the plan of a queue of one dispatches it, or that which follows one that defers it."""
    steps = plan_queue(queue, order).steps
    if steps and steps[0].deferred_to_ms is not None:
        (entry,), load = queue.entries, queue.load
        late = QueueEntry.at(entry.request_id, steps[0].deferred_to_ms, entry.uncached_tokens)
        deferring = replace(load, deferred_tokens=load.deferred_tokens + entry.uncached_tokens)
        steps = plan_queue(QueueHead(queue.now_ms, deferring, (late,)), order).steps
    return bool(steps)


def _chain(rng: random.Random) -> Chain:
    first = rng.randrange(10**6)
    return chain(*range(first, first + rng.choice((1, 3, 6))))
