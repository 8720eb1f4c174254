"""Gauges of the fleet from a cached snapshot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dualmap.router.pool.failover import FailoverPool
from dualmap.router.telemetry.fleet_gauges import FleetGauges, FleetOverviews
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools


def overviews(pool: Any, clock: Any) -> FleetOverviews:
    return FleetOverviews({"default": pool}, clock=clock)


async def test_scrapes_at_the_same_time_or_soon_after_share_one_call(store: Any, clock: Any) -> None:
    tampered = tools.Tampered(store)
    fleet = overviews(tampered.pool("default"), clock)

    await asyncio.gather(*(fleet.refresh() for _ in range(10)))
    await clock.advance(0.9)
    await fleet.refresh()
    assert tampered.calls == ["overview"]
    await clock.advance(0.2)
    await fleet.refresh()

    assert tampered.calls == ["overview", "overview"]


async def test_what_is_out_of_reach_is_told_as_it_was_with_its_age_and_vanishes_after_a_minute(
    store: Any, clock: Any, scheduling: Any
) -> None:
    tampered, registry = tools.Tampered(store), CollectorRegistry()
    measures = RouterMetrics(["default"]).store_calls
    pool = FailoverPool(tampered.pool("default"), scheduling, measures=measures, clock=clock, now_ms=clock.now_ms)
    await pool.members.put_instance(tools.spec("a"))
    await pool.heartbeat("replica-1", 60_000, {})
    await pool.membership()
    fleet = overviews(pool, clock)
    FleetGauges(fleet, registry)

    async def scrape() -> tuple[float | None, float | None]:
        await fleet.refresh()
        names = ("dualmap_replicas", "dualmap_fleet_figures_age_seconds")
        replicas, age_s = (registry.get_sample_value(name, {"pool": "default"}) for name in names)
        return replicas, age_s

    async def away() -> None:
        raise StoreUnavailableError("away")

    assert await scrape() == (1.0, 0.0)
    tampered.before |= {"overview": away, "membership": away}
    for age_s in (2.0, 4.0):  # the first scrape finds out, the next one knows
        await clock.advance(2.0)
        assert await scrape() == (1.0, pytest.approx(age_s))
        assert pool.degraded, "the replica goes on by a state of its own"
        with pytest.raises(StoreUnavailableError):
            await fleet.get("default")
    await clock.advance(60.0)
    assert await scrape() == (None, pytest.approx(64.0))
    tampered.before.clear()
    await clock.advance(2.0)

    assert await scrape() == (1.0, 0.0)
    await pool.close()


async def test_a_scrape_does_not_wait_for_a_store_that_does_not_answer(store: Any, clock: Any) -> None:
    tampered, registry, answers = tools.Tampered(store), CollectorRegistry(), asyncio.Event()
    await store.pool("default").members.put_instance(tools.spec("a"))
    fleet = overviews(tampered.pool("default"), clock)
    FleetGauges(fleet, registry)
    await fleet.refresh()

    async def waits() -> None:
        await answers.wait()

    tampered.before["overview"] = waits
    await clock.advance(5.0)
    for _ in range(3):
        await asyncio.wait_for(fleet.refresh(), 60)

    assert not answers.is_set()
    assert registry.get_sample_value("dualmap_instances", {"pool": "default", "state": "ready"}) == 1.0
    assert registry.get_sample_value("dualmap_fleet_figures_age_seconds", {"pool": "default"}) == 5.0
    assert tampered.calls.count("overview") == 2, "one call is under way at most"
    answers.set()
    await fleet.refresh()
    assert registry.get_sample_value("dualmap_fleet_figures_age_seconds", {"pool": "default"}) == 0.0
    await fleet.close()


async def test_leader_migrations_and_states_are_told(store: Any, clock: Any) -> None:
    pool, registry = store.pool("default"), CollectorRegistry()
    await pool.members.put_instance(tools.spec("a"))
    await pool.members.put_instance(tools.spec("b", state=InstanceState.DOWN))
    lease = await pool.leader_lease.acquire("worker-1", 10_000)
    await pool._calls.command("HSET", pool._keys.migrations, "sweep", 3)
    fleet = overviews(pool, clock)
    FleetGauges(fleet, registry)

    await fleet.refresh()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"pool": "default", **labels})

    assert value("dualmap_leader", owner="worker-1") == lease.fence
    assert value("dualmap_migrations_total", reason="sweep") == 3.0
    assert value("dualmap_instances", state="ready") == 1.0
    assert value("dualmap_instance_state", instance="b", state="down") == 1.0
