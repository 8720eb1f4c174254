from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from scheduling.settings import (
    DualMapSettings,
    DualMapWideSettings,
    DynamoSettings,
    LlmDSettings,
    PrebleSettings,
    SchedulingSettings,
    SglangSettings,
)

SECTIONS = [
    SchedulingSettings,
    DualMapSettings,
    DualMapWideSettings,
    PrebleSettings,
    DynamoSettings,
    SglangSettings,
    LlmDSettings,
]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_says_what_it_is(section: type[BaseModel]) -> None:
    assert [name for name, field in section.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_setting_is_refused_by_name(section: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="no_such_setting"):
        section.model_validate({"no_such_setting": 1})


@pytest.mark.parametrize(
    "wrong",
    [{"slo_ttft_s": 0}, {"block_tokens": 0}, {"max_key_blocks": 257}, {"sglang": {"cache_threshold": 1.1}}],
)
def test_a_value_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SchedulingSettings.model_validate(wrong)


def test_the_band_between_hot_and_cold_must_not_be_upside_down() -> None:
    with pytest.raises(ValidationError, match="cold_share_factor"):
        SchedulingSettings(hot_share_factor=1.0, cold_share_factor=2.0)


def test_settings_have_the_same_fingerprint_only_if_they_are_the_same() -> None:
    default = SchedulingSettings()

    assert SchedulingSettings(max_hold_s=300).fingerprint == default.fingerprint
    assert default.model_copy(update={"max_hold_s": 301.0}).fingerprint != default.fingerprint
    assert SchedulingSettings(dynamo=DynamoSettings(prefill_scale=2)).fingerprint != default.fingerprint
