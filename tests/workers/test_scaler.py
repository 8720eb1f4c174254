"""The scaler in a worker: it acts on the store with the leader's fence, and publishes what it wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.runtime.pool_settings import InstanceSettings, PoolSettings
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.scaling.scale_record import DecisionStatus
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState, Role
from dualmap.statestore.errors import LeaseLostError, StoreUnavailableError
from dualmap.statestore.pool import PoolStore
from dualmap.workers.actuators import actuator_of
from dualmap.workers.context import LeaderContext
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.scaler import Scaler
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance

MakeScaler = Callable[..., Scaler]


def pool_settings(least: int, most: int, actuator: str = "standby") -> PoolSettings:
    spare = InstanceSettings(id="spare", url="http://spare:8000", standby=True)
    autoscale = AutoscaleSettings(min_instances=least, max_instances=most, actuator=actuator)
    return PoolSettings(autoscale=autoscale, instances=(spare,))


@pytest.fixture
def scaler(pool: Any, leading: LeaderContext) -> MakeScaler:
    """Make the scaler of a leader, or of one whose term is over: ``scaler(pool_settings(2, 4), former=True)``."""

    def make(settings: PoolSettings, *, decodes: bool = False, former: bool = False) -> Scaler:
        context = replace(leading, settings=settings, fence=leading.fence - former)
        actuator = actuator_of(settings, pool, decodes=decodes)
        return Scaler(context, SchedulingSettings(), actuator, arrived=lambda: 0, decodes=decodes)

    return make


async def state_of(pool: Any, name: str) -> InstanceState:
    return (await pool.membership()).instances[name].state


async def test_a_fleet_below_its_minimum_starts_a_spare_and_says_so(
    pool: PoolStore, scaler: MakeScaler, add_instance: AddInstance, value: Callable[..., float]
) -> None:
    await add_instance("a")
    await add_instance("spare", InstanceState.STANDBY)
    await scaler(pool_settings(2, 4)).tick()

    assert await state_of(pool, "spare") is InstanceState.STARTING
    record = await pool.publications.scaling()
    assert (record.decision_id, record.status, record.by) == (1, DecisionStatus.OPEN, "w1")
    assert "1 of at least 2" in (await pool.publications.scaling_log(1))[0].text
    assert value("dualmap_worker_wanted_instances", role="prefill") == 2


async def test_requests_that_wait_at_replicas_start_the_first_instance(
    pool: PoolStore, scaler: MakeScaler, clock: ManualClock, add_instance: AddInstance, value: Callable[..., float]
) -> None:
    await add_instance("spare", InstanceState.STANDBY)
    made = scaler(pool_settings(0, 2))
    await pool.heartbeat("r1", 10_000, {"waiting": "0", "live": "0", "ended": "5"})
    await made.tick()
    metrics_of = ("dualmap_worker_wanted_instances", "dualmap_worker_least_instances")
    assert [value(name, role="prefill") for name in metrics_of] == [0, 0]

    await pool.heartbeat("r1", 10_000, {"waiting": "3", "live": "3", "ended": "5"})
    await pool.heartbeat("r2", 10_000, {"waiting": "nonsense"})
    await clock.advance(1.0)
    await made.tick()
    assert await state_of(pool, "spare") is InstanceState.STARTING
    assert "first instance: 3" in (await pool.publications.scaling()).reason


async def test_without_an_actuator_only_the_number_is_published(
    pool: PoolStore, scaler: MakeScaler, add_instance: AddInstance, value: Callable[..., float]
) -> None:
    await add_instance("a")
    await add_instance("spare", InstanceState.STANDBY)
    await scaler(pool_settings(2, 4, "none")).tick()
    assert await state_of(pool, "spare") is InstanceState.STANDBY
    assert value("dualmap_worker_wanted_instances", role="prefill") == 2


async def test_decode_instances_are_scaled_by_themselves_and_to_the_pace_of_answers(
    pool: PoolStore, scaler: MakeScaler, fence: int, add_instance: AddInstance, value: Callable[..., float]
) -> None:
    spare = InstanceSettings(id="spare", url="http://spare:8000", standby=True, role=Role.DECODE)
    autoscale = AutoscaleSettings(max_instances=4, decode={"min_instances": 1, "max_instances": 3})
    settings = PoolSettings(autoscale=autoscale, instances=(spare,))
    await add_instance("a")
    await add_instance("spare", InstanceState.STANDBY)
    await pool.members.update_instance("spare", {"role": Role.DECODE})
    await pool.publications.publish_learned(Learned(tpot_s=0.08), {}, fence=fence)
    made = scaler(settings, decodes=True)
    await made.tick()

    assert await state_of(pool, "spare") is InstanceState.STARTING
    assert (await pool.publications.scaling()).decision_id == 0
    assert (await pool.publications.scaling("decode")).starting == ("spare",)
    assert value("dualmap_worker_wanted_instances", role="decode") == 1
    assert (await made._now()).answer_pace == pytest.approx(0.08 / 0.05)


async def test_a_former_leader_changes_nothing(pool: PoolStore, scaler: MakeScaler, add_instance: AddInstance) -> None:
    await add_instance("a")
    await add_instance("spare", InstanceState.STANDBY)
    with pytest.raises(LeaseLostError):
        await scaler(pool_settings(2, 4), former=True).tick()
    assert await state_of(pool, "spare") is InstanceState.STANDBY
    assert (await pool.publications.scaling()).decision_id == 0


async def test_without_the_store_there_is_no_decision(
    pool: PoolStore, scaler: MakeScaler, add_instance: AddInstance
) -> None:
    await add_instance("a")
    made = scaler(pool_settings(2, 4))

    async def away() -> None:
        raise StoreUnavailableError("away")

    pool.loads = away  # type: ignore[assignment]
    with pytest.raises(StoreUnavailableError):
        await made.tick()
    assert (await pool.publications.scaling()).decision_id == 0


def test_a_former_leader_publishes_no_number(metrics: WorkerMetrics, value: Callable[..., float]) -> None:
    metrics.wanted_instances.labels("default", "prefill").set(4)
    metrics.wanted_instances.labels("default", "decode").set(4)
    metrics.end_term("default")
    metrics.end_term("default")
    assert "dualmap_worker_wanted_instances{" not in metrics.exposition().decode()
