"""One plan of an instance at a time, by the latest head of its queue."""

from __future__ import annotations

import asyncio

import pytest

from dualmap.router.pool.queue_planner import QueuePlanner
from dualmap.scheduling.queues.queue_order import QueueHead
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from tests.router import tools


def queue_head(instance_id: str, version: int) -> QueueHead:
    return QueueHead(0, InstanceLoad(instance_id, InstanceState.READY, version=version), ())


class Grants:
    """Notes the version of each head that it is given, and takes until it is told to go on."""

    def __init__(self) -> None:
        self.versions: list[tuple[str, int]] = []
        self.goes_on = asyncio.Event()
        self.fails = False

    async def __call__(self, queue: QueueHead) -> None:
        self.versions.append((queue.load.instance_id, queue.load.version))
        await self.goes_on.wait()
        if self.fails:
            raise ValueError("a bug")


async def test_what_is_told_of_a_queue_while_it_is_planned_is_planned_once_afterwards() -> None:
    grants = Grants()
    planner = QueuePlanner(grants)
    for version in (1, 2, 3):
        planner.plan(queue_head("a", version))
        await tools.settle()
    planner.plan(queue_head("b", 7))
    await tools.settle()
    assert grants.versions == [("a", 1), ("b", 7)]

    grants.goes_on.set()
    await planner.done()

    assert grants.versions == [("a", 1), ("b", 7), ("a", 3)]
    planner.plan(queue_head("a", 4))
    await planner.done()
    assert grants.versions[-1] == ("a", 4)


async def test_a_plan_that_fails_stops_no_later_one() -> None:
    grants = Grants()
    grants.fails = True
    grants.goes_on.set()
    planner = QueuePlanner(grants)
    planner.plan(queue_head("a", 1))
    with pytest.raises(ValueError, match="a bug"):
        await planner.done()

    grants.fails = False
    planner.plan(queue_head("a", 2))
    await planner.done()

    assert grants.versions == [("a", 1), ("a", 2)]
