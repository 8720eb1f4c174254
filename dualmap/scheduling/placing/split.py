"""The decider: is a request split, or served whole by a decode-capable instance?

Both options are weighed in the placement itself, on current counts. A split request pays for the transfer of its KV. A
whole one pays with its own prefill beside running answers: each of them waits for that long. So a short uncached part,
or a prefix that a decode-capable instance holds, is served whole, and long prompts are split while prefill instances
have room.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Form, Weights
from dualmap.scheduling.settings import SplitSettings
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.view import ClusterView

DECODE_DELAY_WEIGHT = 4.0
"""Cost of a second for which one running answer waits for a prefill, in seconds of a first token. Measured."""
FIRST_TRANSFER = (0.02, 1 / 200_000)
"""Seconds, and seconds per token, that a transfer is assumed to take until the first ones are learned from."""
FULL_SHARE = 0.95
"""Share of the time-per-token SLO beyond which no slack is left: half of the answers are slower than their mean."""
LEAST_SLACK = 0.02
"""Slack that is assumed at that share or past it. The fourth power of the share in use keeps the weight near
``DECODE_DELAY_WEIGHT`` until the SLO is near: 1.1 x at half of it, 5 x at nine tenths."""


@dataclass(frozen=True)
class SplitRule:
    """The rule between serving a request whole and splitting it: the lower cost in seconds."""

    settings: SplitSettings

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The options of serving a request: both, or the one to prefer first."""
        return (Leg.WHOLE,) if self.settings.mode == "never" else (Leg.PREFILL, Leg.WHOLE)

    def decider(self, *, split: bool, learned: Learned) -> Form:
        """The cost of a request that is split, or that is not, on the instance that would prefill it. The lower one is
        taken; split, if they are equal."""
        if split:
            return _split_cost(learned.ttft, *self.transfer(learned))
        return _whole_cost(learned.ttft, self._decode_delay_weight(learned))

    def _decode_delay_weight(self, learned: Learned) -> float:
        """The cost of a second for which one running answer waits. It grows as answers come closer to their SLO."""
        used = 0.0 if learned.tpot_s is None else learned.tpot_s / (FULL_SHARE * self.settings.slo_tpot_s)
        return DECODE_DELAY_WEIGHT / max(LEAST_SLACK, 1.0 - used**4)

    def transfer(self, learned: Learned) -> tuple[float, float]:
        """The time in which the KV of a split request reaches its decode instance: seconds, and seconds per token."""
        return learned.transfer or FIRST_TRANSFER

    def transfer_s(self, learned: Learned, tokens: int) -> float:
        """The expected time of a transfer of this many tokens."""
        latency_s, token_s = self.transfer(learned)
        return latency_s + tokens * token_s

    def prefill_slo_s(self, slo_s: float, prompt_tokens: int, view: ClusterView, learned: Learned) -> float:
        """The time within which the prefill of a request that may be split has to end, so that its KV reaches the
        decode instance before the SLO. At most half of the SLO is kept for the transfer."""
        if view.decoding is None or self.settings.mode == "never":
            return slo_s
        return slo_s - min(self.transfer_s(learned, prompt_tokens), slo_s / 2)

    def decode_weights(self, kv_weight_s: float, learned: Learned) -> Weights:
        """The weights of a decode leg: KV memory and sequences in use, and the transfer of missing blocks."""
        return _decode_weights(kv_weight_s, *self.transfer(learned))


# Most requests have the same weights: a replica uses the same few figures until new ones are learned.
@lru_cache(maxsize=64)
def _split_cost(ttft: Form, latency_s: float, token_s: float) -> Form:
    return ttft._replace(constant=ttft.constant + latency_s, prompt_tokens=ttft.prompt_tokens + token_s)


@lru_cache(maxsize=64)
def _whole_cost(ttft: Form, decode_delay_weight: float) -> Form:
    return ttft._replace(decoding_compute_s=ttft.decoding_compute_s + decode_delay_weight)


@lru_cache(maxsize=64)
def _decode_weights(kv_weight_s: float, latency_s: float, token_s: float) -> Weights:
    transfer = Form(constant=latency_s, uncached_tokens=token_s)
    return Weights(transfer._replace(kv_demand=kv_weight_s, running_share=kv_weight_s), transfer)
