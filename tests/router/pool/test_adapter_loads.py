"""Requests for a registered adapter find it loaded where they are sent, or are told why it is not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dualmap.router.errors import UnknownModelError, UpstreamError
from dualmap.router.pool import adapter_loads
from dualmap.router.pool.adapter_loads import AGAIN_S
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.replica.runtime import Runtime
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.registered_adapters import AdapterState, RegisteredAdapter, Step
from tests.router import tools
from tests.router.reached_adapters import serve
from tests.support.adapter_servers import AdapterServers

SQL = RegisteredAdapter("/adapters/sql")


@pytest.fixture
def servers() -> AdapterServers:
    made = AdapterServers()
    made.add(*"abc")
    return made


@pytest.fixture
async def runtime(start_runtime: Any, servers: AdapterServers, clock: Any) -> Runtime:
    started: Runtime = await start_runtime(instances=tuple(tools.spec(name, models={"default": ""}) for name in "abc"))
    serve(started, servers, clock)
    return started


async def register(pool: ServedPool, name: str = "sql", adapter: RegisteredAdapter = SQL) -> None:
    await pool.store.adapters.change(name, lambda former, known: adapter)
    await pool.view.refresh()


async def test_a_request_is_sent_once_its_instance_has_loaded_the_adapter_and_all_replicas_know(
    runtime: Runtime, servers: AdapterServers
) -> None:
    pool = runtime.pools.pools["default"]
    await register(pool)

    live = await runtime.intake.place(tools.request(model="sql"))
    again = await runtime.intake.place(tools.request(model="sql"))

    chosen = live.machine.instance_id
    assert servers.of[chosen].calls == [("load", "sql", "/adapters/sql")]
    spec = (await pool.store.membership()).instances[chosen]
    assert (spec.models, spec.adapters) == ({"default": "", "sql": "default"}, {"sql": "/adapters/sql"})
    assert again.machine.instance_id in servers.of


async def test_an_adapter_that_was_not_registered_is_left_to_the_engine(
    runtime: Runtime, servers: AdapterServers
) -> None:
    pool = runtime.pools.pools["default"]
    await pool.store.members.add_name("resolved", "lora")
    await pool.store.members.update_instance("a", {"models": {"default": "", "resolved": "default"}})
    await pool.view.refresh()

    await runtime.intake.place(tools.request(model="resolved"))

    assert not any(each.calls for each in servers.of.values())
    assert pool.view.view.serving("resolved") is pool.view.view


async def test_requests_that_wait_for_one_load_share_it(runtime: Runtime, servers: AdapterServers) -> None:
    pool, goes = runtime.pools.pools["default"], asyncio.Event()
    await register(pool)
    for each in servers.of.values():
        each.goes = goes

    placing = [asyncio.create_task(runtime.intake.place(tools.request("hello", model="sql"))) for _ in range(5)]
    await tools.settle(80)
    assert not any(task.done() for task in placing)
    goes.set()
    placed = await asyncio.gather(*placing)

    homes = {live.machine.instance_id for live in placed}
    assert all(len(servers.of[home].calls) == 1 for home in homes)


async def test_the_wait_for_a_load_is_explained(runtime: Runtime, servers: AdapterServers, clock: Any) -> None:
    pool, goes = runtime.pools.pools["default"], asyncio.Event()
    await register(pool)
    for each in servers.of.values():
        each.goes = goes
    placing = asyncio.create_task(runtime.intake.place(tools.request(model="sql", request_id="one")))
    await tools.settle(80)
    clock.now_s += 1.5
    goes.set()
    (await placing).finish(Outcome.COMPLETED)

    explained = runtime.context.decisions.get("one")
    assert explained is not None
    assert explained.to_dict()["adapter_wait_s"] == 1.5
    assert runtime.context.metrics.pools["default"].adapter_steps[Step.LOAD, True].value == 1


async def test_an_instance_that_does_not_load_it_is_left_for_another_one_and_blamed_for_nothing(
    runtime: Runtime, servers: AdapterServers
) -> None:
    pool = runtime.pools.pools["default"]
    await register(pool)
    first = (await runtime.intake.place(tools.request(model="sql"))).machine.instance_id
    await pool.store.adapters.change("chat", lambda former, known: RegisteredAdapter("/adapters/chat"))
    await pool.view.refresh()
    for name in "ab":
        servers.of[name].missing = frozenset({"/adapters/chat"})

    live = await runtime.intake.place(tools.request(model="chat"))

    assert live.machine.instance_id == "c"
    assert first in servers.of
    assert {failure.kind for _, failure, _ in live.machine.failures} <= {FailureKind.ADAPTER}
    assert not pool.evidence.breakers.troubled


async def test_where_no_instance_loads_it_the_client_gets_the_engines_words(
    runtime: Runtime, servers: AdapterServers, clock: Any
) -> None:
    pool = runtime.pools.pools["default"]
    await register(pool)
    for each in servers.of.values():
        each.missing = frozenset({"/adapters/sql"})

    with pytest.raises(UpstreamError, match=r"does not have the adapter 'sql': .*No adapter found for /adapters/sql"):
        await runtime.intake.place(tools.request(model="sql"))
    calls = sum(len(each.calls) for each in servers.of.values())
    with pytest.raises(UpstreamError):  # without another call: it has just failed there
        await runtime.intake.place(tools.request(model="sql"))
    assert sum(len(each.calls) for each in servers.of.values()) == calls
    clock.now_s += AGAIN_S
    for each in servers.of.values():
        each.missing = frozenset()

    assert (await runtime.intake.place(tools.request(model="sql"))).machine.instance_id in servers.of
    loads = await pool.store.loads()
    assert sum(load.running_requests for load in loads.values()) == 1


async def test_an_instance_that_has_lost_it_loads_it_again_and_keeps_the_request(
    start_runtime: Any, servers: AdapterServers, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", models={"default": ""}),))
    pool = serve(runtime, servers, clock)
    await register(pool)
    live = await runtime.intake.place(tools.request(model="sql"))
    servers.of["a"].adapters.clear()  # restarted, and no check has seen it

    await live.failed(Failed(InstanceFailure(FailureKind.STATUS, "The model `sql` does not exist.", 404)))

    assert live.machine.instance_id == "a"
    assert [call for call, *_ in servers.of["a"].calls] == ["load", "load"]
    live.finish(Outcome.COMPLETED)


async def test_an_engines_404_about_something_else_is_its_answer(
    start_runtime: Any, servers: AdapterServers, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", models={"default": ""}),))
    await register(serve(runtime, servers, clock))
    live = await runtime.intake.place(tools.request(model="sql"))

    with pytest.raises(UpstreamError):
        await live.failed(Failed(InstanceFailure(FailureKind.STATUS, "no such thing", 404)))


async def test_a_request_whose_adapter_is_unloaded_while_it_waits_is_told_so(
    runtime: Runtime, servers: AdapterServers
) -> None:
    pool = runtime.pools.pools["default"]
    await register(pool)

    gone = replace(SQL, state=AdapterState.UNLOADED)
    await pool.store.adapters.change("sql", lambda former, known: gone)

    with pytest.raises(UnknownModelError, match="was unloaded while this request waited"):
        await pool.adapter_loads.ensure("a", "sql")

    assert not servers.of["a"].calls


async def test_a_replica_with_an_old_copy_does_not_bring_former_weights_back(
    runtime: Runtime, servers: AdapterServers, start_runtime: Any, clock: Any
) -> None:
    pool = runtime.pools.pools["default"]
    await register(pool)
    await pool.adapter_loads.ensure("a", "sql")
    other = serve(await start_runtime(), servers, clock)
    old = other.view.adapters["sql"]
    await register(pool, adapter=replace(SQL, generation=1))
    await pool.adapter_loads.ensure("a", "sql")
    assert old.generation == 0

    await other.adapter_loads.ensure("a", "sql")

    assert servers.of["a"].adapters == {"sql": "/adapters/sql/."}
    assert servers.of["a"].calls[-1] == ("replace", "sql", "/adapters/sql/.")


async def test_who_waits_is_let_go_when_the_instance_leaves_service_or_the_load_takes_too_long(
    runtime: Runtime, servers: AdapterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = runtime.pools.pools["default"]
    monkeypatch.setattr(adapter_loads, "LOOKS_EVERY_S", 0.01)
    await register(pool)
    servers.of["a"].goes = servers.of["b"].goes = asyncio.Event()
    waiting = asyncio.create_task(pool.adapter_loads.ensure("a", "sql"))
    await tools.settle(60)
    await pool.store.members.set_instance_state("a", InstanceState.DOWN)
    await pool.view.refresh()

    assert (await waiting).complaint == "it left service while it loaded"
    monkeypatch.setattr(adapter_loads, "WAITS_S", 0.0)
    assert "goes on: try again later" in (await pool.adapter_loads.ensure("b", "sql")).complaint
    await pool.adapter_loads.close()


async def test_a_server_without_a_list_is_made_to_load_once(
    start_runtime: Any, servers: AdapterServers, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = serve(await start_runtime(instances=(tools.spec("a"),)), servers, clock)
    await register(pool)
    monkeypatch.setattr("dualmap.runtime.engine_adapters._list", no_list)

    first, second = [await pool.adapter_loads.ensure("a", "sql") for _ in range(2)]
    pool.adapter_loads.doubt("a")

    assert (first.complaint, second.complaint) == ("", "")
    assert len(servers.of["a"].calls) == 1
    assert pool.adapter_loads.lacks("a", "sql")


async def no_list(*_: Any) -> Any:
    from dualmap.scheduling.state.model_names import ModelList

    return ModelList(status=404)
