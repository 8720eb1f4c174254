"""An instance's list is read at once where an answer casts doubt on it, and no more often than it may."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from dualmap.router.pool.model_lists import AGAIN_S, InstanceQueries, ModelLists
from dualmap.router.replica.runtime import Runtime
from tests.router import tools


class Instance(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        self.asked = 0
        self.status, self.names = 200, ["default"]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        return httpx.Response(self.status, json={"data": [{"id": name} for name in self.names]})


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
async def runtime(start_runtime: Any) -> Runtime:
    started: Runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    return started


@pytest.fixture
async def lists(runtime: Runtime, instance: Instance, clock: Any) -> Any:
    pool = runtime.pools.pools["default"]
    made = ModelLists(pool.store, pool.view, InstanceQueries(None, transport=instance), clock)
    yield made
    await made.close()


async def test_a_name_that_an_instance_dropped_is_known_to_the_fleet_after_one_answer(
    lists: ModelLists, instance: Instance, runtime: Runtime
) -> None:
    pool = runtime.pools.pools["default"]
    name = pool.view.view.ready[0]
    await pool.store.members.update_instance(name, {"models": {"default": "", "sql": "default"}})
    await pool.view.refresh()
    assert "sql" in runtime.pools.routes

    lists.doubt(name)
    lists.doubt("unknown")
    await tools.settle(60)

    assert pool.view.view.instances[name].models == {"default": ""}
    assert "sql" not in runtime.pools.routes
    assert instance.asked == 1


async def test_a_list_that_cannot_be_read_stays_and_is_not_asked_for_at_every_answer(
    lists: ModelLists, instance: Instance, runtime: Runtime, clock: Any
) -> None:
    pool = runtime.pools.pools["default"]
    name = pool.view.view.ready[0]
    await pool.store.members.update_instance(name, {"models": {"default": ""}})
    await pool.view.refresh()
    instance.status = 503

    for _ in range(5):
        lists.doubt(name)
        await tools.settle()
    assert instance.asked == 1
    clock.now_s += AGAIN_S
    lists.doubt(name)
    await tools.settle()

    assert instance.asked == 2
    assert pool.view.view.instances[name].models == {"default": ""}
