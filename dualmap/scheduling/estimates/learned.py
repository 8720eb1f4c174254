"""Estimates of a pool that the leader has learned and publishes; replicas read them with the membership."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from dualmap.scheduling.estimates.adapter_prices import PRIOR_PRICES
from dualmap.scheduling.estimates.adapters import PRIOR_ANSWER_S
from dualmap.scheduling.estimates.answer_length import PRIOR_MEANS
from dualmap.scheduling.estimates.ttft_model import PRIOR_WEIGHTS
from dualmap.scheduling.estimates.weights import Form
from dualmap.scheduling.prompts.blocks import DEFAULT_BYTES_PER_TOKEN

PRIOR_IMAGE_TOKENS = 1024.0
"""Tokens of an image of about a megapixel in current models."""
PAIRS_UNIT = 1e8
"""Attention pairs are learned in this unit, so that all features are about one."""


@dataclass(slots=True, unsafe_hash=True)
class Learned:
    """The learned prefill rate of an instance is not here: the store keeps it with the instance's figures."""

    bytes_per_token: float = DEFAULT_BYTES_PER_TOKEN
    ttft_weights: tuple[float, ...] = PRIOR_WEIGHTS
    """Weights of the pool's TTFT model, see ``scheduling.estimates.ttft_model``."""
    answer_tokens: tuple[float, ...] = PRIOR_MEANS
    """Mean length of an answer, by class of the request's limit, see ``scheduling.estimates.answer_length``."""

    transfer: tuple[float, float] | None = None
    """The cost of moving KV to a decode instance: seconds, and seconds per token
    (``scheduling.estimates.transfer_model``). None: none of this pool was seen yet."""

    tpot_s: float | None = None
    """Mean time per output token of recent answers that streamed; None: none was seen yet."""

    image_tokens: float = PRIOR_IMAGE_TOKENS
    """Mean tokens of an image in a prompt, without those of its mark in the rendered text."""

    _: KW_ONLY
    answer_s: float = PRIOR_ANSWER_S
    """Mean time of recent answers that streamed, for which each used its adapter."""

    adapter_prices: tuple[float, ...] = PRIOR_PRICES
    """Times of loads of adapters as measured, over those of the instances' descriptions: from host memory, and into
    it (``scheduling.estimates.adapter_prices``)."""

    ttft: Form = field(init=False, compare=False, repr=False)
    """The expected TTFT, learned from the pool's own history."""

    def __post_init__(self) -> None:
        constant, ahead, compute, attention, kv_demand = self.ttft_weights
        adapter_host, adapter_disk = self.adapter_prices
        self.ttft = Form(
            constant=constant,
            ahead_s=ahead,
            progress_s=-ahead,
            compute_s=compute,
            attention_pairs=attention / PAIRS_UNIT,
            kv_demand=kv_demand,
            load_s=1.0,
            adapter_host_s=adapter_host,
            adapter_disk_s=adapter_disk,
            slot_turns=self.answer_s,
        )
