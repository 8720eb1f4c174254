"""The figures that presets stand for; a change of a preset has to change them here, knowingly."""

from __future__ import annotations

import pytest

from dualmap.simulation.engine.models import MODELS
from dualmap.simulation.engine.presets import LONGEST_PROMPT_TOKENS, PRESETS, UnknownPresetError, find_preset


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "tokens_per_s"),
    [
        ("qwen2.5-7b-910b4", 1_024, 9_060),
        ("qwen2.5-7b-910b4", 8_192, 8_280),
        ("qwen2.5-7b-910b4", 20_480, 7_003),
        ("qwen2.5-14b-910b3", 1_024, 5_090),
        ("qwen2.5-14b-910b3", 8_192, 4_501),
        ("qwen2.5-14b-910b3", 20_480, 3_698),
    ],
)
def test_prefill_rates(name: str, prompt_tokens: int, tokens_per_s: int) -> None:
    assert PRESETS[name].engine.prefill_tokens_per_s(prompt_tokens) == pytest.approx(tokens_per_s, abs=1)


@pytest.mark.parametrize(
    ("name", "sequences", "context_tokens", "step_ms"),
    [
        ("qwen2.5-7b-910b4", 1, 1_000, 28.7),
        ("qwen2.5-7b-910b4", 16, 4_000, 35.6),
        ("qwen2.5-7b-910b4", 64, 12_000, 105.7),
        ("qwen2.5-14b-910b3", 1, 1_000, 28.5),
        ("qwen2.5-14b-910b3", 16, 4_000, 39.8),
        ("qwen2.5-14b-910b3", 64, 12_000, 158.1),
    ],
)
def test_decode_steps(name: str, sequences: int, context_tokens: int, step_ms: float) -> None:
    costs = PRESETS[name].engine.costs
    step_s = costs.step_s(0, 0, sequences, sequences * context_tokens)
    assert step_s * 1000 == pytest.approx(step_ms, abs=0.1)


def test_kv_memory_is_the_paper_s_and_bytes_per_token_the_models_own() -> None:
    assert PRESETS["qwen2.5-7b-910b4"].engine.kv_capacity_tokens == 1_000_000
    assert PRESETS["qwen2.5-14b-910b3"].engine.kv_capacity_tokens == 500_000
    assert [MODELS[name].kv_bytes_per_token for name in ("qwen2.5-7b", "qwen2.5-14b")] == [57_344, 196_608]


def test_a_model_gets_as_few_cards_as_hold_its_longest_prompt() -> None:
    cards = {name: PRESETS[f"llama-3.1-70b-{name}"].cards for name in ("a100", "h200", "b200", "l40s", "910b4")}

    assert cards == {"a100": 4, "h200": 2, "b200": 2, "l40s": 8, "910b4": 8}
    derived = [preset for name, preset in PRESETS.items() if "eighth" not in name]
    assert min(preset.engine.kv_capacity_tokens for preset in derived) >= LONGEST_PROMPT_TOKENS


def test_a_number_of_cards_can_be_asked_for() -> None:
    four, eight = find_preset("llama-3.1-70b-h100").engine, find_preset("llama-3.1-70b-h100-tp8").engine

    assert find_preset("llama-3.1-70b-h100-tp8").cards == 8
    assert 1.5 < eight.prefill_tokens_per_s() / four.prefill_tokens_per_s() < 2, "sums over all cards cost a part"
    assert eight.kv_capacity_tokens > 2 * four.kv_capacity_tokens, "the weights are there once"
    assert find_preset("qwen2.5-7b-910b4-tp1").engine.kv_capacity_tokens < 1_000_000, "the card's own memory"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama-3.1-70b-h100-tp1", "so many cards do not hold the model; 4 do"),
        ("llama-3.1-70b-h100-tp3", "an instance has 1, 2, 4 or 8 cards"),
        ("llama-3.1-70b-tpu-tp4", "unknown preset"),
    ],
)
def test_cards_that_cannot_be_are_refused(name: str, reason: str) -> None:
    with pytest.raises(UnknownPresetError, match=reason):
        find_preset(name)


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(
        UnknownPresetError, match=r"'h100'; known are MODEL-CARD or MODEL-CARD-tpN, of .*qwen2.5-7b.* and a100"
    ):
        find_preset("h100")


def test_a_preset_can_be_changed_where_it_is_named() -> None:
    plain = find_preset("qwen2.5-7b-910b4").engine
    engine = find_preset("qwen2.5-7b-910b4:prefill_first+kv_capacity_tokens=500000+prefill_speed=3").engine

    assert (engine.prefill_first, engine.kv_capacity_tokens) == (True, 500_000)
    assert engine.costs.token_s == pytest.approx(plain.costs.token_s / 3)
    assert engine.costs.context_token_s == plain.costs.context_token_s, "decoding is as fast as before"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("turbo", "unknown change 'turbo'; known are prefill_first"),
        ("prefill_speed=0", "must be above 0"),
        ("max_num_seqs=many", "invalid literal"),
        ("max_num_seqs=0", "at least 1"),
    ],
)
def test_a_change_that_cannot_be_is_named(change: str, reason: str) -> None:
    with pytest.raises(UnknownPresetError, match=reason):
        find_preset(f"qwen2.5-7b-910b4:{change}")


def test_an_instance_of_a_preset_has_its_engines_figures() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine

    spec = engine.instance_spec("i001")

    assert (spec.instance_id, spec.url) == ("i001", "http://i001")
    assert spec.prefill_tokens_per_s == engine.prefill_tokens_per_s()
    assert spec.kv_capacity_tokens == engine.kv_capacity_tokens
    assert spec.max_running_requests == engine.max_num_seqs
