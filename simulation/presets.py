"""Calibrated engine models: the capability of a device, the demand of a model, and the step costs that follow.

Everything is derived from published figures and three efficiencies; nothing is fitted to a result.

Devices (vendor figures): Ascend 910B4, 280 TFLOPS fp16, 32 GB HBM at 0.8 TB/s; Ascend 910B3, 313 TFLOPS fp16,
64 GB HBM at 1.6 TB/s; both with a network port of 200 Gbit/s. Models (their published configuration): Qwen2.5-7B, 28
layers of width 3584, 4 KV heads of 128; Qwen2.5-14B, 48 layers of width 5120, 8 KV heads of 128; bfloat16 weights and
KV cache.

Efficiencies: dense matrix products reach 45 % of the peak and attention in prefill 40 %, reading weights or KV
cache 75 % of the HBM bandwidth: the range that serving stacks report on this class of device. A step costs 5 ms
and a sequence 50 µs on the host. With steps of 2,048 tokens this gives

| preset | prefill rate, prompts of 1k / 8k / 20k tokens | decode step, 1 × 1k / 16 × 4k / 64 × 12k context |
| --- | --- | --- |
| qwen2.5-7b-910b4 | 9,060 / 8,280 / 7,003 tokens/s | 28.7 / 35.6 / 105.7 ms |
| qwen2.5-14b-910b3 | 5,090 / 4,501 / 3,698 tokens/s | 28.5 / 39.8 / 158.1 ms |

Moves of KV reach 80 % of the network port and take 5 ms besides: 8k tokens take 28 and 86 ms.

KV memory is the DualMap paper's: 1M and 0.5M tokens of context cache per instance. At 57 kB and 197 kB a token that
is more than the HBM of one device holds beside the weights, so it means HBM and host memory together; moving blocks
between the two is assumed to be hidden behind compute. Prompts of up to 131,072 tokens are accepted, as by the models
with YaRN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from dualmap.simulation.engine_types import EngineConfig
from dualmap.simulation.kv_transfer import KvTransfer
from dualmap.simulation.step_time import StepCosts


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, by its data sheet."""

    flops: float
    """Peak fp16 operations per second."""
    memory_bytes_per_s: float
    link_bytes_per_s: float = 25e9
    """Rate of its network port."""


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder-only transformer with grouped-query attention, by its configuration."""

    linear_parameters: float
    """Parameters that every token is multiplied with: all but the input embedding and the output head."""
    head_parameters: float
    """The output head: read in every step, computed once per sequence only."""
    layers: int
    width: int
    kv_width: int
    """KV heads times head dimension."""
    bytes_per_value: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_width * self.bytes_per_value


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that a serving stack reaches, and its cost on the host."""

    matmul: float = 0.45
    attention: float = 0.40
    memory: float = 0.75
    link: float = 0.8
    step_overhead_s: float = 0.005
    sequence_s: float = 50e-6
    transfer_s: float = 0.005


def derive_costs(model: Model, device: Device, efficiency: Efficiency) -> StepCosts:
    """Step costs from first principles: two operations per parameter and token, four per layer, width and
    attention pair; weights read once per step, KV cache once per decoding sequence."""
    matmul_flops = device.flops * efficiency.matmul
    bytes_per_s = device.memory_bytes_per_s * efficiency.memory
    return StepCosts(
        overhead_s=efficiency.step_overhead_s,
        weights_s=(model.linear_parameters + model.head_parameters) * model.bytes_per_value / bytes_per_s,
        token_s=2 * model.linear_parameters / matmul_flops,
        attention_pair_s=4 * model.layers * model.width / (device.flops * efficiency.attention),
        sequence_s=efficiency.sequence_s + 2 * model.head_parameters / matmul_flops,
        context_token_s=model.kv_bytes_per_token / bytes_per_s,
    )


def derive_transfer(model: Model, device: Device, efficiency: Efficiency) -> KvTransfer:
    """Moves of KV over the device's network port."""
    bytes_per_s = device.link_bytes_per_s * efficiency.link
    return KvTransfer(model.kv_bytes_per_token, bytes_per_s, efficiency.transfer_s)


ASCEND_910B4 = Device(flops=280e12, memory_bytes_per_s=0.8e12)
ASCEND_910B3 = Device(flops=313e12, memory_bytes_per_s=1.6e12)
QWEN25_7B = Model(linear_parameters=6.53e9, head_parameters=0.545e9, layers=28, width=3584, kv_width=512)
QWEN25_14B = Model(linear_parameters=13.21e9, head_parameters=0.779e9, layers=48, width=5120, kv_width=1024)


@dataclass(frozen=True, slots=True)
class Preset:
    """A named instance: the model it serves and its engine."""

    name: str
    model: str
    engine: EngineConfig


class UnknownPresetError(ValueError):
    """No preset has this name; the message lists those there are."""


def _preset(name: str, served: str, model: Model, device: Device, kv_capacity_tokens: int) -> Preset:
    efficiency = Efficiency()
    costs, transfer = derive_costs(model, device, efficiency), derive_transfer(model, device, efficiency)
    return Preset(name, served, EngineConfig(costs=costs, kv_capacity_tokens=kv_capacity_tokens, transfer=transfer))


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            _preset("qwen2.5-7b-910b4", "qwen2.5-7b", QWEN25_7B, ASCEND_910B4, 1_000_000),
            _preset("qwen2.5-14b-910b3", "qwen2.5-14b", QWEN25_14B, ASCEND_910B3, 500_000),
        )
    }
)


CHANGES = ("prefill_first", "kv_capacity_tokens", "max_num_batched_tokens", "max_num_seqs", "prefill_speed")
"""Names that may follow a preset's name: limits of the engine, and a factor on the speed of prefill."""


def find_preset(name: str) -> Preset:
    """The preset of this name, changed as the part behind a colon says: ``NAME:prefill_first+prefill_speed=3``.

    Raises:
        UnknownPresetError: there is none, or no such change.
    """
    base, _, changes = name.partition(":")
    if base not in PRESETS:
        raise UnknownPresetError(f"unknown preset {base!r}; known are {', '.join(sorted(PRESETS))}")
    preset = PRESETS[base]
    engine = preset.engine
    for change in filter(None, changes.split("+")):
        engine = _changed(engine, change, name)
    return replace(preset, name=name, engine=engine)


def _changed(engine: EngineConfig, change: str, preset: str) -> EngineConfig:
    key, _, text = change.partition("=")
    if change == "prefill_first":
        return replace(engine, prefill_first=True)
    if key not in CHANGES[1:]:
        raise UnknownPresetError(f"preset {preset!r}: unknown change {change!r}; known are {', '.join(CHANGES)}")
    try:
        if key == "prefill_speed":
            return replace(engine, costs=engine.costs.with_prefill_speed(float(text)))
        limits: dict[str, Any] = {key: int(text)}
        return replace(engine, **limits)
    except ValueError as error:
        raise UnknownPresetError(f"preset {preset!r}: {change!r} cannot be: {error}") from None
