"""Planned moves are carried out one by one atomically; what changed meanwhile stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scheduling.instance import InstanceState
from scheduling.rebalance import Move
from statestore.errors import StoreUnavailableError
from workers import evacuator, rebalancer
from workers.moves import execute_moves

PAGE_OF_KEYS = Path(__file__).parents[2] / "docs" / "redis-keys.md"


@pytest.fixture
async def queue_of_100(add_instance, reserve):
    await add_instance("a", dispatch_window_tokens=1)
    await add_instance("b", dispatch_window_tokens=1)
    for number in range(101):
        await reserve(f"r{number}", "a", 10, other="b")
    return [Move(f"r{number}", "b", 1.0) for number in range(1, 101)]


async def test_a_request_that_left_the_queue_meanwhile_is_left_alone(pool, fence, metrics, queue_of_100, value) -> None:
    await pool.finish("r7")

    migrated = await execute_moves(pool, "a", queue_of_100, reason="test", fence=fence, metrics=metrics)

    assert migrated == 99
    assert value("dualmap_worker_migrations_total", reason="test", status="not_held") == 1
    assert (await pool.loads())["a"].queued_requests == 0


async def test_an_outage_in_the_middle_ends_the_round_with_everything_accounted_for(
    flaky, pool, fence, metrics, queue_of_100, value
) -> None:
    original = pool.migrate
    answered = 0

    async def migrate(*arguments, **named):
        nonlocal answered
        answered += 1
        flaky.away = answered >= 40
        return await original(*arguments, **named)

    pool.migrate = migrate

    with pytest.raises(StoreUnavailableError):
        await execute_moves(flaky, "a", queue_of_100, reason="test", fence=fence, metrics=metrics)

    moved = value("dualmap_worker_migrations_total", reason="test", status="migrated")
    loads = await pool.loads()
    assert moved == 40
    assert loads["a"].queued_requests == 100 - moved
    assert loads["a"].pending_tokens + loads["b"].pending_tokens == 1010


def test_the_page_of_keys_names_the_reasons_there_are() -> None:
    reasons = {rebalancer.REASON, *map(evacuator.reason_for, InstanceState)}

    section = PAGE_OF_KEYS.read_text(encoding="utf-8").partition("\n## `migrations`\n")[2].partition("\n## ")[0]
    text, example = section.split("```")[:2]

    assert set(re.findall(r"`(\w+)`", text)) == reasons
    assert set(re.findall(r'"([a-z_]+)"', example)) <= reasons
