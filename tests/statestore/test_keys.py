"""Names of keys: one hash tag per pool, readable, made in one place."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from scheduling.hotness import HotnessTree
from scheduling.ttft_model import TtftFeatures
from statestore.base import FinishFacts, PoolStore
from statestore.keys import PoolKeys
from statestore.redis import RedisStore
from statestore.settings import StoreSettings
from tests.statestore.samples import CHAIN, SCHEDULING, instance, reservation

ROOT = Path(__file__).parents[2]
DESCRIPTION = (ROOT / "docs/redis-keys.md").read_text("utf-8")


def test_all_keys_of_a_pool_share_a_slot_and_pools_do_not() -> None:
    first, second = PoolKeys("dualmap", "first"), PoolKeys("dualmap", "second")

    slots = {key_slot(key) for key in (first.meta, first.requests, first.arrivals, *first.account("a:8000"))}

    assert len(slots) == 1
    assert key_slot(second.meta) not in slots


def test_keys_are_readable() -> None:
    keys = PoolKeys("dualmap", "default")

    assert keys.account("npu-0").queue == b"dualmap:{default}:queue:npu-0"
    assert keys.grants_channel_of("router-1") == b"dualmap:{default}:grants:router-1"


async def live_through_everything(pool: PoolStore) -> None:
    """Whatever leaves a key or a field behind, at least once."""
    for instance_id in ("a", "b"):
        await pool.put_instance(instance(instance_id, dispatch_window_tokens=1))
    await pool.heartbeat("one", 60_000, {})
    lease = await pool.acquire_lease("worker", 60_000)
    assert lease is not None
    await pool.reserve(reservation("over", ttft_features=TtftFeatures(0, 50, 0, 0)))
    await pool.first_token("over", "a", CHAIN)
    await pool.finish("over", facts=FinishFacts(prompt_bytes=20_000, prompt_tokens=20_000))
    await pool.observe(["a"], CHAIN)
    for request_id, slo_ms in (("sent", 60_000), ("held", 60_000), ("moves", 60_000), ("late", 1)):
        features = TtftFeatures(0, 50, 0, 0)
        await pool.reserve(
            reservation(request_id, alternative_id="b", slo_ms=slo_ms, overloaded=True, ttft_features=features)
        )
    await pool.migrate("moves", "a", "b", reason="rebalance", fence=lease.fence)
    await pool.publish_tree(HotnessTree({CHAIN.hashes[0]: 1}), {}, fence=lease.fence)


@pytest.fixture
async def lived_in(valkey_url: str) -> AsyncIterator[Any]:
    """A client of a server on which a pool lived through everything."""
    scheduling = SCHEDULING.model_copy(update={"policy": "dualmap-wide", "queue_order": "deadline", "holder_marks": 3})
    store = RedisStore(StoreSettings(url=valkey_url), scheduling=scheduling)
    await store.open()
    await live_through_everything(store.pool("default"))
    await store.close()
    with redis.Redis.from_url(valkey_url) as client:
        yield client


def test_every_key_that_a_fleet_makes_is_described_and_no_other(lived_in: Any) -> None:
    described = set(re.findall(r"^\| \[`([a-z:]+?)(?::ID)?`\]", DESCRIPTION, re.MULTILINE))

    made = {re.sub(r"^dualmap:\{default\}:|:[ab]$", "", key.decode()) for key in lived_in.scan_iter()}

    assert made == described


def test_every_field_that_a_fleet_makes_is_described_and_no_other(lived_in: Any) -> None:
    keys = PoolKeys("dualmap", "default")
    made = {
        "meta": lived_in.hkeys(keys.meta),
        "instance:ID": lived_in.hkeys(keys.account("a").account),
        "requests": [field.encode() for text in lived_in.hvals(keys.requests) for field in json.loads(text)],
    }

    assert {name: {field.decode() for field in fields} for name, fields in made.items()} == {
        name: fields_described(name) for name in made
    }


def fields_described(name: str) -> set[str]:
    """Of the table in the key's section."""
    section = DESCRIPTION.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    return {field for row in rows for field in re.findall(r"`(\w+)`", row)}


def test_nothing_else_formats_a_key() -> None:
    formatting = re.compile(r"\{\{|:queue:|:instance:|:kv:")
    offenders = [
        path.relative_to(ROOT)
        for path in (ROOT / "statestore").rglob("*.py")
        if path.name != "keys.py" and formatting.search(path.read_text())
    ]

    assert offenders == []
