"""Placing: a decision that was overtaken is made once more."""

from __future__ import annotations

from typing import Any

from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools
from tests.router.requests.phases.fleets import LONG, nothing_is_left


async def test_an_instance_that_went_down_meanwhile_is_passed_over(start_runtime: Any, store: Any) -> None:
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered)

    async def goes_down_now(placement: Any) -> None:
        tampered.before.clear()
        await store.pool("default").members.set_instance_state("a", InstanceState.DOWN)

    tampered.before["place"] = goes_down_now

    request = await runtime.intake.place(tools.request())

    assert request.machine.instance_id == "b"
    await tools.settle()
    assert runtime.pools.pools["default"].view.view.ready == ("b",)
    request.finish(Outcome.COMPLETED)


async def test_a_fleet_that_was_exchanged_meanwhile_is_looked_at_afresh(start_runtime: Any, store: Any) -> None:
    tampered, pool = tools.Tampered(store), store.pool("default")
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered)

    async def exchanged(placement: Any) -> None:
        tampered.before.clear()
        for former, instance_id in (("a", "c"), ("b", "d")):
            await pool.members.remove_instance(former)
            await pool.members.put_instance(tools.spec(instance_id))

    tampered.before["place"] = exchanged

    request = await runtime.intake.place(tools.request())

    assert request.machine.instance_id in ("c", "d")
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_placement_whose_answer_was_lost_goes_on_alone_and_what_the_store_reserved_is_released(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)

    async def answer_lost(placement: Any) -> None:
        await store.pool("default").place(placement)
        raise StoreUnavailableError("the answer was lost")

    tampered.before["place"] = answer_lost

    request = await runtime.intake.place(tools.request(LONG))

    assert request.machine.instance_id == "a"
    assert runtime.pools.pools["default"].store.degraded
    request.finish(Outcome.COMPLETED)
    await clock.advance(3.0)
    assert not runtime.pools.pools["default"].store.degraded
    assert await nothing_is_left(store, runtime)
