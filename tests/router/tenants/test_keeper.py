"""Tenants that are made while replicas run, and stores that lose them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from dualmap.router.errors import InvalidApiKeyError, RateLimitError, RouterError
from dualmap.router.replica.runtime import Runtime
from dualmap.router.requests.live_request import LiveRequest
from dualmap.router.tenants import keeper as keeper_module
from dualmap.router.tenants.administration import TenantAdministration, hash_of
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.router.tenants.keeper import TenantKeeper
from dualmap.router.tenants.tenant_record import KeyRecord, TenantRecord
from dualmap.runtime.tenant_settings import LimitSettings, TenantKeySettings, TenantSettings
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.keys import FleetKeys
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.tenants.tenant_book import Edition
from tests.router import tools
from tests.support.manual_clock import ManualClock, settle


def record(*keys: str, **fields: Any) -> TenantRecord:
    made = tuple(KeyRecord(name=key, sha256=hash_of(f"{key}-secret")) for key in keys)
    return TenantRecord(**{"keys": made, **fields})


async def pass_time(clock: ManualClock, seconds: float) -> None:
    """Let the keepers look at the book as often as they would."""
    for _ in range(round(seconds / 0.2)):
        await clock.advance(0.2)
        await settle()


async def put(runtime: Runtime, name: str, wanted: TenantRecord | None) -> None:
    await TenantAdministration(runtime.tenant_keeper).change(name, lambda _: wanted, by="ada", action="set")


def asked(runtime: Runtime, key: str) -> Caller | None:
    return runtime.tenants.caller({b"authorization": f"Bearer {key}-secret".encode()}.get)


def is_refused(runtime: Runtime, key: str) -> bool:
    try:
        return asked(runtime, key) is None
    except InvalidApiKeyError:
        return True


async def test_a_change_is_in_force_on_every_replica_within_a_second(start_runtime: Any, clock: ManualClock) -> None:
    one, other = await start_runtime(), await start_runtime()
    assert asked(other, "ci") is None, "access is open as long as there is no key"
    await put(one, "acme", record("ci", weight=2.0))
    await pass_time(clock, 1.0)

    for runtime in (one, other):
        caller = asked(runtime, "ci")
        assert caller is not None
        assert (caller.tenant.name, caller.tenant.weight, caller.key) == ("acme", 2.0, "ci")
        assert is_refused(runtime, "web")

    await put(other, "acme", record("web"))
    await pass_time(clock, 1.0)
    assert is_refused(one, "ci") and asked(one, "web") is not None

    await put(one, "acme", None)
    await pass_time(clock, 1.0)
    assert is_refused(other, "web"), "once there were tenants, access needs a key"


async def test_a_key_that_its_former_tenant_gives_up_later_gives_access(start_runtime: Any, clock: ManualClock) -> None:
    one, other = await start_runtime(), await start_runtime()
    for name, keys in (("b", ["ci"]), ("a", ["web", "ci"]), ("c", ["other"])):
        await put(one, name, record(*keys))
        await pass_time(clock, 1.0)
    for runtime in (one, other):
        caller = asked(runtime, "ci")
        assert caller is not None and caller.tenant.name == "b", "one that has it keeps it"

    await put(one, "b", record("new"))
    await pass_time(clock, 1.0)

    for runtime in (one, other):
        caller = asked(runtime, "ci")
        assert caller is not None and caller.tenant.name == "a"


async def test_a_key_that_moved_to_another_tenant_between_two_looks_gives_access(
    start_runtime: Any, clock: ManualClock
) -> None:
    one, other = await start_runtime(), await start_runtime()
    await put(one, "b", record("ci", "web"))
    await put(one, "a", record("nightly"))
    await pass_time(clock, 1.0)

    await put(one, "b", record("web"))
    await put(one, "a", record("nightly", "ci"))
    await pass_time(clock, 1.0)

    for runtime in (one, other):
        caller = asked(runtime, "ci")
        assert caller is not None and caller.tenant.name == "a"


async def test_a_replica_that_starts_later_knows_them_before_it_serves(start_runtime: Any) -> None:
    await put(await start_runtime(), "acme", record("ci"))

    assert asked(await start_runtime(), "ci") is not None


async def test_while_the_store_is_away_the_last_known_tenants_stay(
    start_runtime: Any, store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await start_runtime()
    await put(runtime, "acme", record("ci"))

    async def away(known: Edition | None) -> Any:
        raise StoreUnavailableError("away")

    monkeypatch.setattr(store.tenants, "news", away)
    await pass_time(clock, 5.0)
    assert asked(runtime, "ci") is not None
    assert is_refused(runtime, "web")


def emptied(store: MemoryStore) -> None:
    for name in ("tenants", "tenants_meta", "tenants_history"):
        store.server.do_del(getattr(FleetKeys("dualmap"), name))


async def test_a_store_that_comes_back_empty_is_given_its_tenants_again(
    start_runtime: Any, store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "PUT_BACK_TOGETHER", 2)
    one, other = await start_runtime(), await start_runtime()
    names = [f"tenant-{number}" for number in range(5)]
    for name in names:
        await put(one, name, record(name))
    await put(one, "former", record("former"))
    await put(one, "former", None)
    await pass_time(clock, 1.0)
    emptied(store)
    await pass_time(clock, 2.0)

    for runtime in (one, other, await start_runtime()):
        assert all(asked(runtime, name) is not None for name in names)
        assert is_refused(runtime, "former")
    assert one.tenant_keeper.edition == other.tenant_keeper.edition
    assert {change.action for change in await store.tenants.history(100)} == {"put back"}


async def test_a_key_that_was_revoked_stays_so_where_the_store_is_as_it_was_before(
    start_runtime: Any, store: MemoryStore, clock: ManualClock
) -> None:
    one, other = await start_runtime(), await start_runtime()
    await put(one, "acme", record("ci", "web"))
    await put(one, "gone", record("gone"))
    keys = FleetKeys("dualmap")
    kept = {key: store.server.contents[key].copy() for key in (keys.tenants, keys.tenants_meta, keys.tenants_history)}
    await put(one, "acme", record("web"))
    await put(one, "gone", None)
    await put(one, "new", record("new"))
    await pass_time(clock, 1.0)
    store.server.contents.update(kept)
    await pass_time(clock, 2.0)

    for runtime in (one, other, await start_runtime()):
        assert is_refused(runtime, "ci") and is_refused(runtime, "gone")
        assert asked(runtime, "web") is not None and asked(runtime, "new") is not None


async def test_a_replica_that_missed_more_than_the_log_keeps_believes_the_store(
    start_runtime: Any, store: MemoryStore, clock: ManualClock
) -> None:
    runtime = await start_runtime()
    await put(runtime, "acme", record("ci"))
    keeper = runtime.tenant_keeper
    store.server.do_del(FleetKeys("dualmap").tenants_history)
    assert keeper.edition is not None
    await store.tenants.change(keeper.edition, {"acme": None}, by="", action="remove", before={}, after={})
    store.server.do_del(FleetKeys("dualmap").tenants_history)
    await pass_time(clock, 1.0)

    assert is_refused(runtime, "ci")


async def test_a_former_key_goes_on_until_its_time_by_the_clock_of_the_store(
    start_runtime: Any, store: MemoryStore, clock: ManualClock
) -> None:
    runtime = await start_runtime()
    ends = record("ci").keys[0].model_copy(update={"expires_ms": clock.now_ms() + 10_000})
    new = record("web").keys[0].model_copy(update={"name": "ci"})
    await put(runtime, "acme", record(keys=(ends, new)))

    await pass_time(clock, 9.0)
    assert asked(runtime, "ci") is not None
    await pass_time(clock, 2.0)
    assert is_refused(runtime, "ci") and asked(runtime, "web") is not None


async def test_a_tenant_that_cannot_be_read_is_refused_and_the_others_are_not(
    start_runtime: Any, store: MemoryStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = await start_runtime()
    await put(runtime, "acme", record("ci"))
    with caplog.at_level(logging.WARNING):
        await store.tenants.change(
            runtime.tenant_keeper.edition, {"bad": b'{"keys": 7}'}, by="", action="", before={}, after={}
        )
        await pass_time(clock, 1.0)

    assert asked(runtime, "ci") is not None
    assert "tenant 'bad' cannot be read" in caplog.text


def test_a_record_of_a_newer_version_is_read_without_what_is_new_in_it() -> None:
    text = record("ci", limits=LimitSettings(requests_per_minute=3)).text()
    newer = text.replace(b'{"limits":{', b'{"colour":"red","limits":{"colours_per_minute":7,', 1)

    assert newer != text
    assert TenantRecord.parse(newer) == TenantRecord.parse(text)


async def test_tenants_of_the_settings_count_before_those_of_the_store(start_runtime: Any, clock: ManualClock) -> None:
    settings = TenantSettings(name="acme", keys=(TenantKeySettings(name="ci", key=SecretStr("acme-secret")),))
    await put(await start_runtime(), "acme", record("ci"))
    runtime = await start_runtime(tenants=(settings,))
    caller = runtime.tenants.caller({b"authorization": b"Bearer acme-secret"}.get)

    assert caller is not None and caller.key == "ci"
    assert is_refused(runtime, "ci")


@pytest.mark.parametrize("setting", ["finish", "end"])
async def test_what_is_served_when_its_key_is_revoked_finishes_or_ends(
    start_runtime: Any, clock: ManualClock, setting: str
) -> None:
    one = await start_runtime()
    other = await start_runtime(instances=(tools.spec("a"),), revoked_requests=setting)
    await put(one, "acme", record("ci", "web"))
    await put(one, "gone", record("gone"))
    await pass_time(clock, 1.0)
    ended: list[tuple[str, RouterError]] = []
    live = []
    for key in ("ci", "web", "gone"):
        asking = tools.request(key, caller=asked(other, key), cut_off=lambda error, key=key: ended.append((key, error)))
        live.append(await other.intake.place(asking))
    live.append(await other.intake.place(tools.request("of nobody")))
    await put(one, "acme", record("web", limits=LimitSettings(requests_in_flight=1)))
    await put(one, "gone", None)
    await pass_time(clock, 1.0)

    assert [key for key, _ in ended] == (["ci", "gone"] if setting == "end" else [])
    assert all((error.status, error.code) == (401, "invalid_api_key") for _, error in ended)
    for each in live:
        each.finish(Outcome.COMPLETED)


async def test_a_limit_that_is_lowered_below_what_runs_ends_nothing_and_admits_nothing_until_there_is_room(
    start_runtime: Any, clock: ManualClock
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", dispatch_window_tokens=10_000),))

    async def placed() -> LiveRequest:
        live: LiveRequest = await runtime.intake.place(tools.request(caller=asked(runtime, "ci")))
        return live

    async def over(live: LiveRequest) -> None:
        live.finish(Outcome.COMPLETED)
        await pass_time(clock, 0.4)

    await put(runtime, "acme", record("ci", limits=LimitSettings(requests_in_flight=3)))
    first, second, third = [await placed() for _ in range(3)]
    await put(runtime, "acme", record("ci", limits=LimitSettings(requests_in_flight=2)))
    for live in (first, second):
        with pytest.raises(RateLimitError, match="2 requests at a time"):
            await placed()
        await over(live)
    fourth = await placed()
    for live in (third, fourth):
        await over(live)


# keys that somebody else overwrote ------------------------------------------------------------------------------------
OVERWRITTEN = {
    "tenants": ("tenants",),
    "edition": ("tenants_meta",),
    "log": ("tenants_history",),
    "divisions": ("tenants_allotments",),
    "all": ("tenants", "tenants_meta", "tenants_history", "tenants_allotments"),
}


@pytest.fixture
async def real(valkey_url: str, scheduling: SchedulingSettings) -> AsyncIterator[RedisStore]:
    store = RedisStore(StoreSettings(url=valkey_url), scheduling=scheduling)
    await store.open()
    yield store
    await store.close()


def keeper_of(store: RedisStore, clock: ManualClock, name: str) -> TenantKeeper:
    directory = TenantDirectory(())
    return TenantKeeper(store.tenants, directory, clock, replica_id=name, changed=lambda: None)


def knows(keeper: TenantKeeper, key: str) -> bool:
    try:
        return keeper.directory.caller({b"authorization": f"Bearer {key}-secret".encode()}.get) is not None
    except InvalidApiKeyError:
        return False


async def set_tenant(keeper: TenantKeeper, name: str, wanted: TenantRecord | None) -> None:
    await TenantAdministration(keeper).change(name, lambda _: wanted, by="ada", action="set")


@pytest.mark.parametrize("what", OVERWRITTEN)
async def test_a_key_of_another_type_is_mended_and_no_tenant_is_lost(
    what: str, real: RedisStore, valkey_url: str, clock: ManualClock
) -> None:
    one, other = keeper_of(real, clock, "one"), keeper_of(real, clock, "other")
    for name in ("acme", "beta", "gone"):
        await set_tenant(one, name, record(name))
    await set_tenant(one, "gone", None)
    await other.refresh()
    with redis.Redis.from_url(valkey_url) as server:
        for key in OVERWRITTEN[what]:
            server.set(getattr(FleetKeys("dualmap"), key), "not the fleet's")

    # a replica that starts needs no other one that runs
    starting = keeper_of(real, clock, "starting")
    await starting.refresh()
    assert starting.directory.is_closed
    await clock.advance(61.0)
    for keeper in (one, other, starting):
        await keeper.refresh()
    late = keeper_of(real, clock, "late")
    for keeper in (late, one, other, starting):
        await keeper.refresh()
        assert knows(keeper, "acme") and knows(keeper, "beta"), keeper
        assert not knows(keeper, "gone")

    # and what is changed next counts as newer than all before
    before = max(record.revision for record in one.records.values())
    await set_tenant(late, "acme", record("next"))
    assert late.records["acme"].revision > before
    for keeper in (one, other, starting):
        await keeper.refresh()
        assert knows(keeper, "next") and not knows(keeper, "acme")


async def test_tenants_that_somebody_deleted_alone_are_put_back(
    real: RedisStore, valkey_url: str, clock: ManualClock
) -> None:
    one = keeper_of(real, clock, "one")
    await set_tenant(one, "acme", record("acme"))
    with redis.Redis.from_url(valkey_url) as server:
        server.delete(FleetKeys("dualmap").tenants)

    await clock.advance(61.0)
    await one.refresh()
    late = keeper_of(real, clock, "late")
    await late.refresh()
    assert knows(late, "acme")


async def test_an_edition_that_cannot_be_read_is_replaced(
    real: RedisStore, valkey_url: str, clock: ManualClock
) -> None:
    one = keeper_of(real, clock, "one")
    await set_tenant(one, "acme", record("acme"))
    with redis.Redis.from_url(valkey_url) as server:
        server.hset(FleetKeys("dualmap").tenants_meta, "edition", "rubbish")

    late = keeper_of(real, clock, "late")
    for keeper in (late, one):
        await keeper.refresh()
        assert knows(keeper, "acme") and keeper.directory.is_closed


async def test_a_fleet_that_never_had_tenants_stays_open_when_a_key_of_theirs_is_mended(
    real: RedisStore, valkey_url: str, clock: ManualClock
) -> None:
    with redis.Redis.from_url(valkey_url) as server:
        server.set(FleetKeys("dualmap").tenants, "not the fleet's")

    one = keeper_of(real, clock, "one")
    await one.refresh()
    assert not one.directory.is_closed
