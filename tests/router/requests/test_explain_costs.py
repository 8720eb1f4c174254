"""The cost of each candidate, part by part."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from tests.router import tools


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap-least-cost", queue_order="deadline")


async def costs(client: Any, request_id: str) -> dict[str, Any]:
    story = (await client.get(f"/admin/explain/{request_id}")).json()
    told: dict[str, Any] = story["rounds"][-1]["costs"]
    return told


async def test_the_chosen_instance_costs_least_and_the_parts_add_up(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    first = await runtime.intake.place(tools.request("x" * 4000, request_id="one"))
    second = await runtime.intake.place(tools.request("y" * 4000, request_id="two"))

    told = await costs(client_of(runtime), "two")

    assert first.machine.instance_id != second.machine.instance_id
    assert set(told) == {"a", "b"}
    assert min(told, key=lambda name: told[name]["total_s"]) == second.machine.instance_id
    for cost in told.values():
        assert cost["total_s"] == pytest.approx(sum(cost["parts"].values()))
        assert cost["parts"]["own prefill, weighed"] > 0
    assert told[first.machine.instance_id]["parts"]["work ahead"] > 0


async def test_a_miss_of_the_slo_is_a_part_of_its_own(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    await runtime.intake.place(tools.request("x" * 400_000, request_id="late"))

    [cost] = (await costs(client_of(runtime), "late")).values()

    assert cost["parts"]["misses the SLO"] > 0
