"""Dense decoder-only transformers with grouped-query attention, by their published configurations.

Mixtures of experts, sliding windows and latent attention are left out: their steps cost otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

HEAD_DIMENSION = 128


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes that say what a step of the model computes and reads; 16-bit weights and KV cache."""

    linear_parameters: float
    """Parameters that every token is multiplied with: all but the input embedding and the output head."""
    head_parameters: float
    """The output head: read in every step, computed once per sequence only."""
    layers: int
    width: int
    attention_width: int
    """Query heads times head dimension."""
    kv_width: int
    """KV heads times head dimension."""
    bytes_per_value: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_width * self.bytes_per_value

    @property
    def weight_bytes(self) -> float:
        """All weights; the input embedding counts once more, as large as the head."""
        return (self.linear_parameters + 2 * self.head_parameters) * self.bytes_per_value

    def kv_bytes_per_token_on(self, cards: int) -> int:
        """KV of a token over all of so many cards: with more cards than KV heads each head is kept more than once."""
        kv_heads = self.kv_width // HEAD_DIMENSION
        return self.kv_bytes_per_token * max(cards, kv_heads) // kv_heads


def _dense(layers: int, width: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> Model:
    """A model with gated feed-forward layers, of its configuration's figures."""
    attention_width, kv_width = heads * HEAD_DIMENSION, kv_heads * HEAD_DIMENSION
    a_layer = 2 * width * attention_width + 2 * width * kv_width + 3 * width * intermediate
    return Model(layers * a_layer, vocabulary * width, layers, width, attention_width, kv_width)


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "qwen2.5-1.5b": _dense(28, 1536, 12, 2, 8960, 151_936),
        "qwen2.5-7b": Model(6.53e9, 0.545e9, layers=28, width=3584, attention_width=3584, kv_width=512),
        "qwen2.5-14b": Model(13.21e9, 0.779e9, layers=48, width=5120, attention_width=5120, kv_width=1024),
        "qwen2.5-32b": _dense(64, 5120, 40, 8, 27_648, 152_064),
        "qwen2.5-72b": _dense(80, 8192, 64, 8, 29_568, 152_064),
        "qwen3-8b": _dense(36, 4096, 32, 8, 12_288, 151_936),
        "qwen3-14b": _dense(40, 5120, 40, 8, 17_408, 151_936),
        "qwen3-32b": _dense(64, 5120, 64, 8, 25_600, 151_936),
        "llama-3.1-8b": _dense(32, 4096, 32, 8, 14_336, 128_256),
        "llama-3.1-70b": _dense(80, 8192, 64, 8, 28_672, 128_256),
        "mistral-small-24b": _dense(40, 5120, 32, 8, 32_768, 131_072),
    }
)
