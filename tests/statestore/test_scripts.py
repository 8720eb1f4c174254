"""The scripts' files: names tell their keys, includes resolve, headers say what a reader needs."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
import redis

from statestore.base import RequestState
from statestore.keys import PoolKeys
from statestore.redis import RedisStore
from statestore.scripts import load_scripts
from statestore.settings import StoreSettings
from tests.statestore.samples import CHAIN, SCHEDULING, chain, instance, reservation

SCRIPTS = load_scripts()


def test_every_script_file_is_loaded_under_its_verb_and_noun() -> None:
    names = {entry.name for entry in (files("statestore") / "lua").iterdir() if entry.name.endswith(".lua")}

    assert len(SCRIPTS) == len(names)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)+", name) for name in SCRIPTS)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_says_its_keys_arguments_reply_and_clock(name: str) -> None:
    source = SCRIPTS[name].source

    for heading in ("-- KEYS ", "-- ARGV ", "-- Reply ", "-- Clock "):
        assert heading in source


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_uses_the_keys_that_its_name_counts(name: str) -> None:
    script = SCRIPTS[name]
    used = [int(index) for index in re.findall(r"KEYS\[(\d+)\]", script.source)]
    used += [int(first) + 4 for first in re.findall(r"(?<!function )read_account\((\d+)", script.source)]
    used += [int(first) + 3 for first in re.findall(r"(?<!function )read_load\((\d+)", script.source)]

    from_the_end = [1 + int(back or 0) for back in re.findall(r"KEYS\[#KEYS(?: - (\d+))?\]", script.source)]

    if script.key_count is not None:
        assert max(used) + max(from_the_end, default=0) == script.key_count


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_includes_are_resolved_and_no_script_writes_a_global(name: str) -> None:
    source = SCRIPTS[name].source

    assert "-- include:" not in source
    assert not re.findall(r"^function ", source, re.MULTILINE), "functions are local: Redis refuses globals"


def test_the_modules_name_shared_scripts_that_exist() -> None:
    room = Path(str(files("statestore")))
    texts = [module.read_text("utf-8") for module in room.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"``shared/(\w+)\.lua``", text)} - {"name"}  # any name

    assert named
    assert named <= {script.stem for script in room.glob("lua/shared/*.lua")}


async def test_scripts_the_server_forgot_are_loaded_again(valkey_url: str) -> None:
    store = RedisStore(StoreSettings(url=valkey_url), scheduling=SCHEDULING)
    await store.open()
    pool = store.pool("default")
    await pool.put_instance(instance("a"))
    with redis.Redis.from_url(valkey_url) as client:
        client.script_flush()

    outcome = await pool.reserve(reservation("r"))
    released = await pool.first_token("r", "a", CHAIN)
    await store.close()

    assert (outcome.status, released) == ("dispatched", True)


async def test_the_chain_of_a_request_that_was_deleted_by_hand_does_not_outlive_its_adoption(valkey_url: str) -> None:
    store = RedisStore(StoreSettings(url=valkey_url), scheduling=SCHEDULING)
    await store.open()
    pool = store.pool("default")
    await pool.put_instance(instance("a", dispatch_window_tokens=1))
    for request_id in ("running", "held"):
        await pool.reserve(reservation(request_id))
    held = (await pool.records(["held"]))["held"]
    with redis.Redis.from_url(valkey_url) as client:
        client.hdel(PoolKeys("dualmap", "default").requests, "held")
    await pool.adopt([held])

    released = await pool.first_token("running", "a", CHAIN)

    granted = (await pool.records(["held"]))["held"]
    await store.close()
    assert released
    assert (granted.state, granted.uncached_tokens) == (RequestState.DISPATCHED, 400)


async def test_an_instance_whose_key_was_evicted_begins_again_with_an_empty_cache(valkey_url: str) -> None:
    store = RedisStore(StoreSettings(url=valkey_url), scheduling=SCHEDULING)
    await store.open()
    pool = store.pool("default")
    small = instance("a", kv_capacity_tokens=400)
    await pool.put_instance(small)
    await pool.reserve(reservation("former", chain=CHAIN))
    await pool.finish("former")
    with redis.Redis.from_url(valkey_url) as client:
        client.delete(PoolKeys("dualmap", "default").account("a").account)

    await pool.put_instance(small)
    latest = chain(21, 22, 23)
    await pool.reserve(reservation("latest", chain=latest))

    hits = [(await pool.observe(["a"], each)).loads["a"].hit_blocks for each in (CHAIN, latest)]
    await store.close()
    assert hits == [0, 3]
