"""Members enter the store once; what operators change stays; an emptied store is filled again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.runtime.pool_settings import InstanceSettings, PoolSettings
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.revisions.gate import Bounds
from dualmap.scheduling.revisions.rollout import Move, Rollout, begun
from dualmap.scheduling.revisions.weights import RevisionWeights
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.call_values import Membership
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import PoolContext
from dualmap.workers.registrar import Known, Registrar, members_to_restore, plan_start, served_elsewhere, shared_urls
from tests.support.manual_clock import ManualClock
from tests.workers.flaky_pool import FlakyPool

A = InstanceSettings(id="a", url="http://a:8000")
B = InstanceSettings(id="b", url="http://b:8000", kv_capacity_tokens=500_000, max_running_requests=64)
CONFIGURED = PoolSettings(instances=(A, B))


RegistrarOf = Callable[..., Registrar]


@pytest.fixture
def registrar_of(context: PoolContext) -> RegistrarOf:
    def make(pool: Any, settings: PoolSettings = CONFIGURED) -> Registrar:
        return Registrar(replace(context, pool=pool, settings=settings))

    return make


def membership(epoch: int, *specs: InstanceSpec) -> Membership:
    return Membership(epoch, 0, {spec.instance_id: spec for spec in specs}, HotnessTree(), Learned())


def test_ranks_of_one_server_are_instances_of_their_own() -> None:
    ranks = [InstanceSettings(id=f"a.{rank}", url=A.url, data_parallel_rank=rank) for rank in (0, 1)]
    added = {"x": InstanceSpec("x", A.url, data_parallel_rank=1)}

    assert shared_urls(ranks) == {}
    assert list(served_elsewhere(ranks, added)) == ["a.1"]
    assert shared_urls([*ranks, ranks[1].model_copy(update={"id": "twin"})]) == {A.url: ["a.1", "twin"]}


async def test_configured_instances_enter_as_starting_with_all_their_figures(
    pool: PoolStore, registrar_of: RegistrarOf, value: Callable[..., float]
) -> None:
    await registrar_of(pool).tick()

    stored = (await pool.membership()).instances
    assert stored == {"a": A.spec(), "b": B.spec()}
    assert stored["b"].kv_capacity_tokens == 500_000
    assert stored["b"].max_running_requests == 64
    assert stored["a"].state is InstanceState.STARTING
    assert value("dualmap_worker_registrations_total", cause="start") == 2


async def test_registering_twice_changes_nothing(pool: PoolStore, registrar_of: RegistrarOf) -> None:
    first, second = registrar_of(pool), registrar_of(pool)
    await first.tick()
    await pool.members.set_instance_state("a", InstanceState.READY)
    before = await pool.membership()

    await second.tick()
    await first.tick()

    assert await pool.membership() == before


async def test_what_an_operator_removes_stays_removed_until_a_worker_starts(
    pool: PoolStore, registrar_of: RegistrarOf
) -> None:
    registrar = registrar_of(pool)
    await registrar.tick()

    await pool.members.remove_instance("a")
    for _ in range(3):
        await registrar.tick()
    assert list((await pool.membership()).instances) == ["b"]

    await registrar_of(pool).tick()
    assert list((await pool.membership()).instances) == ["a", "b"]


async def test_a_configured_instance_whose_server_was_added_under_another_id_is_left_out_and_named(
    pool: PoolStore, registrar_of: RegistrarOf, caplog: pytest.LogCaptureFixture
) -> None:
    await registrar_of(pool).tick()
    await pool.members.remove_instance("a")
    await pool.members.put_instance(InstanceSpec("renamed", A.url))

    starting = registrar_of(pool)
    for _ in range(2):
        await starting.tick()

    assert list((await pool.membership()).instances) == ["b", "renamed"]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "instance=a url=http://a:8000" in warnings[0] and "as renamed" in warnings[0]


def test_a_known_instance_does_not_move_to_a_server_that_was_added_under_another_id() -> None:
    stored = {"a": replace(A.spec(), url="http://old:8000"), "renamed": InstanceSpec("renamed", A.url)}

    assert plan_start([A], stored) == ()
    assert plan_start([A, B], {**stored, "renamed": InstanceSpec("renamed", B.url)}) == (A.spec(),)


def test_configured_instances_may_change_their_servers() -> None:
    moved = [A.model_copy(update={"url": B.url}), B.model_copy(update={"url": A.url})]

    planned = plan_start(moved, {"a": A.spec(), "b": B.spec()})

    assert {spec.instance_id: spec.url for spec in planned} == {"a": B.url, "b": A.url}


async def test_a_changed_configuration_reaches_a_known_instance_and_keeps_what_was_learned() -> None:
    known = replace(A.spec(), state=InstanceState.READY, kv_capacity_tokens=123_456)
    moved = InstanceSettings(id="a", url="http://elsewhere:8000")

    assert plan_start([A], {"a": known}) == ()
    assert plan_start([moved], {"a": known}) == (replace(known, url="http://elsewhere:8000"),)


async def test_limits_that_are_not_configured_are_kept_as_the_instance_reported_them() -> None:
    reported = {"dispatch_window_tokens": 16_384, "max_running_requests": 99, "block_tokens": 32}
    known = {settings.id: replace(settings.spec(), **reported) for settings in (A, B)}

    (changed,) = plan_start([A, B], known)  # B has a limit of its own

    assert changed == replace(known["b"], max_running_requests=64)


async def test_a_capacity_that_is_configured_again_is_kept_as_reported_and_the_log_says_so(
    pool: PoolStore, registrar_of: RegistrarOf, caplog: pytest.LogCaptureFixture
) -> None:
    await registrar_of(pool).tick()
    await pool.members.put_instance(replace(A.spec(), kv_capacity_tokens=123_456))
    caplog.set_level("INFO")
    caplog.clear()

    await registrar_of(pool, PoolSettings(instances=(A, B.model_copy(update={"kv_capacity_tokens": 777})))).tick()

    stored = (await pool.membership()).instances
    assert (stored["a"].kv_capacity_tokens, stored["b"].kv_capacity_tokens) == (123_456, 500_000)
    assert caplog.messages == ["capacity kept pool=default instance=b configured_tokens=777 kept_tokens=500000"], (
        "of a, whose capacity is not configured, there is nothing to say"
    )


async def test_instances_that_are_configured_with_one_url_are_warned_of(
    pool: PoolStore, registrar_of: RegistrarOf, caplog: pytest.LogCaptureFixture
) -> None:
    twin = A.model_copy(update={"id": "twin"})

    await registrar_of(pool, PoolSettings(instances=(A, B, twin))).tick()

    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["one server counts for several pool=default url=http://a:8000 instances=['a', 'twin']"]


def start(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
    return begun("v2", (5.0, 50.0), Bounds(), RevisionWeights.alone("v1"), now_ms)


async def test_a_store_that_comes_back_empty_gets_back_what_was_there(
    pool: PoolStore,
    clock: ManualClock,
    scheduling: SchedulingSettings,
    registrar_of: RegistrarOf,
    value: Callable[..., float],
) -> None:
    # given a fleet with one instance added at run time, one draining and one removed
    registrar = registrar_of(pool)
    await registrar.tick()
    await pool.members.put_instance(InstanceSpec("added", "http://added"))
    await pool.members.set_instance_state("added", InstanceState.READY)
    await pool.members.set_instance_state("b", InstanceState.DRAINING)
    await pool.members.remove_instance("a")
    # and with names and a setting that were given to it, one of which was taken back
    await pool.members.add_name("chat", "")
    await pool.members.add_name("adapter", "lora")
    await pool.members.add_name("gone", "")
    await pool.settings.change({"max_deferred_s": 9.0}, by="somebody")
    # and with a rollout
    await pool.revisions.conduct(start, by="somebody")
    rollout, weights = await pool.revisions.rollout(), await pool.revisions.weights()
    await registrar.tick()
    await pool.members.remove_name("gone")
    await registrar.tick()

    # when the store loses everything
    emptied = MemoryStore(scheduling, now_ms=clock.now_ms).pool("default")
    registrar._pool = emptied
    await registrar.tick()

    found = await emptied.membership()
    states = {name: spec.state for name, spec in found.instances.items()}
    assert states == {"added": InstanceState.READY, "b": InstanceState.DRAINING}
    assert found.names == {"chat": "", "adapter": "lora"}
    assert found.overrides == {"max_deferred_s": 9.0}
    assert (found.rollout, found.revisions) == (rollout, weights) and rollout is not None
    assert value("dualmap_worker_registrations_total", cause="restored") == 2


async def test_an_interrupted_restoration_is_finished_when_the_store_is_back(
    flaky: FlakyPool, pool: PoolStore, clock: ManualClock, scheduling: SchedulingSettings, registrar_of: RegistrarOf
) -> None:
    registrar = registrar_of(flaky)
    await registrar.tick()
    emptied = MemoryStore(scheduling, now_ms=clock.now_ms).pool("default")
    flaky._pool = emptied
    original = emptied.members.put_instance

    async def put_one_then_break(spec: InstanceSpec) -> None:
        await original(spec)
        flaky.away = True

    emptied.members.put_instance = put_one_then_break
    with pytest.raises(StoreUnavailableError):
        await registrar.tick()
    emptied.members.put_instance = original
    flaky.away = False
    assert len((await emptied.membership()).instances) == 1

    await registrar.tick()

    assert set((await emptied.membership()).instances) == {"a", "b"}


def test_what_is_missing_is_lost_unless_the_epoch_grew() -> None:
    known = Known(5, {"a": A.spec(), "b": B.spec()})

    assert members_to_restore(known, membership(5, A.spec(), B.spec())) == ()
    assert members_to_restore(known, membership(5, A.spec())) == (B.spec(),)
    assert members_to_restore(known, membership(6, A.spec())) == ()
    assert members_to_restore(known, membership(1, A.spec())) == (B.spec(),)
    assert members_to_restore(known, membership(0)) == (A.spec(), B.spec())
