"""Engines of measured kernels by name, from kept files: none of this needs the package that has the kernels.

``qwen3-8b-h100.json`` was written by ``dualmap calibrate silicon:qwen3-8b@h100 --out qwen3-8b-h100.json``.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.simulation.engine import silicon
from dualmap.simulation.engine.kernel_times import MeasuredKernels
from dualmap.simulation.engine.presets import UnknownPresetError, find_preset
from dualmap.simulation.engine.silicon import SiliconName, parse_silicon, read_kept, write_kept
from tests.simulation.engine.kernel_handle import FACTS, Handle

FILE = Path(__file__).with_name("qwen3-8b-h100.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept engines, and no package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(silicon, "version_of_package", lambda: None)
    (tmp_path / "dualmap" / "silicon").mkdir(parents=True)
    return tmp_path / "dualmap" / "silicon"


@pytest.mark.parametrize(
    ("name", "asked", "changes"),
    [
        ("silicon:Qwen/Qwen3-8B@h100", SiliconName("Qwen/Qwen3-8B", "h100", 1, False), ""),
        ("silicon:qwen3.5-27b@h200_sxm-tp4:fp8", SiliconName("qwen3.5-27b", "h200_sxm", 4, True), ""),
        ("silicon:a-tp2@l40s-tp2:fp8:prefill_first", SiliconName("a-tp2", "l40s", 2, True), "prefill_first"),
        ("silicon:m@l4:prefill_speed=2", SiliconName("m", "l4", 1, False), "prefill_speed=2"),
        ("silicon:/a/b.json:prefill_first", Path("/a/b.json"), "prefill_first"),
    ],
)
def test_a_name_says_model_card_width_weights_and_changes(name: str, asked: SiliconName | Path, changes: str) -> None:
    assert parse_silicon(name) == (asked, changes)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("silicon:qwen3-8b", r"silicon:MODEL@CARD\[-tpN\]\[:fp8\]"),
        ("silicon:qwen3-8b@h100-tp3", "an instance has 1, 2, 4, 8 cards"),
        ("silicon:qwen3-8b@h100", "not installed.*pip install -e '.*silicon.'.*preset by data sheets"),
        ("silicon:/nowhere/engine.json", "/nowhere/engine.json: cannot be read"),
        ("silicon:qwen3-8b@h100:nonsense", "not installed"),
    ],
)
def test_what_cannot_be_is_said_with_what_to_do(name: str, reason: str) -> None:
    with pytest.raises(UnknownPresetError, match=reason):
        find_preset(name)


def test_a_kept_engine_prefills_as_fast_as_its_kernels_and_the_host() -> None:
    preset = find_preset(f"silicon:{FILE}")
    costs = preset.engine.costs

    assert (preset.model, preset.card, preset.cards) == ("Qwen/Qwen3-8B", "h100_sxm", 1)
    assert preset.engine.kv_capacity_tokens == 386_460
    # The package's own figures: prefill of 1,024 and 8,192 tokens in one step, decode steps of 1, 16, 64 sequences.
    assert costs.prefill_s(1024, 8192) == pytest.approx(0.0227 + 0.0173, rel=0.04)
    assert costs.prefill_s(8192, 8192) == pytest.approx(0.2035 + 0.0173, rel=0.04)
    steps_ms = [1000 * costs.step_s(0, 0, n, 4100 * n) - 0.3 - 0.013 * n for n in (1, 16, 64)]
    assert steps_ms == pytest.approx([6.5, 10.7, 19.5], rel=0.04)


def test_a_kept_engine_moves_kv_by_the_bytes_of_its_own_tokens() -> None:
    engine = find_preset(f"silicon:{FILE}:host_kv_tokens=800000").engine

    assert engine.transfer.bytes_per_token == 147_456
    assert [tier.tier for tier in engine.kept_tiers] == [Tier.HOST]


def test_changes_stand_behind_the_name() -> None:
    engine = find_preset(f"silicon:{FILE}:prefill_first+prefill_speed=2").engine

    assert engine.prefill_first
    assert engine.prefill_tokens_per_s() > 1.7 * find_preset(f"silicon:{FILE}").engine.prefill_tokens_per_s()
    with pytest.raises(UnknownPresetError, match="unknown change 'nonsense'"):
        find_preset(f"silicon:{FILE}:nonsense")


@pytest.mark.parametrize(
    "name", ["qwen3-8b@h100", "Qwen/Qwen3-8B@h100_sxm", "QWEN3-8B@H100-tp1", "qwen3-8b@h100:prefill_first"]
)
def test_an_engine_that_was_kept_needs_no_package(name: str, folder: Path) -> None:
    shutil.copy(FILE, folder / "Qwen--Qwen3-8B@h100_sxm-tp1.0.12.0.json")

    assert find_preset(f"silicon:{name}").engine.kv_capacity_tokens == 386_460


def test_an_engine_is_fitted_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = []

    def kernels(model: str, card: str, cards: int, *, fp8: bool) -> MeasuredKernels:
        fitted.append((model, card, cards, fp8))
        return MeasuredKernels(Handle(), replace(FACTS, model="its/Model", card="card_sxm", cards=2))

    monkeypatch.setattr(silicon, "measured_kernels", kernels)
    monkeypatch.setattr(silicon, "version_of_package", lambda: "9.8.7")
    for name in ("silicon:model@card-tp2:fp8", "silicon:its/model@card_sxm-tp2:fp8"):
        preset = find_preset(name)
        assert (preset.model, preset.card, preset.cards) == ("its/Model", "card_sxm", 2)
        assert preset.engine.costs.step_s(0, 0, 8, 1600) == pytest.approx((80 + 24 + 200) / 1000, rel=0.1)
        assert preset.note.startswith("its/Model on 2 × card_sxm, FP8 weights: a package; off from them by")

    assert fitted == [("model", "card", 2, True)]
    assert [path.name for path in folder.iterdir()] == ["its--Model@card_sxm-tp2-fp8.9.8.7.json"]


def test_an_engine_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(silicon, "version_of_package", lambda: "9.8.7")
    monkeypatch.setattr(silicon, "measured_kernels", lambda *_, **__: MeasuredKernels(Handle(), FACTS))

    assert find_preset("silicon:kept-nowhere@card").engine.kv_capacity_tokens == 100_000


@pytest.mark.parametrize("name", ["qwen3-8b@h100-tp2", "qwen3-8b@h100:fp8", "qwen3-8b@h200", "8b@h100"])
def test_another_engine_than_the_kept_one_is_not_taken_for_it(name: str, folder: Path) -> None:
    shutil.copy(FILE, folder / "Qwen--Qwen3-8B@h100_sxm-tp1.0.12.0.json")

    with pytest.raises(UnknownPresetError, match="not installed"):
        find_preset(f"silicon:{name}")


def test_the_newest_package_s_engine_is_taken_unless_one_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = read_kept(FILE)
    for version, capacity in (("0.9.0", 1), ("0.12.0", 2), ("0.11.3", 3)):
        write_kept(
            kept.model_copy(update={"kv_capacity_tokens": 1000 * capacity}),
            folder / f"Qwen--Qwen3-8B@h100_sxm-tp1.{version}.json",
        )

    assert find_preset("silicon:qwen3-8b@h100").engine.kv_capacity_tokens == 2000
    monkeypatch.setattr(silicon, "version_of_package", lambda: "0.11.3")
    assert find_preset("silicon:qwen3-8b@h100").engine.kv_capacity_tokens == 3000


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    kept, path = read_kept(FILE), tmp_path / "engine.json"
    write_kept(kept, path)
    assert find_preset(f"silicon:{path}").engine.kv_capacity_tokens == 386_460
    write_kept(kept.model_copy(update={"kv_capacity_tokens": 5000}), path)

    assert find_preset(f"silicon:{path}").engine.kv_capacity_tokens == 5000


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "Invalid JSON"), ("{}", "Field required"), ('{"silicon": 2}', "less than or equal to 1")],
)
def test_a_file_that_is_no_engine_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(text)
    with pytest.raises(UnknownPresetError, match=f"no engine of measured kernels: .*{reason}"):
        find_preset(f"silicon:{tmp_path / 'engine.json'}")


def test_knots_out_of_order_are_refused(tmp_path: Path) -> None:
    broken = read_kept(FILE).model_copy(update={"linear_us": ((1, 5.0), (1, 6.0))})
    write_kept(broken, tmp_path / "engine.json")
    with pytest.raises(UnknownPresetError, match="ascending numbers of tokens"):
        find_preset(f"silicon:{tmp_path / 'engine.json'}")


def test_the_note_says_how_far_the_fit_is_off_and_what_was_not_measured() -> None:
    note = find_preset(f"silicon:{FILE}").note

    assert "kernels of vLLM 0.24.0; off from them by 3.3% at P90 of random steps" in note
    assert "77% was measured, 16% interpolated in part, 7% follows from formulas" in note
    assert "rough" not in note
    rough = read_kept(FILE)
    assert "a rough fit" in rough.model_copy(update={"error": rough.error.__class__(0.05, 0.1, 0.0, 0.0, 0.0)}).note
