"""``dualmap calibrate silicon:…`` writes a kept engine into a file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dualmap.simulation.commands import calibrate
from dualmap.simulation.engine.presets import find_preset

KEPT = Path(__file__).parents[1] / "engine" / "qwen3-8b-h100.json"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    calibrate.add_arguments(parser)
    return calibrate.write_silicon(parser.parse_args(words))


def test_an_engine_is_written_and_its_error_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"

    assert run(f"silicon:{KEPT}", "--out", str(out)) == 0

    said = capsys.readouterr().out
    assert "off from them by 3.3% at P90" in said and f"dualmap simulate --preset silicon:{out}" in said
    assert find_preset(f"silicon:{out}").engine == find_preset(f"silicon:{KEPT}").engine


@pytest.mark.parametrize(
    ("name", "out", "reason"),
    [
        (f"silicon:{KEPT}", "mine.yaml", "ends with .json"),
        (f"silicon:{KEPT}:prefill_first", "mine.json", "changes (prefill_first) belong behind"),
        ("silicon:nothing", "mine.json", "silicon:MODEL@CARD"),
    ],
)
def test_what_cannot_be_written_is_said(
    name: str, out: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--out", str(tmp_path / out)) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_url_is_no_such_engine() -> None:
    assert calibrate.is_silicon("silicon:qwen3-8b@h100")
    assert not calibrate.is_silicon("http://silicon:8000")
