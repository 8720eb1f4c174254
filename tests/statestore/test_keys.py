"""Names of keys: one hash tag per pool, readable, made in one place."""

from __future__ import annotations

import re
from pathlib import Path

import redis
from redis.crc import key_slot

from statestore.keys import PoolKeys
from statestore.redis import RedisStore
from statestore.settings import StoreSettings
from tests.statestore.samples import SCHEDULING, instance, reservation

ROOT = Path(__file__).parents[2]


def test_all_keys_of_a_pool_share_a_slot_and_pools_do_not() -> None:
    first, second = PoolKeys("dualmap", "first"), PoolKeys("dualmap", "second")

    slots = {key_slot(key) for key in (first.meta, first.requests, first.arrivals, *first.account("a:8000"))}

    assert len(slots) == 1
    assert key_slot(second.meta) not in slots


def test_keys_are_readable() -> None:
    keys = PoolKeys("dualmap", "default")

    assert keys.account("npu-0").queue == b"dualmap:{default}:queue:npu-0"
    assert keys.grants_channel_of("router-1") == b"dualmap:{default}:grants:router-1"


async def test_every_key_that_a_fleet_makes_is_described(valkey_url: str) -> None:
    described = set(
        re.findall(r"^\| \[`([a-z:]+?)(?::ID)?`\]", (ROOT / "docs/redis-keys.md").read_text(), re.MULTILINE)
    )
    store = RedisStore(StoreSettings(url=valkey_url), scheduling=SCHEDULING)
    await store.open()
    pool = store.pool("default")
    await pool.put_instance(instance("a", dispatch_window_tokens=1))
    await pool.heartbeat("one", 1000, {})
    await pool.acquire_lease("worker", 1000)
    for request_id in ("sent", "held"):
        await pool.reserve(reservation(request_id, overloaded=True))
    await store.close()

    with redis.Redis.from_url(valkey_url) as client:
        made = {key.decode().removeprefix("dualmap:{default}:").removesuffix(":a") for key in client.scan_iter()}

    assert made <= described
    assert len(made) >= 9


def test_nothing_else_formats_a_key() -> None:
    formatting = re.compile(r"\{\{|:queue:|:instance:|:kv:")
    offenders = [
        path.relative_to(ROOT)
        for path in (ROOT / "statestore").rglob("*.py")
        if path.name != "keys.py" and formatting.search(path.read_text())
    ]

    assert offenders == []
