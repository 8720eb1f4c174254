"""Scheduling settings that change in the running fleet."""

from __future__ import annotations

from typing import Any

from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.settings import SchedulingSettings
from tests.router import tools


async def test_a_change_reaches_the_searches_of_every_replica(start_runtime: Any, client_of: Any) -> None:
    instances = (tools.spec("a"), tools.spec("b"))
    one, other = await start_runtime(instances=instances), await start_runtime()
    client = client_of(one)
    answer = await client.patch("/admin/settings", json={"changes": {"policy": "round-robin"}, "by": "ops"})
    assert answer.status_code == 200 and answer.json()["changed"] == {"policy": "round-robin"}
    assert one.pools.pools["default"].policy.name == "round-robin"
    # The other replica hears of it with its next reply.
    placed = await other.intake.place(tools.request())
    placed.finish(Outcome.COMPLETED)
    await tools.settle()
    assert other.pools.pools["default"].policy.name == "round-robin"


async def test_a_change_is_taken_back_and_the_history_tells_both(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    client, pool = client_of(runtime), runtime.pools.pools["default"]
    await client.patch("/admin/settings", json={"changes": {"max_hold_s": 7.0}})
    assert pool.rules.max_hold_s == 7.0
    await client.patch("/admin/settings", json={"changes": {"max_hold_s": None}})
    assert pool.rules.max_hold_s == SchedulingSettings().max_hold_s
    told = (await client.get("/admin/settings/history")).json()
    assert [change["changes"] for change in told] == [{"max_hold_s": None}, {"max_hold_s": 7.0}]


async def test_a_wrong_change_is_refused_by_name_and_changes_nothing(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    client = client_of(runtime)
    for changes, named in (
        ({"polices": "dualmap"}, "scheduling.polices"),
        ({"policy": "best"}, "scheduling.policy"),
        ({"block_tokens": 64}, "scheduling.block_tokens"),
        ({"split": {}}, "scheduling.split"),
        ({"least_cost.miss_penalty": 1}, "this setting was removed"),
        ({"policy_options.no_such": 1}, "policy dualmap has no option no_such, nor any other"),
        ({"slo_ttft_s": "inf"}, "scheduling.slo_ttft_s"),
        ({"slo_ttft_s_per_1k_tokens": "inf"}, "scheduling.slo_ttft_s_per_1k_tokens must be finite"),
        ({"split.slo_tpot_s": "inf"}, "scheduling.split.slo_tpot_s must be finite"),
        ({"policy": "dynamo", "policy_options.prefill_scale": "inf"}, "scheduling.policy_options: prefill_scale"),
    ):
        answer = await client.patch("/admin/settings", json={"changes": changes})
        assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert (await client.get("/admin/settings")).json()["changed"] == {}


async def test_a_change_reaches_the_legs_of_split_requests(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    client, pool = client_of(runtime), runtime.pools.pools["default"]
    await client.patch("/admin/settings", json={"changes": {"split.mode": "never"}})
    assert pool.rules.search.split.settings.mode == pool.rules.decode_search.policy.rule.settings.mode == "never"
