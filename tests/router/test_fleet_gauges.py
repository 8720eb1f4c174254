"""Gauges of the fleet from a cached snapshot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.failover import FailoverPool
from router.fleet_gauges import FleetGauges, FleetOverviews
from router.metrics import RouterMetrics
from scheduling.instance import InstanceState
from statestore.errors import StoreUnavailableError


def overviews(pool: Any, clock: Any) -> FleetOverviews:
    call = RouterMetrics(["default"]).store_calls["overview"]
    return FleetOverviews({"default": pool}, clock=clock, call=call)


async def test_scrapes_at_the_same_time_or_soon_after_share_one_call(store: Any, clock: Any, tools: Any) -> None:
    tampered = tools.Tampered(store)
    fleet = overviews(tampered.pool("default"), clock)

    await asyncio.gather(*(fleet.refresh() for _ in range(10)))
    await clock.advance(0.9)
    await fleet.refresh()
    assert tampered.calls == ["overview"]
    await clock.advance(0.2)
    await fleet.refresh()

    assert tampered.calls == ["overview", "overview"]


async def test_what_is_out_of_reach_vanishes_instead_of_lying(
    store: Any, clock: Any, tools: Any, scheduling: Any
) -> None:
    tampered, registry = tools.Tampered(store), CollectorRegistry()
    pool = FailoverPool(tampered.pool("default"), scheduling, clock=clock, now_ms=clock.now_ms)
    await pool.put_instance(tools.spec("a"))
    await pool.heartbeat("replica-1", 60_000, {})
    await pool.membership()
    fleet = overviews(pool, clock)
    FleetGauges(fleet, registry)
    await fleet.refresh()
    assert registry.get_sample_value("dualmap_replicas", {"pool": "default"}) == 1.0

    async def away() -> None:
        raise StoreUnavailableError("away")

    tampered.before |= {"overview": away, "membership": away}
    for _ in range(2):  # the first scrape finds out, the next one knows
        await clock.advance(2.0)
        await fleet.refresh()

        assert pool.degraded, "the replica goes on by a state of its own"
        assert [sample for family in registry.collect() for sample in family.samples] == []
        with pytest.raises(StoreUnavailableError):
            await fleet.get("default")
    tampered.before.clear()
    await clock.advance(2.0)
    await fleet.refresh()

    assert registry.get_sample_value("dualmap_replicas", {"pool": "default"}) == 1.0
    await pool.close()


async def test_leader_migrations_and_states_are_told(store: Any, clock: Any, tools: Any) -> None:
    pool, registry = store.pool("default"), CollectorRegistry()
    await pool.put_instance(tools.spec("a"))
    await pool.put_instance(tools.spec("b", state=InstanceState.DOWN))
    lease = await pool.acquire_lease("worker-1", 10_000)
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
