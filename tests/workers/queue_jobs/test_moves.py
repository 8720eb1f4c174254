"""The results of planned moves are counted by reason and reply; the reasons are on the page of keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualmap.scheduling.queues.leader_jobs import IDLE, REBALANCE, evacuate, reason_to_leave
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.steps import drive
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.led import LedPool
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.queue_jobs import Evacuator, count_moves
from tests.statestore.samples import finish
from tests.workers.doing import AddInstance, Reserve
from tests.workers.flaky_pool import FlakyPool

PAGE_OF_KEYS = Path(__file__).parents[3] / "docs" / "reference" / "redis-keys.md"


@pytest.fixture
async def queue_of_100(pool: PoolStore, add_instance: AddInstance, reserve: Reserve) -> None:
    """For a, which went down; b takes them."""
    await add_instance("a", dispatch_window_tokens=1)
    await add_instance("b", dispatch_window_tokens=1, max_queued_requests=1000)
    for number in range(101):
        await reserve(f"r{number}", "a", 10, other="b")
    await pool.members.set_instance_state("a", InstanceState.DOWN)


async def test_a_request_that_left_the_queue_meanwhile_is_left_alone(
    pool: PoolStore,
    order: QueueOrder,
    queue_of_100: None,
    value: Callable[..., float],
    leading: LeaderContext,
) -> None:
    class LeavesMeanwhile(LedPool):
        async def queue(self, instance_id: str) -> Any:
            read = await pool.queues.queue(instance_id)
            await finish(pool, "r7")
            return read

    loads, instances = await pool.loads(), (await pool.membership()).instances
    steps = evacuate("a", order, loads, instances, decode_stall_s=3.0)

    moved = count_moves(leading, await drive(steps, LeavesMeanwhile(pool, leading.fence)))

    assert moved == 99
    assert value("dualmap_worker_migrations_total", reason="instance_down", status="not_held") == 1
    assert (await pool.loads())["a"].queued_requests == 0


async def test_an_outage_in_the_middle_ends_the_round_with_everything_accounted_for(
    flaky: FlakyPool, pool: PoolStore, queue_of_100: None, leading: LeaderContext, scheduling: SchedulingSettings
) -> None:
    original, answered = pool.queues.migrate, 0

    async def migrate(*arguments: Any, **named: Any) -> Any:
        nonlocal answered
        answered += 1
        flaky.away = answered >= 40
        return await original(*arguments, **named)

    pool.queues.migrate = migrate
    evacuating = Evacuator(replace(leading, pool=flaky), scheduling)

    with pytest.raises(StoreUnavailableError):
        await evacuating.tick()

    loads = await pool.loads()
    assert loads["a"].queued_requests == 100 - 40
    assert loads["a"].pending_tokens + loads["b"].pending_tokens == 1010
    flaky.away = False
    pool.queues.migrate = original
    await evacuating.tick()
    assert (await pool.loads())["a"].queued_requests == 0


def test_the_page_of_keys_names_the_reasons_there_are() -> None:
    reasons = {REBALANCE, IDLE, *map(reason_to_leave, InstanceState)}

    section = PAGE_OF_KEYS.read_text(encoding="utf-8").partition("\n## `migrations`\n")[2].partition("\n## ")[0]
    text, example = section.split("```")[:2]

    assert set(re.findall(r"`(\w+)`", text)) == reasons
    assert set(re.findall(r'"([a-z_]+)"', example)) <= reasons
