"""Limits that a request draws from, by the names that it may have for its model; pools that stand in for others."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.errors import NoInstanceError, QuotaSpentError
from dualmap.router.replica.runtime import Runtime
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import LimitSettings, TenantSettings
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.tenants.tenant import Caller, Tenant
from dualmap.statestore.memory import MemoryStore
from tests.router import tools

POOL = PoolSettings(model="base", aliases=("gpt",))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/audio/transcriptions"])
@pytest.mark.parametrize(
    ("limited", "drawing", "others"), [("base", ("base", "", "gpt"), ()), ("gpt", ("gpt",), ("", "base"))]
)
async def test_a_models_limit_holds_by_every_name_that_leads_to_it(
    start_runtime: Any, path: str, limited: str, drawing: tuple[str, ...], others: tuple[str, ...]
) -> None:
    acme = TenantSettings(name="acme", model_limits={limited: LimitSettings(requests_per_day=1)}).tenant()
    runtime = await start_runtime(instances=(tools.spec("a"),), pools=(POOL,))

    async def place(model: str) -> None:
        await runtime.intake.place(tools.request(path=path, model=model, caller=Caller(acme, "ci")))

    await place(drawing[-1])
    for model in drawing:
        with pytest.raises(QuotaSpentError):
            await place(model)
    for model in others:
        await place(model)


BIG = PoolSettings(name="big", model="big", fallback="small")
SMALL = PoolSettings(name="small", model="small")
STARTING = InstanceState.STARTING


async def two_pools(start_runtime: Any, store: MemoryStore, *, big: InstanceState, small: InstanceState) -> Runtime:
    runtime: Runtime = await start_runtime(pools=(BIG, SMALL))
    for name, state in (("big", big), ("small", small)):
        await store.pool(name).members.put_instance(tools.spec(f"of-{name}", state=state))
        await runtime.pools.pools[name].view.refresh()
    return runtime


async def served_by(runtime: Runtime, tenant: Tenant | None = None, **about: Any) -> tuple[str, str]:
    """The instance and the model of a request for the big model."""
    caller = None if tenant is None else Caller(tenant, "ci")
    live = await runtime.intake.place(tools.request(model="big", caller=caller, **about))
    live.finish(Outcome.COMPLETED)
    return live.machine.instance_id, live.machine.spec.model


async def test_another_pool_stands_in_while_no_instance_is_ready(start_runtime: Any, store: MemoryStore) -> None:
    runtime = await two_pools(start_runtime, store, big=STARTING, small=InstanceState.READY)

    assert await served_by(runtime) == ("of-small", "small")
    assert runtime.pools.pools["big"].metrics.fallbacks.value == 1

    await store.pool("big").members.set_instance_state("of-big", InstanceState.READY)
    await runtime.pools.pools["big"].view.refresh()
    assert await served_by(runtime) == ("of-big", "big")


@pytest.mark.parametrize(
    ("tenant", "allowed"),
    [
        (Tenant("acme"), True),
        (Tenant("acme", pools=frozenset({"big", "small"})), True),
        (Tenant("acme", pools=frozenset({"big"})), False),
        (Tenant("acme", models=frozenset({"big"})), False),
    ],
)
async def test_a_tenant_gets_it_where_it_may_use_that_pool_and_its_model(
    start_runtime: Any, store: MemoryStore, tenant: Tenant, allowed: bool
) -> None:
    runtime = await two_pools(start_runtime, store, big=STARTING, small=InstanceState.READY)

    if allowed:
        assert await served_by(runtime, tenant) == ("of-small", "small")
    else:
        with pytest.raises(NoInstanceError):
            await served_by(runtime, tenant)


async def test_a_pool_that_has_none_ready_either_stands_in_for_nobody(start_runtime: Any, store: MemoryStore) -> None:
    runtime = await two_pools(start_runtime, store, big=STARTING, small=STARTING)

    with pytest.raises(NoInstanceError, match="big"):
        await served_by(runtime)
    assert runtime.pools.pools["big"].metrics.fallbacks.value == 0


async def test_a_request_says_whether_its_engine_sees_its_prompt_as_it_was_read(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),), pools=(POOL,))
    told = []
    for shows in (True, False):
        request = tools.request(model="base")
        request.shows_prompt = shows
        live = await runtime.intake.place(request)
        told.append(live.machine.spec.shows_prompt)
        live.finish(Outcome.COMPLETED)

    assert told == [True, False]


@pytest.mark.parametrize(("truncates_to", "hits"), [(None, True), (10_000, True), (1100, False), (5, False)])
async def test_no_hit_is_expected_of_a_prompt_that_its_engine_truncates(
    start_runtime: Any, truncates_to: int | None, hits: bool
) -> None:
    """It computes what is left: a client could have long prompts computed that placements take for cached."""
    runtime = await start_runtime(instances=(tools.spec("a"),), pools=(POOL,))
    expected = []
    for limit in (None, truncates_to):
        request = tools.request(model="base", prompt="word " * 800)
        request.truncates_to = limit
        live = await runtime.intake.place(request)
        expected.append(live.expected_cached_tokens)
        live.finish(Outcome.COMPLETED)

    assert expected[0] == 0
    assert (expected[1] > 0) is hits
