"""vLLM's calls about adapters at the router: who may register what, where it is loaded, and how it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from dualmap.router.admin import adapters as admin_adapters
from dualmap.router.errors import UnknownModelError
from dualmap.router.replica.runtime import Runtime
from dualmap.runtime.engine_adapters import LOAD_PATH, UNLOAD_PATH
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools
from tests.router.reached_adapters import serve
from tests.support.adapter_servers import AdapterServers

SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}


def tenant(name: str, **more: Any) -> TenantSettings:
    return TenantSettings(name=name, keys=(TenantKeySettings(name="ci", key=SecretStr(f"{name}-secret")),), **more)


ACME = tenant("acme", adapter_paths=("/adapters/acme",), max_adapters=2)
OTHER = tenant("other", adapter_paths=("/adapters/other/",), models=("default",))
PLAIN = tenant("plain")


def key(of: str) -> dict[str, str]:
    return {"authorization": f"Bearer {of}"}


@pytest.fixture
def servers() -> AdapterServers:
    made = AdapterServers()
    made.add(*"abcd")
    return made


class Door:
    def __init__(self, runtime: Runtime, client: httpx.AsyncClient) -> None:
        self.runtime = runtime
        self.pool = runtime.pools.pools["default"]
        self._client = client

    async def load(self, fields: dict[str, Any] = SQL, *, by: str = "", query: str = "", **more: Any) -> httpx.Response:
        headers = key(by) if by else None
        return await self._client.post(LOAD_PATH + query, json={**fields, **more}, headers=headers)

    async def unload(self, name: str = "sql", *, by: str = "", query: str = "") -> httpx.Response:
        headers = key(by) if by else None
        return await self._client.post(UNLOAD_PATH + query, json={"lora_name": name}, headers=headers)

    async def get(self, path: str, by: str = "") -> Any:
        return (await self._client.get(path, headers=key(by) if by else None)).json()

    @property
    def records(self) -> Any:
        return self.pool.view.adapters


@pytest.fixture
def open_door(start_runtime: Any, client_of: Any, servers: AdapterServers, clock: Any) -> Any:
    async def make(names: str = "abcd", tenants: Sequence[TenantSettings] = (), **settings: Any) -> Door:
        specs = tuple(tools.spec(name, models={"default": ""}) for name in names)
        runtime = await start_runtime(instances=specs, tenants=tenants, **settings)
        serve(runtime, servers, clock)
        return Door(runtime, client_of(runtime))

    return make


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def having(servers: AdapterServers, name: str = "sql") -> set[str]:
    return {instance_id for instance_id, each in servers.of.items() if name in each.adapters}


async def test_an_adapter_is_registered_loaded_on_its_two_homes_and_served_by_every_replica(
    open_door: Any, servers: AdapterServers
) -> None:
    door, other = await open_door(), await open_door()

    answer = await door.load(rank=8)
    await other.pool.view.refresh()

    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert len(having(servers)) == 2
    assert other.runtime.pools.routes["sql"].lora == "sql"
    (row,) = (await other.get("/admin/adapters"))["adapters"]
    assert row["registered"]["rank"] == 8
    assert {*row["registered"]["homes"]} == {*row["registered"]["loaded"]} == having(servers)


async def test_a_replica_that_has_not_read_a_registration_yet_lists_it_where_it_lists_its_uses(open_door: Any) -> None:
    door, other = await open_door("ab"), await open_door("ab")
    for instance_id in "ab":
        await door.pool.store.members.update_instance(instance_id, {"adapter_slots": 1, "adapter_host_slots": 4})
    await other.pool.view.refresh()
    await door.load(rank=8)
    await door.runtime.intake.place(tools.request(model="sql"))
    assert "sql" not in other.records

    (row,) = (await other.get("/admin/adapters"))["adapters"]

    assert row["running"] == 1
    assert row["registered"]["rank"] == 8


async def test_a_replica_that_cannot_renew_its_copy_lists_registrations_as_the_store_has_them(
    open_door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, other = await open_door("ab"), await open_door("ab")
    await door.load(rank=8)
    monkeypatch.setattr(other.pool.store, "membership", away)

    (row,) = (await other.get("/admin/adapters"))["adapters"]

    assert "sql" not in other.records
    assert row["registered"]["rank"] == 8


async def away() -> None:
    raise StoreUnavailableError("away")


async def test_the_adapters_that_run_are_counted_beside_the_slots_of_their_instance(
    open_door: Any, servers: AdapterServers
) -> None:
    door = await open_door("ab")
    for instance_id in "ab":
        await door.pool.store.members.update_instance(instance_id, {"adapter_slots": 1, "adapter_host_slots": 4})
    for name in ("sql", "chat", "idle"):
        await door.load({"lora_name": name, "lora_path": f"/adapters/{name}"})
    for name in ("sql", "sql", "chat"):
        await door.runtime.intake.place(tools.request(model=name))

    room = (await door.get("/admin/adapters"))["room"]

    assert {name: (each["device"], each["host"]) for name, each in room.items()} == {"a": (1, 4), "b": (1, 4)}
    assert 2 <= sum(each["running"] for each in room.values()) <= 3


async def test_a_name_is_not_loaded_twice_and_a_second_call_finishes_what_a_first_one_left(
    open_door: Any, servers: AdapterServers
) -> None:
    door = await open_door()
    await door.load()
    twice = await door.load()
    lost = min(having(servers))
    servers.of[lost].adapters.clear()
    await door.pool.model_lists.read_now([lost])

    again = await door.load()

    assert (twice.status_code, again.status_code) == (400, 200)
    assert "has already been loaded" in message(twice)
    assert lost in having(servers)


async def test_another_path_replaces_an_adapter_only_where_that_is_said(
    open_door: Any, servers: AdapterServers
) -> None:
    door = await open_door()
    await door.load()

    refused = await door.load(lora_path="/adapters/sql-2")
    replaced = await door.load(lora_path="/adapters/sql-2", load_inplace=True)

    assert (refused.status_code, replaced.status_code) == (409, 200)
    assert "say load_inplace" in message(refused)
    assert {each.adapters["sql"] for each in servers.of.values() if each.adapters} == {"/adapters/sql-2/."}


@pytest.mark.parametrize("unloads", [False, True], ids=["in place", "unloaded and loaded"])
async def test_new_weights_under_the_same_name_and_path_never_meet_the_former_kv(
    open_door: Any, servers: AdapterServers, unloads: bool
) -> None:
    """The engine names KV by name and path, so both the engine and the fleet get another name."""
    door = await open_door()
    await door.load()
    before = door.runtime.pools.routes["sql"].cached_as
    former = {path for each in servers.of.values() for path in each.adapters.values()}
    homes = having(servers)
    if unloads:
        await door.unload()
        assert not having(servers)
        assert "sql" not in door.runtime.pools.routes

    await door.load(load_inplace=not unloads)

    present = {path for each in servers.of.values() for path in each.adapters.values()}
    assert not former & present
    assert before != door.runtime.pools.routes["sql"].cached_as
    assert having(servers) == homes


async def test_weights_that_come_back_unchanged_keep_their_kv_where_that_is_said(
    open_door: Any, servers: AdapterServers
) -> None:
    door = await open_door()
    await door.load()
    await door.unload()

    await door.load(query="?keep_prefix_cache=true")

    assert {path for each in servers.of.values() for path in each.adapters.values()} == {"/adapters/sql"}


async def test_the_rank_of_an_adapter_prices_its_loads(open_door: Any, servers: AdapterServers) -> None:
    door = await open_door()
    await door.load(rank=64)

    placed = await door.runtime.intake.place(tools.request(model="sql"))

    assert placed.machine.spec.adapter_share == 4.0
    assert (await door.runtime.intake.place(tools.request())).machine.spec.adapter_share == 1.0


async def test_a_repository_is_not_replaced_by_itself(open_door: Any) -> None:
    door = await open_door()
    await door.load(lora_path="team/sql")

    refused = await door.load(lora_path="team/sql", load_inplace=True)

    assert refused.status_code == 400
    assert "load them from another path" in message(refused)


async def test_an_unloaded_adapter_is_gone_everywhere_and_unknown(open_door: Any, servers: AdapterServers) -> None:
    door = await open_door()
    await door.load()
    for name in "abcd":  # as hot ones are
        await door.pool.adapter_loads.ensure(name, "sql")
    servers.of["a"].away = True

    answer = await door.unload()

    assert answer.status_code == 200
    assert answer.text.startswith(
        "Success: LoRA adapter 'sql' removed successfully. Not yet at a: it cannot be reached"
    )
    assert having(servers) == {"a"}
    with pytest.raises(UnknownModelError):
        await door.runtime.intake.place(tools.request(model="sql"))
    assert (await door.unload()).status_code == 404


async def test_where_no_home_loads_it_nothing_is_registered_and_the_answer_says_why(
    open_door: Any, servers: AdapterServers
) -> None:
    door = await open_door()
    for each in servers.of.values():
        each.missing = frozenset({"/adapters/sql"})

    answer = await door.load()

    assert answer.status_code == 400
    assert "No adapter found for /adapters/sql" in message(answer)
    assert "sql" not in door.runtime.pools.routes


@pytest.mark.parametrize("flaw", ["at_run_time", "hides"])
async def test_engines_that_cannot_be_loaded_at_run_time_are_refused_with_words(
    open_door: Any, servers: AdapterServers, flaw: str
) -> None:
    door = await open_door()
    for each in servers.of.values():
        setattr(each, flaw, flaw == "hides")

    answer = await door.load()

    words = {"at_run_time": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "hides": "several API processes"}
    assert answer.status_code == 400
    assert words[flaw] in message(answer)


async def test_one_home_that_fails_does_not_keep_an_adapter_out(open_door: Any, servers: AdapterServers) -> None:
    door = await open_door("ab")
    servers.of["a"].away = True

    answer = await door.load()

    assert answer.status_code == 200
    assert "Not yet at a: it cannot be reached" in answer.text
    assert having(servers) == {"b"}


async def test_without_an_instance_in_service_nothing_is_registered(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", state=InstanceState.DOWN),))

    answer = await client_of(runtime).post(LOAD_PATH, json=SQL)

    assert answer.status_code == 503
    assert not runtime.pools.pools["default"].view.adapters


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"lora_name": ""}, 400, "lora_name"),
        ({"lora_name": "x" * 201}, 400, "lora_name"),
        ({"lora_name": "a\nb"}, 400, "printable"),
        ({"lora_name": "default"}, 409, "taken (configured)"),
        ({"lora_path": "/adapters/../etc"}, 400, "'..'"),
        ({"lora_path": ""}, 400, "lora_path"),
        ({"lora_path": "/" + "x" * 1000}, 400, "lora_path"),
        ({"rank": 0}, 400, "rank"),
        ({"rank": 10**6}, 400, "rank"),
        ({"base_model_name": "other"}, 400, "no adapters of 'other'"),
        ({"tenant": "nobody"}, 400, "no tenant 'nobody'"),
    ],
)
async def test_a_call_that_cannot_be_meant_touches_nothing(
    open_door: Any, servers: AdapterServers, fields: dict[str, Any], status: int, words: str
) -> None:
    door = await open_door()

    answer = await door.load(**fields)

    assert (answer.status_code, words in answer.text) == (status, True)
    assert not door.records
    assert not any(each.calls for each in servers.of.values())


async def test_a_pool_and_a_tenant_have_room_for_so_many(open_door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await open_door(tenants=(ACME,), admin_key="operator")
    paths = [{"lora_name": f"sql-{n}", "lora_path": f"/adapters/acme/{n}"} for n in range(3)]
    answers = [await door.load(each, by="acme-secret") for each in paths]
    await door.unload("sql-0", by="acme-secret")
    room = await door.load(paths[2], by="acme-secret")
    monkeypatch.setattr(admin_adapters, "MOST_ADAPTERS", 2)
    full = await door.load(by="operator")

    assert [each.status_code for each in (*answers, room, full)] == [200, 200, 409, 200, 409]
    assert "max_adapters" in message(answers[2])


async def test_a_tenant_makes_so_many_calls_a_minute_over_all_replicas(open_door: Any) -> None:
    doors = [await open_door(tenants=(ACME, OTHER)), await open_door(tenants=(ACME, OTHER))]
    mine = {"lora_name": "mine", "lora_path": "/adapters/acme/mine"}

    for number in range(7):  # two for each of its two adapters, and ten more
        assert (await doors[number % 2].load(mine, by="acme-secret")).status_code == 200
        assert (await doors[(number + 1) % 2].unload("mine", by="acme-secret")).status_code == 200
    refused = await doors[0].load(mine, by="acme-secret")

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 5
    assert "acme may register and unload adapters 14 times a minute" in message(refused)
    await doors[0].pool.view.refresh()
    assert not doors[0].records["mine"].is_registered
    assert (await doors[1].unload("mine", by="acme-secret")).status_code == 429
    theirs = {"lora_name": "theirs", "lora_path": "/adapters/other/theirs"}
    assert (await doors[0].load(theirs, by="other-secret")).status_code == 200, "others have calls of their own"
    assert (await doors[0].pool.store.requests_of(doors[0].runtime.context.replica_id)) == []


async def test_calls_that_cannot_be_whatever_is_registered_cost_none_of_them(open_door: Any) -> None:
    door = await open_door(tenants=(ACME,))
    mine = {"lora_name": "mine", "lora_path": "/adapters/acme/mine"}
    wrong = [{}, {"lora_path": "/elsewhere"}, {"lora_name": " mine"}, {"base_model_name": "other"}, {"tenant": "other"}]

    for _ in range(4):
        statuses = [(await door.load({**mine, **each} if each else {}, by="acme-secret")).status_code for each in wrong]
        assert statuses == [400, 403, 400, 400, 403]

    assert (await door.load(mine, by="acme-secret")).status_code == 200


async def test_strangers_and_tenants_without_a_folder_register_nothing(open_door: Any) -> None:
    door = await open_door(tenants=(ACME, PLAIN), admin_key="operator")

    statuses = [(await door.load(by=each)).status_code for each in ("", "nobody-secret", "plain-secret")]
    gone = [(await door.unload(by=each)).status_code for each in ("", "plain-secret")]

    assert statuses == [401, 401, 401]
    assert gone == [401, 401]
    assert not door.records


async def test_a_tenant_registers_for_itself_from_its_folder_alone(open_door: Any) -> None:
    door = await open_door(tenants=(ACME, OTHER), admin_key="operator")
    own = {"lora_name": "acme-sql", "lora_path": "/adapters/acme//sql"}

    outside = await door.load({**own, "lora_path": "/adapters/acme-2/sql"}, by="acme-secret")
    climbing = await door.load({**own, "lora_path": "/adapters/acme/../other/sql"}, by="acme-secret")
    for_another = await door.load(own, tenant="other", by="acme-secret")
    mine = await door.load(own, by="acme-secret")
    taken = await door.load({**own, "lora_path": "/adapters/other/sql"}, load_inplace=True, by="other-secret")
    foreign = await door.unload("acme-sql", by="other-secret")

    statuses = [each.status_code for each in (outside, climbing, for_another, mine, taken, foreign)]
    assert statuses == [403, 400, 403, 200, 409, 404]
    assert door.records["acme-sql"].tenant == "acme"


async def test_an_adapter_with_an_owner_is_a_model_of_its_owner_alone(open_door: Any) -> None:
    """Also of one that may use few models, and lists them."""
    door = await open_door(tenants=(ACME, OTHER, PLAIN), admin_key="operator")
    await door.load({"lora_name": "mine", "lora_path": "/adapters/other/sql"}, by="other-secret")
    await door.load(by="operator")

    seen = {
        name: {each["id"] for each in (await door.get("/v1/models", by=f"{name}-secret"))["data"]}
        for name in ("acme", "other", "plain")
    }

    assert seen == {"acme": {"default", "sql"}, "other": {"default", "mine"}, "plain": {"default", "sql"}}
    callers = {name: door.runtime.tenants.caller({b"x-api-key": f"{name}-secret".encode()}.get) for name in seen}
    placed = await door.runtime.intake.place(tools.request(model="mine", caller=callers["other"]))
    assert placed.machine.spec.claim.account.split()[0] == "other"
    assert placed.machine.spec.claim.account.endswith(" mine")
    for name in ("acme", "plain"):
        with pytest.raises(UnknownModelError):
            await door.runtime.intake.place(tools.request(model="mine", caller=callers[name]))


async def test_an_operator_may_register_for_a_tenant(open_door: Any) -> None:
    door = await open_door(tenants=(PLAIN,), admin_key="operator")

    answer = await door.load(tenant="plain", by="operator")

    assert answer.status_code == 200
    assert door.records["sql"].tenant == "plain"


async def test_several_pools_are_told_apart_and_a_name_is_one_pools(
    start_runtime: Any, client_of: Any, servers: AdapterServers, clock: Any
) -> None:
    pools = PoolSettings(name="default"), PoolSettings(name="large", model="big")
    runtime = await start_runtime(pools=pools, instances=(tools.spec("a", models={"default": ""}),))
    door = Door(runtime, client_of(runtime))
    serve(runtime, servers, clock)

    answers = [await door.load(query=query) for query in ("", "?pool=default", "?pool=large")]

    assert [each.status_code for each in answers] == [400, 200, 409]


async def test_an_adapter_that_engines_were_started_with_stays_theirs_until_it_is_registered(
    open_door: Any, servers: AdapterServers
) -> None:
    door = await open_door("ab")
    for name in "ab":
        servers.of[name].adapters["sql"] = "/static/sql"
    await door.pool.model_lists.read_now("ab")

    refused = await door.load()
    adopted = await door.load(lora_path="/static/sql")

    assert (refused.status_code, adopted.status_code) == (409, 200)
    assert not any(each.calls for each in servers.of.values())
    assert door.records["sql"].generation == 0


async def test_calls_for_one_name_at_a_time_leave_one_record_and_what_engines_have_agrees(
    open_door: Any, servers: AdapterServers
) -> None:
    doors = [await open_door(), await open_door()]
    calls = [door.load(lora_path=f"/adapters/{number}", load_inplace=True) for number, door in enumerate(doors * 3)]

    await asyncio.gather(*calls)
    for door in doors:
        await door.pool.view.refresh()
        for name in having(servers):
            await door.pool.adapter_loads.ensure(name, "sql")

    record = doors[0].records["sql"]
    assert record == doors[1].records["sql"]
    assert {each.adapters["sql"] for each in servers.of.values() if each.adapters} == {record.engine_path}
