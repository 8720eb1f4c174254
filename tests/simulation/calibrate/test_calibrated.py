"""A calibrated engine is used by its file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualmap.simulation.calibrate.calibrated import find_engine
from dualmap.simulation.calibrate.fit import Fitted
from dualmap.simulation.calibrate.preset import Limits, preset_yaml
from dualmap.simulation.engine.presets import MEASURED_EIGHTH, UnknownPresetError


def test_a_file_of_calibrate_gives_its_engine(tmp_path: Path) -> None:
    engine = MEASURED_EIGHTH.engine
    limits = Limits("our-model", engine.kv_capacity_tokens, 16, 2048, 128, 32_768)
    (tmp_path / "rack-3.yaml").write_text(preset_yaml(limits, Fitted(engine.costs, 0.06, 0.03), "a card"))

    found = find_engine(str(tmp_path / "rack-3.yaml"))

    assert (found.name, found.model) == ("rack-3", "our-model")
    assert found.engine.costs.token_s == pytest.approx(engine.costs.token_s)
    assert found.engine.kv_capacity_tokens == 383_648


def test_other_names_are_presets() -> None:
    assert find_engine("qwen2.5-1.5b-h200-eighth") == MEASURED_EIGHTH


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("router: {}", "no section emulator"),
        ("a: [", "no section emulator"),
        ("emulator: {max_num_seqs: 0}", "greater than 0"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnknownPresetError, match=reason):
        find_engine(str(path))
