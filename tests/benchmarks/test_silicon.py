"""The comparison of presets with engines of measured kernels, on one that was kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import silicon as benchmark

from dualmap.simulation.engine import silicon

KEPT = Path(__file__).parents[1] / "simulation" / "engine" / "qwen3-8b-h100.json"


@pytest.fixture(autouse=True)
def _kept_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(silicon, "version_of_package", lambda: None)
    monkeypatch.setattr(benchmark, "package_version", lambda: None)
    folder = tmp_path / "dualmap" / "silicon"
    folder.mkdir(parents=True)
    shutil.copy(KEPT, folder / "Qwen--Qwen3-8B@h100_sxm-tp1.0.12.0.json")


def test_a_preset_by_data_sheets_is_compared_where_kernels_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.print_derived(("h100", "mi300x", "a100"))

    rows = capsys.readouterr().out.strip().splitlines()[2:]
    assert rows == ["| qwen3-8b-h100-tp1 | +4%, +16%, +25% | -3%, -3%, +7% | -8% |"]


def test_without_the_extra_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["silicon.py"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert "this needs the extra silicon" in capsys.readouterr().err
