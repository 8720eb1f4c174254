"""The decider: is a request split, or served whole by a decode-capable instance?

Both ways are weighed in the placement itself, on current counts. A split request pays for the transfer of its KV. A
whole one pays with its own prefill beside running answers: each of them waits for that long. So a short uncached part,
or a prefix that a decode-capable instance holds, is served whole, and long prompts are split while prefill instances
have room.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from scheduling.learned import Learned
from scheduling.legs import Leg
from scheduling.settings import SplitSettings
from scheduling.weights import Form, Weights


@dataclass(frozen=True)
class SplitRule:
    """What decides between two ways is a cost in seconds of each, or a length where one is set."""

    settings: SplitSettings

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The ways to serve a request: both, or the one to prefer first."""
        return (Leg.WHOLE,) if self.settings.mode == "never" else (Leg.PREFILL, Leg.WHOLE)

    def decider(self, *, split: bool, learned: Learned) -> Form:
        """The cost of a request that is split, or that is not, on the instance that would prefill it. The lower one is
        taken; split, if they are equal."""
        settings, ttft = self.settings, learned.ttft
        limit_tokens = settings.whole_up_to_tokens
        if limit_tokens is not None:
            return Form(constant=limit_tokens + 0.5) if split else Form(uncached_tokens=1.0)
        if split:
            return ttft._replace(
                constant=ttft.constant + settings.transfer_latency_s,
                prompt_tokens=ttft.prompt_tokens + 1 / settings.transfer_tokens_per_s,
            )
        return ttft._replace(decoding_compute_s=ttft.decoding_compute_s + settings.decode_delay_weight)

    @cached_property
    def _transfer(self) -> Form:
        settings = self.settings
        return Form(constant=settings.transfer_latency_s, uncached_tokens=1 / settings.transfer_tokens_per_s)

    def decode_weights(self, kv_weight_s: float) -> Weights:
        """What a decode leg costs: KV memory and sequences in use, and the transfer of what is not there."""
        cost = self._transfer._replace(kv_demand=kv_weight_s, running_share=kv_weight_s)
        return Weights(cost, self._transfer)
