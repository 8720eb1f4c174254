"""Engine models by name: ``MODEL-CARD``, on as few cards as it fits on, or ``MODEL-CARD-tp4``, on so many.

Models: ``dualmap.simulation.engine.models``; cards: ``dualmap.simulation.engine.cards``; what follows from both:
``dualmap.simulation.engine.derived_costs``. As few cards as it fits on means that a prompt of 131,072 tokens fits
beside the weights. Prompts of up to that length are accepted, as by models with a long context or with YaRN. Tiers of
the prefix cache behind the device's memory are there where a change says so: ``host_kv_tokens``, ``disk_kv_tokens``,
``pool_kv_tokens``, and ``host_gb_per_s`` and its like for another bandwidth.

Two presets are those of the DualMap paper's evaluation: ``qwen2.5-7b-910b4`` and ``qwen2.5-14b-910b3`` have the 1M and
0.5M tokens of context cache per instance that it states. At 57 kB and 197 kB a token that is more than the memory of
one card holds beside the weights, so it means card and host memory together; moving blocks between the two is
assumed to be hidden behind compute. ``-tp1`` names the same with the KV memory of the card alone, and
``-tp1:host_kv_tokens=1000000`` with host memory behind it, from which hits are loaded over PCIe. With steps of 2,048
tokens the two give

| preset | prefill rate, prompts of 1k / 8k / 20k tokens | decode step, 1 × 1k / 16 × 4k / 64 × 12k context |
| --- | --- | --- |
| qwen2.5-7b-910b4 | 9,060 / 8,280 / 7,003 tokens/s | 28.7 / 35.6 / 105.7 ms |
| qwen2.5-14b-910b3 | 5,090 / 4,501 / 3,698 tokens/s | 28.5 / 39.8 / 158.1 ms |

Moves of KV reach 80 % of the network port and take 5 ms besides: 8k tokens take 28 and 86 ms.

One preset is measured, ``qwen2.5-1.5b-h200-eighth``: see ``MEASURED_EIGHTH``. Engines of measured kernels have names
of their own, ``silicon:MODEL@CARD``: see ``dualmap.simulation.engine.silicon``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.simulation.engine.adapter_slots import AdapterMemory
from dualmap.simulation.engine.cards import CARDS
from dualmap.simulation.engine.derived_costs import (
    CARDS_OF_ONE_NODE,
    derive_costs,
    derive_tiers,
    derive_transfer,
    fewest_cards,
    kv_capacity_tokens,
)
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.models import MODELS
from dualmap.simulation.engine.silicon import PREFIX, SILICON_IN_WORDS, SiliconError, find_silicon
from dualmap.simulation.engine.step_time import StepCosts

LONGEST_PROMPT_TOKENS = 131_072
LEAST_KV_TOKENS = 4_096
"""KV memory of an instance that is worth being simulated."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named instance: the model it serves and its engine."""

    name: str
    model: str
    engine: EngineConfig
    card: str
    cards: int = 1
    """Cards of one instance."""
    note: str = ""
    """How good its figures are, where more is known than how they are derived."""


class UnknownPresetError(ValueError):
    """No preset has this name; the message says which there are."""


MEASURED_EIGHTH = Preset(
    "qwen2.5-1.5b-h200-eighth",
    "qwen2.5-1.5b",
    EngineConfig(
        StepCosts(
            overhead_s=0.31e-3,
            weights_s=2.81e-3,
            token_s=25.8e-6,
            attention_pair_s=2.49e-9,
            sequence_s=13.1e-6,
            context_token_s=30.4e-9,
            prompt_s=16.8e-3,
        ),
        kv_capacity_tokens=383_648,
        block_tokens=16,
        max_num_seqs=128,
        max_model_len=32_768,
    ),
    "h200",
)
"""One of eight vLLM 0.24 instances that share an H200 by MPS, while the others idle: by ``dualmap calibrate``, off by 6
and 3 %. Random weights, a vocabulary of 4,096. It is slower while the others work: they share the bandwidth."""

_PAPER_KV_TOKENS = {"qwen2.5-7b-910b4": 1_000_000, "qwen2.5-14b-910b3": 500_000}


def _derived(name: str, model: str, card: str, cards: int, kv_tokens: int) -> Preset:
    of = MODELS[model], CARDS[card], cards
    engine = EngineConfig(
        costs=derive_costs(*of),
        kv_capacity_tokens=kv_tokens,
        tiers=derive_tiers(*of),
        transfer=derive_transfer(*of),
    )
    return Preset(name, model, engine, card, cards)


def _all_presets() -> dict[str, Preset]:
    presets = {MEASURED_EIGHTH.name: MEASURED_EIGHTH}
    for model in MODELS:
        for card in CARDS:
            name = f"{model}-{card}"
            if name in _PAPER_KV_TOKENS:
                presets[name] = _derived(name, model, card, 1, _PAPER_KV_TOKENS[name])
            elif cards := fewest_cards(MODELS[model], CARDS[card], LONGEST_PROMPT_TOKENS):
                kv_tokens = kv_capacity_tokens(MODELS[model], CARDS[card], cards)
                presets[name] = _derived(name, model, card, cards, kv_tokens)
    return presets


PRESETS: Mapping[str, Preset] = MappingProxyType(_all_presets())
PRESETS_IN_WORDS = (
    f"MODEL-CARD or MODEL-CARD-tpN, of {', '.join(MODELS)} and {', '.join(CARDS)}; {MEASURED_EIGHTH.name};"
    f" {SILICON_IN_WORDS} by measured kernels"
)
_PARALLEL = re.compile(r"(?P<base>.+)-tp(?P<cards>[0-9]+)")
_ALL_NUMBERS = ", ".join(map(str, CARDS_OF_ONE_NODE[:-1])) + f" or {CARDS_OF_ONE_NODE[-1]}"


_ADAPTER_FIGURES = {
    "adapter_slots": "slots",
    "adapter_host_slots": "host_slots",
    "adapter_host_ms": "host_s",
    "adapter_disk_ms": "disk_s",
}
_FLAGS = ("prefill_first", "by_priority", "ignores_load_limits")
_TIER_CHANGE = re.compile(rf"(?P<tier>{'|'.join(Tier)})_(?P<figure>kv_tokens|gb_per_s|stores_only)")
CHANGES = (
    *("prefill_first", "kv_capacity_tokens", "max_num_batched_tokens", "max_num_seqs", "prefill_speed"),
    "by_priority",
    "ignores_load_limits",
    *_ADAPTER_FIGURES,
    *(f"{tier}_{figure}" for tier in Tier for figure in ("kv_tokens", "gb_per_s", "stores_only")),
)
"""Names that may follow a preset's name: limits of the engine, a factor on the speed of prefill, its room for adapters
and what loading one takes, and of a tier its size, its bandwidth, and whether KV events report what it keeps alone."""


def find_preset(name: str) -> Preset:
    """The preset of this name, changed as the part behind a colon says: ``NAME:prefill_first+prefill_speed=3``.

    Raises:
        UnknownPresetError: there is none, or no such change.
    """
    if name.startswith(PREFIX):
        preset, changes = _silicon(name)
    else:
        base, _, changes = name.partition(":")
        preset = PRESETS.get(base) or _on_cards(base)
    engine = preset.engine
    for change in filter(None, changes.split("+")):
        engine = _changed(engine, change, name)
    return replace(preset, name=name, engine=engine)


def _silicon(name: str) -> tuple[Preset, str]:
    """The engine of measured kernels of this name, and the changes behind the name. Raises UnknownPresetError."""
    try:
        kept, changes = find_silicon(name)
    except SiliconError as error:
        raise UnknownPresetError(str(error)) from error
    return Preset(name, kept.model, kept.engine, kept.card, kept.cards, kept.note), changes


def _on_cards(name: str) -> Preset:
    """The preset on a given number of cards. Raises UnknownPresetError."""
    parallel = _PARALLEL.fullmatch(name)
    model, _, card = (parallel["base"] if parallel else name).rpartition("-")
    if parallel is None or model not in MODELS or card not in CARDS:
        raise UnknownPresetError(f"unknown preset {name!r}; known are {PRESETS_IN_WORDS}")
    cards = int(parallel["cards"])
    if cards not in CARDS_OF_ONE_NODE:
        raise UnknownPresetError(f"preset {name!r}: an instance has {_ALL_NUMBERS} cards")
    kv_tokens = kv_capacity_tokens(MODELS[model], CARDS[card], cards)
    if kv_tokens < LEAST_KV_TOKENS:
        fewest = fewest_cards(MODELS[model], CARDS[card], LONGEST_PROMPT_TOKENS)
        enough = f"{fewest} do" if fewest else "no node of 8 holds it"
        raise UnknownPresetError(f"preset {name!r}: so many cards do not hold the model; {enough}")
    return _derived(name, model, card, cards, kv_tokens)


def _changed(engine: EngineConfig, change: str, preset: str) -> EngineConfig:
    key, _, text = change.partition("=")
    if change in _FLAGS:
        own: dict[str, Any] = {change: True}
        return replace(engine, **own)
    if key not in CHANGES[1:]:
        raise UnknownPresetError(f"preset {preset!r}: unknown change {change!r}; known are {', '.join(CHANGES)}")
    try:
        if key == "prefill_speed":
            return replace(engine, costs=engine.costs.with_prefill_speed(float(text)))
        if tier := _TIER_CHANGE.fullmatch(key):
            return engine.with_tier(Tier(tier["tier"]), **_tier_figure(tier["figure"], text))
        if key in _ADAPTER_FIGURES:
            return replace(engine, adapters=_with_adapters(engine.adapters, key, text))
        limits: dict[str, Any] = {key: int(text)}
        return replace(engine, **limits)
    except ValueError as error:
        raise UnknownPresetError(f"preset {preset!r}: {change!r} cannot be: {error}") from None


def _with_adapters(room: AdapterMemory, key: str, text: str) -> AdapterMemory:
    """The room for adapters with a changed figure. Raises ValueError."""
    if key.endswith("_ms"):
        times: dict[str, Any] = {_ADAPTER_FIGURES[key]: float(text) / 1000}
        return replace(room, **times)
    slots = int(text)
    if key == "adapter_slots":
        return replace(room, slots=slots, host_slots=max(slots, room.host_slots))
    return replace(room, host_slots=slots)


def _tier_figure(name: str, text: str) -> dict[str, Any]:
    """The field of a tier that a change sets. Raises ValueError."""
    if name == "stores_only":
        return {"tells_removals": text == "0"}
    return {"tokens": int(text)} if name == "kv_tokens" else {"bytes_per_s": float(text) * 1e9}
