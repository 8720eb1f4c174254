"""Chains packed once per request."""

from __future__ import annotations

from scheduling.chain import Chain
from statestore.redis.codec import pack_chain
from statestore.redis.packed_chains import KEPT_CHAINS, PackedChains


def chain(number: int) -> Chain:
    return Chain(tuple(range(number, number + 20)), 128, 20 * 128)


def test_a_chain_is_packed_once_as_long_as_it_is_the_same_object() -> None:
    chains, one = PackedChains(), chain(1)

    packed = chains.of(one)

    assert packed.hashes == pack_chain(one.hashes)
    assert packed.mark_depths == (8, 16, 20)
    assert packed.marks == pack_chain([one.hashes[7], one.hashes[15], one.hashes[19]])
    assert chains.of(one) is packed


def test_chains_of_later_objects_are_never_mistaken_for_earlier_ones() -> None:
    chains = PackedChains()

    for number in range(4 * KEPT_CHAINS):  # each is dropped at once: its place in memory is taken by a later one
        assert chains.of(chain(number)).hashes == pack_chain(range(number, number + 20))

    assert len(chains._packed) == KEPT_CHAINS
