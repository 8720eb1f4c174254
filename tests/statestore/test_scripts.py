"""The scripts' files: includes, names of keys and constants resolve, headers say what a reader needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import fakeredis
import pytest
import redis

from dualmap.statestore.errors import StoreError
from dualmap.statestore.keys import KEY_NAMES, PoolKeys
from dualmap.statestore.pool.rules import rules_module
from dualmap.statestore.pool.scripts import load_scripts
from dualmap.statestore.records import lua_module
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.statestore.samples import CHAIN, SCHEDULING, chain, finish, first_token, instance, place

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(str(files("dualmap.statestore"))) / "lua"
LOADED = load_scripts(SCHEDULING)
SCRIPTS = LOADED.by_name
MODULES = {
    f"shared.{path.stem}" if path.parent != FOLDER else path.stem: path.read_text("utf-8")
    for path in FOLDER.rglob("*.lua")
} | {"records": lua_module(), "rules": rules_module()}
"""The modules by their names."""


def required(name: str) -> set[str]:
    """The modules that a module needs, itself included."""
    return {name}.union(*map(required, re.findall(r"require\('([^']+)'\)", MODULES[name])))


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


def test_the_library_has_each_script_and_each_module_once() -> None:
    library = LOADED.library

    assert set(re.findall(r"register_function\('(\w+)'", library)) == {each.function for each in SCRIPTS.values()}
    assert sorted(re.findall(r"^loaded\['([\w.]+)'\] = ", library, re.MULTILINE)) == sorted(MODULES)


def test_every_script_file_is_loaded_under_its_verb_and_noun() -> None:
    assert set(SCRIPTS) == {path.stem for path in FOLDER.glob("*.lua")}
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)+", name) for name in SCRIPTS)


def test_luacheck_finds_nothing() -> None:
    checker = shutil.which("luacheck")
    if checker is None:
        pytest.skip("luacheck is not installed: apt-get install lua-check")

    found = subprocess.run((checker, "--no-color", str(FOLDER)), cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert found.returncode == 0, found.stdout + found.stderr


def test_what_the_loader_reads_of_a_module_is_all_that_it_requires() -> None:
    for name, text in MODULES.items():
        code = re.sub(r"--.*", "", text)
        assert code.count("require") == len(re.findall(r"require\('[\w.]+'\)", code)), name


def test_every_name_that_a_module_returns_is_used_by_another_one() -> None:
    returned = {name: re.search(r"^return \{([^{}]*)\}\s*\Z", text, re.MULTILINE) for name, text in MODULES.items()}
    named = [(name, field) for name, found in returned.items() if found for field in re.findall(r"(\w+) =", found[1])]

    assert named
    for name, field in named:
        used = rf"\b{name.removeprefix('shared.')}\.{field}\b"
        assert field == "begin" or any(re.search(used, text) for text in MODULES.values()), f"{name}.{field}"


def test_a_module_that_begins_each_call_says_so() -> None:
    begins = {name for name, text in MODULES.items() if re.search(r"^local function begin\b", text, re.MULTILINE)}

    assert begins
    assert begins == {name for name, text in MODULES.items() if "begin = begin" in text}
    for name, script in SCRIPTS.items():
        called = set(re.findall(r"loaded\['([\w.]+)'\]\.begin", script.source))
        assert called == begins & required(name), name


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_has_the_hash_that_a_server_gives_it(name: str) -> None:
    """Scripts are called by their hash, which is computed here: no server is asked for it first."""
    script = SCRIPTS[name]

    assert fakeredis.FakeStrictRedis().script_load(script.source) == script.sha


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_says_its_arguments_and_reply(name: str) -> None:
    for heading in ("-- ARGV ", "-- Reply "):
        assert heading in MODULES[name]


def test_scripts_name_keys_and_constants_as_python_does_alone() -> None:
    code = "\n".join(line for each in SCRIPTS.values() for line in each.source.splitlines() if line[:2] != "--")

    assert not re.findall(r"\b(?:keys|terms)\.\w+", code), "all of them are replaced"
    assert set(re.findall(r"KEYS\[(\d+)\] \.\. '([\w:]+)'", code)) <= {("1", name) for name in KEY_NAMES.values()}
    assert not re.findall(r"KEYS\[(?!1\] \.\. '|1\]\])", code)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_is_given_each_module_that_it_uses_before_it_is_used_and_no_other(name: str) -> None:
    given = re.findall(r"^loaded\['([\w.]+)'\] = ", SCRIPTS[name].source, re.MULTILINE)

    assert set(given) == required(name) | {"shared.call"}
    assert len(set(given)) == len(given)
    for each in given:
        assert given.index(each) == max(map(given.index, required(each))), f"{each} is used before it is there"


def test_every_module_is_used_by_a_script() -> None:
    used = set.union(*map(required, SCRIPTS))

    assert set(MODULES) - used == {"shared.call"}


def test_the_modules_name_shared_scripts_that_exist() -> None:
    room = Path(str(files("dualmap.statestore")))
    texts = [module.read_text("utf-8") for module in room.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"``shared/(\w+)\.lua``", text)} - {"name"}  # any name

    assert named
    assert named <= {script.stem for script in room.glob("lua/shared/*.lua")}


async def test_what_a_call_that_failed_left_half_done_is_forgotten(server_url: str) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING)
    await store.open()
    pool = store.pool("default")
    await pool.members.put_instance(instance("a"))
    with redis.Redis.from_url(server_url) as client:
        arrivals = PoolKeys("dualmap", "default").arrivals
        client.set(arrivals, "of somebody else")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            await place(pool, "failed", chain=CHAIN)  # once it was counted, and before that was written
        client.delete(arrivals)

    placed = await place(pool, "placed", chain=chain(21, 22, 23))

    assert (await pool.loads())["a"].pending_tokens == placed.chosen.uncached_tokens
    await store.close()


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
