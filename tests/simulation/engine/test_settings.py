"""Emulator settings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.engine.kv_transfer import KvTransfer
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.engine.settings import CostSettings, TransferSettings


def test_figures_of_one_s_own_replace_the_preset_s_one_by_one() -> None:
    settings = EmulatorSettings(kv_capacity_tokens=64_000, costs=CostSettings(token_us=50.0, overhead_ms=1.0))
    engine, preset = settings.engine_config(), find_preset("qwen2.5-7b-910b4").engine
    assert engine.kv_blocks == 500
    assert (engine.costs.token_s, engine.costs.overhead_s) == pytest.approx((50e-6, 1e-3))
    assert engine.costs.weights_s == preset.costs.weights_s
    assert engine.max_num_seqs == preset.max_num_seqs


def test_figures_of_the_link_replace_the_preset_s_one_by_one() -> None:
    engine = EmulatorSettings(transfer=TransferSettings(gb_per_s=50, latency_ms=1), staged_timeout_s=30).engine_config()
    assert engine.transfer == KvTransfer(57_344, 50e9, 0.001)
    assert engine.staged_timeout_s == 30
    assert EmulatorSettings().engine_config().staged_timeout_s == 480


def test_the_model_is_the_preset_s_unless_named() -> None:
    assert EmulatorSettings(preset="qwen2.5-14b-910b3").served_model == "qwen2.5-14b"
    assert EmulatorSettings(model="mine").served_model == "mine"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "h100"}, "unknown preset 'h100'"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens must be at least max_num_seqs"),
        ({"port": 65_000, "instances": 600}, "exceed port 65535"),
        ({"time_scale": 0}, "greater than 0"),
        ({"speed": 2}, "Extra inputs"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EmulatorSettings(**values)
