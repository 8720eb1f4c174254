"""Step costs and KV memory of an instance: a model on some cards, derived from the published figures of both.

Nothing is fitted to a result. A step takes two operations per parameter and token, four per layer, width and pair of
attention; weights are read once per step, KV cache once per decoding sequence. With tensor parallelism over n cards of
one node all of this is shared by n, and each layer adds up its results twice over all cards: 2 (n - 1) / n of its
activations go over each card's link, and each sum takes ``SUM_LATENCY_S`` besides.

The KV cache gets what 90 % of the memory, vLLM's default, leaves beside weights and ``WORKSPACE_BYTES`` a card.
"""

from __future__ import annotations

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.simulation.engine.cards import Card
from dualmap.simulation.engine.kv_tiers import KvTier
from dualmap.simulation.engine.kv_transfer import KvTransfer
from dualmap.simulation.engine.models import Model
from dualmap.simulation.engine.step_time import StepCosts

CARDS_OF_ONE_NODE = (1, 2, 4, 8)
MEMORY_SHARE = 0.9
WORKSPACE_BYTES = 3e9
SUM_LATENCY_S = 15e-6
DISK_BYTES_PER_S = 5e9
DISK_START_S = 0.002


def derive_costs(model: Model, card: Card, cards: int = 1) -> StepCosts:
    """Step costs of the model on so many cards of one node."""
    efficiency = card.efficiency
    matmul_flops = cards * card.flops * efficiency.matmul
    attention_flops = cards * card.flops * efficiency.attention
    bytes_per_s = cards * card.memory_bytes_per_s * efficiency.memory
    sums = 2 * model.layers if cards > 1 else 0
    sum_bytes = 2 * (cards - 1) / cards * model.width * model.bytes_per_value
    return StepCosts(
        overhead_s=efficiency.step_overhead_s + sums * SUM_LATENCY_S,
        weights_s=(model.linear_parameters + model.head_parameters) * model.bytes_per_value / bytes_per_s,
        token_s=2 * model.linear_parameters / matmul_flops
        + sums * sum_bytes / (card.node_bytes_per_s * efficiency.link),
        attention_pair_s=4 * model.layers * model.attention_width / attention_flops,
        sequence_s=efficiency.sequence_s + 2 * model.head_parameters / matmul_flops,
        context_token_s=model.kv_bytes_per_token_on(cards) / bytes_per_s,
        prompt_s=efficiency.prompt_s,
    )


def derive_transfer(model: Model, card: Card, cards: int = 1) -> KvTransfer:
    """Moves of KV over the network ports of the instance's cards."""
    bytes_per_s = cards * card.network_bytes_per_s * card.efficiency.link
    return KvTransfer(model.kv_bytes_per_token, bytes_per_s, card.efficiency.transfer_s)


def derive_tiers(model: Model, card: Card, cards: int = 1) -> tuple[KvTier, ...]:
    """Tiers of no size. Host memory is read over each card's own PCIe link, a disk of its own at what vLLM assumes of a
    local one, and a pool over the network ports."""
    host_bytes_per_s = cards * card.host_bytes_per_s * model.kv_bytes_per_token / model.kv_bytes_per_token_on(cards)
    transfer = derive_transfer(model, card, cards)
    return (
        KvTier(Tier.HOST, bytes_per_s=host_bytes_per_s),
        KvTier(Tier.DISK, bytes_per_s=DISK_BYTES_PER_S, start_s=DISK_START_S),
        KvTier(Tier.POOL, bytes_per_s=transfer.bytes_per_s, start_s=transfer.latency_s),
    )


def kv_capacity_tokens(model: Model, card: Card, cards: int = 1) -> int:
    """Tokens whose KV fits beside the weights; 0 or less: the weights do not fit."""
    free_bytes = cards * (MEMORY_SHARE * card.memory_bytes - WORKSPACE_BYTES) - model.weight_bytes
    return int(free_bytes / model.kv_bytes_per_token_on(cards))


def fewest_cards(model: Model, card: Card, kv_tokens: int) -> int | None:
    """The fewest cards of one node beside whose weights the KV of so many tokens fits; None: no node is large
    enough."""
    return next((n for n in CARDS_OF_ONE_NODE if kv_capacity_tokens(model, card, n) >= kv_tokens), None)
