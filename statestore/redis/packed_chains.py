"""Chains as the scripts take them."""

from __future__ import annotations

from typing import NamedTuple

from scheduling.chain import Chain
from scheduling.prefix_holders import mark_depths
from statestore.redis.codec import pack_chain

KEPT_CHAINS = 256


class PackedChain(NamedTuple):
    chain: Chain
    hashes: bytes
    marks: bytes
    """See ``scheduling.prefix_holders``."""
    mark_depths: tuple[int, ...]

    @classmethod
    def of(cls, chain: Chain) -> PackedChain:
        hashes, depths = chain.hashes, mark_depths(chain)
        return cls(chain, pack_chain(hashes), pack_chain([hashes[depth - 1] for depth in depths]), depths)


class PackedChains:
    """Packs a chain once: what is observed is reserved a moment later, and prefilled soon, as the same object."""

    def __init__(self) -> None:
        self._packed: dict[int, PackedChain] = {}
        """By identity, which holds as long as the chain is kept here."""

    def of(self, chain: Chain) -> PackedChain:
        packed = self._packed.get(id(chain))
        if packed is None:
            packed = self._packed[id(chain)] = PackedChain.of(chain)
            if len(self._packed) > KEPT_CHAINS:
                del self._packed[next(iter(self._packed))]
        return packed
