"""The figures of a measured engine as settings of emulator and simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from dualmap.simulation.calibrate.fit import Fitted
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.engine.settings import CostSettings
from dualmap.simulation.engine.step_time import StepCosts


@dataclass(frozen=True, slots=True)
class Limits:
    """An instance's report about itself."""

    model: str
    kv_capacity_tokens: int
    block_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


def cost_settings(costs: StepCosts) -> CostSettings:
    """The costs as settings, with six digits: more would pretend a precision that no measurement has."""

    def rounded(value: float) -> float:
        return float(f"{value:.6g}")

    return CostSettings(
        overhead_ms=rounded(costs.overhead_s * 1e3),
        weights_ms=rounded(costs.weights_s * 1e3),
        token_us=max(1e-9, rounded(costs.token_s * 1e6)),
        attention_pair_ns=rounded(costs.attention_pair_s * 1e9),
        sequence_us=rounded(costs.sequence_s * 1e6),
        context_token_ns=rounded(costs.context_token_s * 1e9),
        prompt_ms=rounded(costs.prompt_s * 1e3),
    )


def preset_yaml(limits: Limits, fitted: Fitted, source: str) -> str:
    """A configuration file for ``--config`` of ``dualmap emulate``, ``up`` and ``simulate``.

    Raises:
        ValueError: the figures do not fit together.
    """
    section: dict[str, Any] = {
        "model": limits.model,
        "kv_capacity_tokens": limits.kv_capacity_tokens,
        "block_tokens": limits.block_tokens,
        "max_num_batched_tokens": max(limits.max_num_batched_tokens, limits.max_num_seqs),
        "max_num_seqs": limits.max_num_seqs,
        "max_model_len": limits.max_model_len,
        "costs": cost_settings(fitted.costs).model_dump(),
    }
    EmulatorSettings.model_validate(section)
    head = (
        f"# Measured on {source}. The engine model is off by {fitted.prefill_error:.0%} of the times to first token of"
        f" prompts\n# alone, and by {fitted.decode_error:.0%} of decode steps, on average.\n"
    )
    return head + yaml.safe_dump({"emulator": section}, sort_keys=False)
