"""The scripts' files: includes, names of keys and constants resolve, headers say what a reader needs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import fakeredis
import pytest
import redis

from dualmap.statestore.keys import KEY_NAMES, PoolKeys
from dualmap.statestore.pool.scripts import load_scripts
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.statestore.samples import CHAIN, SCHEDULING, chain, finish, first_token, instance, place

LOADED = load_scripts(SCHEDULING)
SCRIPTS = LOADED.by_name
SHARED = {
    name
    for file in (files("dualmap.statestore") / "lua" / "shared").iterdir()
    for names in re.findall(r"^local (?:function )?(\w+(?:, \w+)*)", file.read_text("utf-8"), re.MULTILINE)
    for name in names.split(", ")
}
AT_EVERY_CALL = {
    name
    for file in (files("dualmap.statestore") / "lua" / "shared").iterdir()
    for names in re.findall(r"^local ([a-z_]+(?:, [a-z_]+)*)(?: =|$)", file.read_text("utf-8"), re.MULTILINE)
    for name in names.split(", ")
}
"""Names of values that every call makes again."""


def has_functions(client: redis.Redis) -> bool:
    return int(client.info("server")["redis_version"].partition(".")[0]) >= 7


async def test_a_server_with_functions_runs_no_script(server_url: str) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING)
    await store.open()
    with redis.Redis.from_url(server_url) as client:
        client.config_resetstat()
        await store.pool("default").members.put_instance(instance("a"))
        await place(store.pool("default"), "r")
        called = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
        assert ("evalsha" in called) != has_functions(client)
        assert ("fcall" in called) == has_functions(client)
    await store.close()


def test_the_library_has_each_script_and_each_shared_definition_once() -> None:
    library = LOADED.library

    assert set(re.findall(r"register_function\('(\w+)'", library)) == {each.function for each in SCRIPTS.values()}
    for defined in SHARED - AT_EVERY_CALL:
        assert len(re.findall(rf"^local (?:function )?{defined}\b", library, re.MULTILINE)) == 1, defined


def test_every_script_file_is_loaded_under_its_verb_and_noun() -> None:
    names = {entry.name for entry in (files("dualmap.statestore") / "lua").iterdir() if entry.name.endswith(".lua")}

    assert len(SCRIPTS) == len(names)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)+", name) for name in SCRIPTS)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_has_the_hash_that_a_server_gives_it(name: str) -> None:
    """Scripts are called by their hash, which is computed here: no server is asked for it first."""
    script = SCRIPTS[name]

    assert fakeredis.FakeStrictRedis().script_load(script.source) == script.sha


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_says_its_arguments_and_reply(name: str) -> None:
    source = SCRIPTS[name].source

    for heading in ("-- ARGV ", "-- Reply "):
        assert heading in source


def test_scripts_name_keys_and_constants_as_python_does_alone() -> None:
    code = "\n".join(line for each in SCRIPTS.values() for line in each.source.splitlines() if line[:2] != "--")

    assert not re.findall(r"\b(?:keys|terms)\.\w+", code), "all of them are replaced"
    assert set(re.findall(r"KEYS\[(\d+)\] \.\. '([\w:]+)'", code)) <= {("1", name) for name in KEY_NAMES.values()}
    assert not re.findall(r"KEYS\[(?!1\] \.\. '|1\]\])", code)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_is_given_each_shared_definition_that_it_uses_before_it_is_used_and_no_other(name: str) -> None:
    source = re.sub(r"--.*", "", SCRIPTS[name].source)

    for defined in SHARED:
        uses = [found.start() for found in re.finditer(rf"(?<![\w.\"']){defined}\b", source)]
        given = re.search(rf"^local (?:function )?(?:\w+, )*{defined}\b", source, re.MULTILINE)
        assert bool(uses) == bool(given), defined
        assert given is None or uses[0] <= given.end(), f"{defined} is used before it is defined"


def test_every_shared_definition_is_used_by_a_script() -> None:
    assert SHARED
    for defined in SHARED:
        assert any(len(re.findall(rf"\b{defined}\b", each.source)) > 1 for each in SCRIPTS.values()), defined


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_no_script_writes_a_global(name: str) -> None:
    assert not re.findall(r"^function ", SCRIPTS[name].source, re.MULTILINE), (
        "functions are local: Redis refuses globals"
    )


def test_the_modules_name_shared_scripts_that_exist() -> None:
    room = Path(str(files("dualmap.statestore")))
    texts = [module.read_text("utf-8") for module in room.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"``shared/(\w+)\.lua``", text)} - {"name"}  # any name

    assert named
    assert named <= {script.stem for script in room.glob("lua/shared/*.lua")}


async def test_scripts_the_server_forgot_are_loaded_again(server_url: str) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING)
    await store.open()
    pool = store.pool("default")
    await pool.members.put_instance(instance("a"))
    with redis.Redis.from_url(server_url) as client:
        client.script_flush()
        if has_functions(client):
            client.function_flush()

    placed = await place(pool, "r")
    released = await first_token(pool, "r", "a")
    await store.close()

    assert (placed.status, released.done) == ("dispatched", True)


@pytest.mark.parametrize("lost", ["instances", "instance_records"])
async def test_instances_whose_key_was_evicted_begin_again_with_an_empty_cache(server_url: str, lost: str) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING)
    await store.open()
    pool = store.pool("default")
    small = instance("a", kv_capacity_tokens=400)
    await pool.members.put_instance(small)
    await place(pool, "former", chain=CHAIN)
    await finish(pool, "former")
    with redis.Redis.from_url(server_url) as client:
        client.delete(getattr(PoolKeys("dualmap", "default"), lost))
    assert (await pool.membership()).instances == {}

    await pool.members.put_instance(small)
    latest = chain(21, 22, 23)
    await place(pool, "latest", chain=latest)

    hits = [(await pool.observe(["a"], each)).loads["a"].hit_blocks for each in (CHAIN, latest)]
    await store.close()
    assert hits == [0, 3]


def test_the_scripts_are_found_where_no_checkout_is_on_the_path(tmp_path: Path) -> None:
    asks = (
        "from dualmap.scheduling.settings import SchedulingSettings as S; from dualmap.statestore.pool import scripts;"
    )
    command = (sys.executable, "-P", "-c", f"{asks} print(len(scripts.load_scripts(S()).by_name))")

    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)

    assert int(found.stdout) == len(SCRIPTS)
