"""What the leader has learned of a pool and publishes; replicas read it with the membership."""

from __future__ import annotations

from functools import lru_cache

from scheduling.ttft_model import PRIOR_WEIGHTS
from scheduling.values import value
from scheduling.weights import Form

DEFAULT_BYTES_PER_TOKEN = 4.0


@value
class Learned:
    """The learned prefill rate of an instance is not here: the store keeps it with the instance's figures."""

    bytes_per_token: float = DEFAULT_BYTES_PER_TOKEN
    ttft_weights: tuple[float, ...] = PRIOR_WEIGHTS
    """Of the pool's TTFT model, see ``scheduling.ttft_model``."""

    @property
    def ttft(self) -> Form:
        """The expected TTFT, learned from the pool's own history."""
        return _ttft_form(self.ttft_weights)


PAIRS_UNIT = 1e8
"""Attention pairs are learned in this unit, so that all features are about one."""


@lru_cache(maxsize=64)
def _ttft_form(weights: tuple[float, ...]) -> Form:
    constant, ahead, compute, attention, kv_demand = weights
    return Form(
        constant=constant,
        ahead_s=ahead,
        progress_s=-ahead,
        compute_s=compute,
        attention_pairs=attention / PAIRS_UNIT,
        kv_demand=kv_demand,
    )
