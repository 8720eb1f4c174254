from __future__ import annotations

from pathlib import Path

import yaml

from dualmap.simulation.calibrate.fit import Fitted
from dualmap.simulation.calibrate.preset import Limits, preset_yaml
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.engine.presets import PRESETS


def test_a_preset_is_a_configuration_file_of_the_measured_engine(tmp_path: Path) -> None:
    costs = PRESETS["qwen2.5-7b-910b4"].engine.costs
    limits = Limits("qwen", 100_000, 16, 8192, 64, 32_768)
    text = preset_yaml(limits, Fitted(costs, 0.05, 0.02), "http://npu-0:8000")
    settings = EmulatorSettings.model_validate(yaml.safe_load(text)["emulator"])
    engine = settings.engine_config()
    assert settings.served_model == "qwen"
    assert (engine.kv_capacity_tokens, engine.block_tokens, engine.max_num_batched_tokens) == (100_000, 16, 8192)
    assert (engine.max_num_seqs, engine.max_model_len) == (64, 32_768)
    assert abs(engine.costs.prefill_s(5000, 8192) / costs.prefill_s(5000, 8192) - 1) < 1e-4
    assert "http://npu-0:8000" in text.splitlines()[0]
