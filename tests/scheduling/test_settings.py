from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from dualmap.scheduling.placing.policies.registry import OPTIONS
from dualmap.scheduling.settings import (
    FIXED_AT_START,
    PriorityClassSettings,
    SchedulingSettings,
    SplitSettings,
    with_overrides,
)

SECTIONS = [SchedulingSettings, SplitSettings, PriorityClassSettings, *OPTIONS.values()]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_says_what_it_is(section: type[BaseModel]) -> None:
    assert [name for name, field in section.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_setting_is_refused_by_name(section: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="no_such_setting"):
        section.model_validate({"no_such_setting": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"slo_ttft_s": 0},
        {"slo_ttft_s": 3601},
        {"slo_ttft_max_s": 1e300},
        {"block_tokens": 0},
        {"time_scale": 0},
        {"split": {"slo_tpot_s": 0}},
        {"policy_options": [1]},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SchedulingSettings.model_validate(wrong)


def test_settings_have_the_same_fingerprint_only_if_they_are_the_same() -> None:
    default = SchedulingSettings()

    assert SchedulingSettings(max_hold_s=3600).fingerprint == default.fingerprint
    assert default.model_copy(update={"max_hold_s": 301.0}).fingerprint != default.fingerprint
    assert SchedulingSettings(split=SplitSettings(mode="never")).fingerprint != default.fingerprint
    ordered, turned = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert SchedulingSettings(policy_options=ordered).fingerprint != default.fingerprint
    assert (
        SchedulingSettings(policy_options=ordered).fingerprint == SchedulingSettings(policy_options=turned).fingerprint
    )


def test_settings_change_by_dotted_name_and_the_rest_stays() -> None:
    base = SchedulingSettings(slo_ttft_s=2.0, split=SplitSettings(slo_tpot_s=1.0))

    changed = with_overrides(base, {"policy": "dualmap", "split.mode": "never"})

    assert changed == base.model_copy(
        update={"policy": "dualmap", "split": SplitSettings(slo_tpot_s=1.0, mode="never")}
    )
    assert with_overrides(base, {}) is base


def test_options_change_one_by_one_or_as_a_whole_and_stay_with_their_policy() -> None:
    base = SchedulingSettings(policy="sglang", policy_options={"cache_threshold": 0.5})

    def options(**overrides: Any) -> dict[str, Any]:
        given = {name.replace("policy_options_", "policy_options."): value for name, value in overrides.items()}
        return with_overrides(base, given).policy_options

    assert options(policy_options_balance_abs_threshold=9) == {"balance_abs_threshold": 9, "cache_threshold": 0.5}
    assert options(policy_options={}) == {}
    assert options(policy_options_cache_threshold=0.1, policy_options={}) == {"cache_threshold": 0.1}
    assert options(policy="dynamo", policy_options_prefill_scale=1) == {"prefill_scale": 1}
    assert options(policy="dynamo") == {}, "the configured options are those of the configured policy"


@pytest.mark.parametrize("name", sorted(FIXED_AT_START))
def test_what_kept_state_depends_on_does_not_change_while_the_fleet_runs(name: str) -> None:
    with pytest.raises(ValueError, match=f"scheduling.{name} cannot change while the fleet runs"):
        with_overrides(SchedulingSettings(), {name: getattr(SchedulingSettings(), name)})


def test_every_setting_that_is_fixed_exists() -> None:
    assert set(SchedulingSettings.model_fields) >= FIXED_AT_START


@pytest.mark.parametrize(
    "name", ["no_such_setting", "split", "split.no_such_setting", "no_such.section", "slo_ttft_s.less", ""]
)
def test_a_change_of_what_is_no_setting_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is no setting scheduling.{name}(;|$)"):
        with_overrides(SchedulingSettings(), {name: 1})


@pytest.mark.parametrize(("name", "meant"), [("slo_ttft", "slo_ttft_s"), ("split.mdoe", "split.mode")])
def test_a_misspelt_setting_is_answered_with_the_one_that_may_be_meant(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"no setting scheduling.{name}; did you mean {meant}\\?$"):
        with_overrides(SchedulingSettings(), {name: 1})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("slo_ttft_s", 0), ("split.slo_tpot_s", 0), ("policy_options", 1), ("policy", "magic"), ("max_hold_s", "x")],
)
def test_a_change_to_a_wrong_value_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"^scheduling.{name}: "):
        with_overrides(SchedulingSettings(), {name: wrong})


@pytest.mark.parametrize("name", ["least_cost.recompute_weight", "dynamo", "sglang.no_such_setting"])
def test_a_change_of_a_removed_setting_is_answered_with_what_took_its_place(name: str) -> None:
    with pytest.raises(ValueError, match=f"^scheduling.{name}: this setting was removed: .*policy_options"):
        with_overrides(SchedulingSettings(), {name: 1})
