"""Other projects' plans do what their documents say."""

from __future__ import annotations

import pytest

from dualmap.research.scalers import SCALERS, Scaler
from dualmap.scheduling.scaling.scale_job import Planner
from dualmap.scheduling.scaling.scale_plan import FleetFigures
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings

BOUNDS = AutoscaleSettings(min_instances=2, max_instances=10)


def planner_of(text: str) -> Planner:
    return Scaler.parse(text)(BOUNDS)


def after(planner: Planner, seconds: int, size: int, first_s: int = 0, **figures: float) -> int:
    """The size that it wants after so many looks at the same figures."""
    for at_s in range(first_s, first_s + seconds):
        planner.observe(FleetFigures(float(at_s), size, **figures))
        wanted = planner.plan().wanted
    return wanted


def test_an_hpa_scales_by_the_ratio_to_its_target_and_by_twice_at_most() -> None:
    assert after(planner_of("hpa-queue:target=4.0"), 20, 4, held_requests=24) == 6
    assert after(planner_of("hpa-queue:target=4.0"), 20, 4, held_requests=99) == 8
    assert after(planner_of("hpa-queue:target=4.0"), 20, 4, held_requests=17) == 4, "within its tolerance"


def test_an_hpa_steps_down_after_its_stabilization_window() -> None:
    planner = planner_of("hpa-kv:target=0.2")
    assert after(planner, 20, 6, kv_demand=1.2) == 6
    assert after(planner, 200, 6, first_s=20, kv_demand=0.4) == 6
    assert after(planner, 200, 6, first_s=220, kv_demand=0.4) == 2


def test_aibrix_keeps_the_size_within_its_band_and_leaves_it_late() -> None:
    assert after(planner_of("apa:target=0.2"), 20, 4, kv_demand=0.86) == 4
    assert after(planner_of("apa:target=0.2"), 20, 4, kv_demand=1.2) == 6
    planner = planner_of("apa:target=0.2")
    assert after(planner, 250, 6, kv_demand=0.3) == 6
    assert after(planner, 150, 6, first_s=250, kv_demand=0.3) == 3


def test_dynamo_goes_by_one_instance_and_waits_before_it_goes_down() -> None:
    planner = planner_of("dynamo")
    assert after(planner, 31, 4, held_requests=9) == 5
    assert after(planner, 60, 5, first_s=31) == 5
    assert after(planner, 90, 5, first_s=91) == 4


@pytest.mark.parametrize("name", SCALERS)
def test_every_plan_keeps_the_bounds(name: str) -> None:
    busy = {"held_requests": 999, "kv_demand": 30.0, "work_s": 30.0, "late_s": 99.0, "late_instances": 9}
    assert after(planner_of(name), 100, 10, **busy) == 10
    assert after(planner_of(name), 700, 2) == 2


def test_a_scaler_is_read_with_its_parameters_and_an_unknown_one_is_refused() -> None:
    assert Scaler.parse("dynamo:queue_up=2+kv_up=0.4") == Scaler("dynamo", (("queue_up", 2.0), ("kv_up", 0.4)))
    with pytest.raises(ValueError, match="there is no scaler 'keda'; known are dualmap, hpa-queue"):
        Scaler.parse("keda")
