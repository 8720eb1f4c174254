from dataclasses import replace

import pytest

from dualmap.research.scalers import Scaler
from dualmap.research.unshared.load_view import LoadView
from dualmap.research.unshared.routers import UnsharedRouters
from dualmap.research.variant import SETTINGS, VariantError, described, described_variant, parse_variant
from dualmap.research.workload import Traffic, Workload
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import Role
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.autoscale import Autoscale
from dualmap.simulation.virtual_time.scenario import Dispatch, FleetChange, Scenario

BASE = SchedulingSettings(slo_ttft_s=3.0)
EIGHT = Workload(Traffic("uniform", "uniform"), "qwen2.5-7b-910b4", 8, 80, warm_up_requests=0)


def test_settings_and_scenario_options_are_parsed_over_the_base() -> None:
    text = "late = dualmap-least-cost, queue_order=deadline,policy_options.deferred_weight=0.1,dispatch_window_tokens=9"

    variant = parse_variant(text, BASE)
    scenario = variant.scenario(replace(EIGHT, instances=3, warm_up_requests=7))

    assert variant.name == "late"
    assert scenario.scheduling.policy == "dualmap-least-cost"
    assert scenario.scheduling.queue_order == "deadline"
    assert scenario.scheduling.policy_options == {"deferred_weight": 0.1}
    assert scenario.scheduling.slo_ttft_s == 3.0, "from the base"
    assert scenario.dispatch_window_tokens == 9
    assert (scenario.instances, scenario.skip_requests) == (3, 7)


def test_what_a_variant_does_not_say_is_the_scenarios_default() -> None:
    scenario = parse_variant("peer=llm-d", BASE).scenario(EIGHT)

    assert scenario == Scenario(BASE.model_copy(update={"policy": "llm-d"}), find_preset(EIGHT.preset).engine)


def test_a_variant_can_have_a_fleet_of_its_own_roles() -> None:
    variant = parse_variant("a=dualmap,roles=6P2D,split.mode=always", BASE)

    specs = [variant.scenario(replace(EIGHT, instances=4)).spec(index) for index in range(4)]

    assert [spec.role for spec in specs] == [Role.PREFILL, Role.PREFILL, Role.PREFILL, Role.DECODE]
    assert described(variant)["roles"] == "6P2D"
    assert described(variant)["split.mode"] == "always"


def test_a_variant_can_size_its_fleet_itself_and_is_read_again_from_its_description() -> None:
    variant = parse_variant("a=dualmap-least-cost,autoscale=2:6", BASE)

    autoscale = variant.scenario(EIGHT).autoscale
    assert isinstance(autoscale, Autoscale)
    assert (autoscale.settings.min_instances, autoscale.settings.max_instances) == (2, 6)
    assert described_variant("a", described(variant)).options == variant.options


def test_a_variant_can_size_its_fleet_by_another_projects_plan() -> None:
    variant = parse_variant("a=dualmap,autoscale=2:6,scaler=dynamo:queue_up=2+kv_up=0.4", BASE)

    autoscale = variant.scenario(EIGHT).autoscale
    assert isinstance(autoscale, Autoscale)
    assert autoscale.planner_of == Scaler("dynamo", (("queue_up", 2.0), ("kv_up", 0.4)))
    assert described_variant("a", described(variant)).options == variant.options


def test_the_replicas_of_a_variant_can_share_no_store() -> None:
    variant = parse_variant("a=dualmap,load_view=late,replicas=8,reading_interval_s=2", BASE)

    assert variant.scenario(EIGHT).routers == UnsharedRouters(8, LoadView.LATE, 2.0)
    assert described_variant("a", described(variant)).options == variant.options
    assert parse_variant("a=dualmap", BASE).scenario(EIGHT).routers is None


def test_a_workload_may_change_the_fleet_under_every_variant() -> None:
    changes = (FleetChange(10.0, 4),)

    assert parse_variant("a=llm-d", BASE).scenario(replace(EIGHT, changes=changes)).changes == changes


def test_the_way_of_dispatch_can_be_named() -> None:
    assert parse_variant("a=llm-d,dispatch=hold", BASE).scenario(EIGHT).dispatch_of is Dispatch.HOLD


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dualmap", "must read NAME=POLICY"),
        ("a=", "must read NAME=POLICY"),
        ("a=best", "variant 'a': unknown policy 'best'; known are dualmap,"),
        ("a=dualmap,fast", "variant 'a': 'fast' must read setting=value"),
        ("a=dualmap,speed=1", "variant 'a': unknown setting 'speed'; known are dispatch,"),
        ("a=dualmap,split=1", "unknown setting 'split'"),
        ("a=dualmap,split.weight=1", "unknown setting 'split.weight'"),
        ("a=dualmap,dynamo.prefill_scale=1", "'dynamo.prefill_scale'; this setting was removed: the policy's own"),
        ("a=dualmap,policy_options.weight=1", "policy_options: policy dualmap has no option weight, nor any other"),
        ("a=llm-d,policy_options.weight=1", "policy llm-d has no option weight; it has host_credit, disk_credit"),
        ("a=llm-d,policy_options.kv_weight=-1", "kv_weight: Input should be greater than or equal to 0"),
        ("a=dualmap,slo_ttft_s.x=1", "unknown setting 'slo_ttft_s.x'"),
        ("a=dualmap,slo_ttft_s=soon", "variant 'a': slo_ttft_s: "),
        ("a=dualmap,dispatch=throw", "variant 'a': dispatch: "),
        ("a=dualmap,slo_ttft_s=0", "variant 'a': slo_ttft_s: "),
        ("a=dualmap,replicas=8", "variant 'a': Value error, replicas and reading_interval_s need a load_view"),
        ("a=dualmap,scaler=dynamo", "variant 'a': Value error, a scaler needs autoscale"),
        ("a=dualmap,autoscale=1:2,scaler=keda", "variant 'a': scaler: Value error, there is no scaler 'keda'"),
        ("a=dualmap,autoscale=6:2", "variant 'a': autoscale: Value error, needs 0 <= MIN <= MAX"),
        ("a=dualmap,roles=8", "variant 'a': roles: Value error, roles must read as 4P4D"),
    ],
)
def test_what_cannot_be_understood_is_named(text: str, message: str) -> None:
    with pytest.raises(VariantError) as raised:
        parse_variant(text, BASE)

    assert message in str(raised.value)


def test_every_setting_has_a_path() -> None:
    assert {"slo_ttft_s", "split.mode", "policy_options"} <= set(SETTINGS)


def test_a_description_holds_what_differs_from_the_defaults() -> None:
    variant = parse_variant("a=llm-d,policy_options.kv_weight=1,dispatch=hold", SchedulingSettings())

    assert dict(described(variant)) == {"policy": "llm-d", "policy_options.kv_weight": 1, "dispatch": "hold"}


@pytest.mark.parametrize(("slow", "numbers"), [("half", (1, 3, 5, 7)), ("one", (1,))])
def test_a_part_of_the_fleet_may_be_slow(slow: str, numbers: tuple[int, ...]) -> None:
    variant = parse_variant(f"ours=dualmap-least-cost,slow={slow}", SchedulingSettings())

    changes = variant.scenario(EIGHT).speed_changes

    assert [(change.instance_id, change.at_s, change.slowdown) for change in changes] == [
        (f"i{number:03d}", 0.0, 2.0) for number in numbers
    ]
