from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.simulation.capacity.bounds import sustainable_rate
from dualmap.simulation.commands.tenant_options import tenant_mix
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.errors import TraceError
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.generators import uncached

ENGINE = find_preset("qwen2.5-7b-910b4").engine
SHORT = "uncached:tokens=1000,answer=20"
LONG = "uncached:tokens=16000,answer=20"


def test_tenants_are_merged_in_order_of_arrival_and_share_no_prefix() -> None:
    mix = tenant_mix([f"one={SHORT}@3@weight=2,class=batch", "two=zipf:skew=1.2@2"], 20, ENGINE, 2)

    trace = mix.load()

    assert [request.arrival_s for request in trace.requests] == sorted(request.arrival_s for request in trace.requests)
    ids = {name: {each for r in trace.requests if r.tenant == name for each in r.hash_ids} for name in ("one", "two")}
    assert ids["one"].isdisjoint(ids["two"])
    assert {r.priority for r in trace.requests if r.tenant == "one"} == {"batch"}
    assert [(tenant.name, tenant.weight) for tenant in mix.tenants] == [("one", 2.0), ("two", 1.0)]
    assert {request.tenant for request in mix.alone("two").load().requests} == {"two"}


def test_sessions_of_tenants_are_told_apart() -> None:
    trace = tenant_mix(["one=agents@2", "two=agents@2"], 60, ENGINE, 2).load()

    sessions = {name: {r.session for r in trace.requests if r.tenant == name} for name in ("one", "two")}
    assert sessions["one"] and sessions["one"].isdisjoint(sessions["two"])
    for request in trace.requests:
        assert all(each.startswith(f"{request.tenant}/") for each in (request.session, *request.after))


def test_a_rate_may_be_a_multiple_of_what_the_fleet_sustains_of_the_trace() -> None:
    mix = tenant_mix([f"one={SHORT}@1.5x"], 10, ENGINE, 2)
    sustained = sustainable_rate(uncached(2000, 1, tokens=1000, answer=20), ENGINE, 2, share=1.0)
    assert mix.traffic[0].rate_per_s == pytest.approx(1.5 * sustained)


@pytest.mark.parametrize(
    "texts",
    [["one"], [f"one={SHORT}"], [f"one={SHORT}@2@size=3"], [f"one={SHORT}@2", f"one={SHORT}@2"], ["one=zipf@0.01"]],
)
def test_what_is_no_tenant_is_refused_by_name(texts: list[str]) -> None:
    with pytest.raises(TraceError, match="one"):
        tenant_mix(texts, 10, ENGINE, 2)


def test_a_light_tenant_of_long_prompts_is_on_time_beside_one_that_offers_twice_the_fleet() -> None:
    mix = tenant_mix([f"light={LONG}@0.3", f"heavy={SHORT}@2x"], 40, ENGINE, 4)
    scenario = Scenario(SchedulingSettings(), ENGINE, instances=4, late_requests="refuse")

    before = simulate(mix.load(), scenario)
    shared = simulate(mix.load(), replace(scenario, tenants=mix.tenants))

    assert before.by_tenant["light"].on_time < 0.5
    assert shared.by_tenant["light"].on_time > 0.95
    work_s = [sum(each.work_s for each in result.by_tenant.values()) for result in (before, shared)]
    assert work_s[1] == pytest.approx(work_s[0], rel=0.05)


def test_late_requests_of_a_light_tenant_go_before_those_of_one_above_its_share() -> None:
    mix = tenant_mix(
        ["light=uncached:tokens=8000,answer=20@0.2", "heavy=uncached:tokens=4000,answer=20@2x"], 40, ENGINE, 1
    )
    # given an SLO that no prompt can meet, so that all are late, and served late
    scenario = Scenario(SchedulingSettings(slo_ttft_s=0.3), ENGINE, instances=1, late_requests="serve")

    before = simulate(mix.load(), scenario)
    shared = simulate(mix.load(), replace(scenario, tenants=mix.tenants))

    assert before.by_tenant["light"].ttft_p99_s > 20.0
    assert shared.by_tenant["light"].ttft_p99_s < 3.0, "its own second, and the rest of what was begun"


def test_tenants_that_all_want_more_get_their_weights_of_the_work() -> None:
    mix = tenant_mix([f"one={LONG}@1.5x@weight=2", f"two={SHORT}@1.5x"], 60, ENGINE, 2)
    scenario = Scenario(SchedulingSettings(), ENGINE, instances=2, late_requests="refuse", tenants=mix.tenants)

    result = simulate(mix.load(), scenario)

    assert result.by_tenant["one"].work_share == pytest.approx(2 / 3, abs=0.07)


def test_a_class_that_fills_idle_room_leaves_the_others_on_time_and_a_floor_lets_it_go_on() -> None:
    texts = [f"chat={SHORT}@1.4x@class=chat", f"batch={SHORT}@0.4x@class=batch"]
    mix = tenant_mix(texts, 30, ENGINE, 2)

    def run(floor: float) -> RunResult:
        batch = PriorityClassSettings(name="batch", fills_idle=True, floor=floor)
        classes = SchedulingSettings(classes=(PriorityClassSettings(name="chat"), batch))
        return simulate(mix.load(), Scenario(classes, ENGINE, instances=2))

    none, some = run(0.0), run(0.2)

    assert none.by_tenant["batch"].work_share < 0.05
    assert some.by_tenant["batch"].work_share == pytest.approx(0.2, abs=0.06)
