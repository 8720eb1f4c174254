from __future__ import annotations

from array import array
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pytest

from dualmap.scheduling.prompts.blocks import BlockRule, TokenPrompt
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import (
    NO_EXTRAS,
    ROOT,
    BlockExtras,
    Medium,
    append_hashes,
    block_hash,
    chain_of_hashes,
    encode_extra_keys,
    engine_chain,
    engine_chain_in_steps,
)


def run(steps: Generator[None, None, Chain]) -> tuple[Chain, int]:
    """The chain, and the pauses on the way."""
    pauses = 0
    while True:
        try:
            next(steps)
        except StopIteration as made:
            return made.value, pauses
        pauses += 1


def of_events(ids: list[int], block_tokens: int, extras: BlockExtras = NO_EXTRAS) -> list[int]:
    """The blocks that a subscriber makes of stored ones, one after the other."""
    parent, hashes = ROOT, []
    for place in range(len(ids) // block_tokens):
        block = array("I", ids[place * block_tokens : (place + 1) * block_tokens]).tobytes()
        parent = block_hash(parent, block, extras.at.get(place, extras.usual))
        hashes.append(parent)
    return hashes


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    assert ROOT == 3421534079572505487
    assert tuple(engine_chain([1, 2, 3, 4], 2).hashes) == (11160739854894797847, 10955110015337547312)
    separated = engine_chain([1, 2, 3, 4], 2, BlockExtras.of("adapter", "salt"))
    assert tuple(separated.hashes) == (3859489025644040931, 3709907596445638649)


@pytest.mark.parametrize("extras", [NO_EXTRAS, BlockExtras.of("adapter"), BlockExtras.of("adapter", "salt")])
def test_a_prompt_and_the_events_of_its_blocks_come_to_the_same_hashes(extras: BlockExtras) -> None:
    ids = list(range(100, 143))

    assert list(engine_chain(ids, 8, extras).hashes) == of_events(ids, 8, extras)


def test_the_rest_after_the_full_blocks_is_the_tail() -> None:
    chain = engine_chain(range(10), 4)

    assert (len(chain.hashes), chain.block_tokens, chain.prompt_tokens) == (2, 4, 10)
    assert chain.tail_hash is not None
    assert engine_chain(range(8), 4).tail_hash is None


def test_a_prompt_shorter_than_a_block_is_its_one_block() -> None:
    chain = engine_chain([1, 2], 4)

    assert (len(chain.hashes), chain.prompt_tokens, chain.tail_hash) == (1, 2, None)


def test_adapter_and_salt_are_keys_as_the_engine_lists_them() -> None:
    extras = BlockExtras.of("adapter", "salt")

    assert extras.at[0] == encode_extra_keys(("adapter", "salt"))
    assert extras.usual == encode_extra_keys(["adapter"])
    assert encode_extra_keys(None) == encode_extra_keys(()) == b""


def test_images_are_keys_of_the_blocks_that_they_reach_into_between_adapter_and_salt() -> None:
    media = [Medium("cat", 3, 6), Medium("dog", 9, 1)]
    extras = BlockExtras.of_media(media, 4, "sql", "secret")
    assert extras.usual == encode_extra_keys(["sql"])
    assert extras.at == {
        0: encode_extra_keys(["sql", ("cat", 3), "secret"]),
        1: encode_extra_keys(["sql", ("cat", -1)]),
        2: encode_extra_keys(["sql", ("cat", -5), ("dog", 1)]),
    }
    later = BlockExtras.of_media([Medium("cat", 4, 1)], 4, None, "secret")
    assert later.at == {0: encode_extra_keys(["secret"]), 1: encode_extra_keys([("cat", 0)])}
    assert BlockExtras.of_media([], 4, "sql", "secret") == BlockExtras.of("sql", "secret")


def test_whatever_separates_kv_caches_separates_chains() -> None:
    keys: list[Any] = [None, ["a"], ["b"], [["a", 0]], [["a", 1]], ["a", "s"], [b"a"]]
    heads = [engine_chain(range(8), 4, BlockExtras(at={0: encode_extra_keys(each)})).hashes for each in keys]

    assert len({head[0] for head in heads}) == len({head[1] for head in heads}) == len(keys)


def test_the_blocks_after_one_with_extra_keys_differ_too() -> None:
    plain, salted = (engine_chain(range(40), 4, BlockExtras.of(cache_salt=salt)).hashes for salt in (None, "s"))

    assert not set(plain) & set(salted)
    assert all(left != right for left, right in pairwise(plain))


@pytest.mark.parametrize("tokens", [0, 1, 4095, 4096, 4097, 4098, 9000])
def test_a_chain_made_in_steps_is_the_same(tokens: int) -> None:
    ids = array("I", range(tokens))
    chain, pauses = run(engine_chain_in_steps(ids, 2))

    assert chain == engine_chain(ids, 2) == BlockRule(2, 8).chain(TokenPrompt(ids), 0, 4.0)
    assert (pauses > 0) is (tokens >= 4098)


@pytest.mark.parametrize("ids", [[1, -1], [2**32]])
def test_ids_that_are_no_token_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        engine_chain(ids, 2)


@pytest.mark.parametrize("extras", [BlockExtras(), BlockExtras.of("lora", "salt")])
@pytest.mark.parametrize("cut", [0, 1, 4, 7, 40])
def test_a_chain_that_is_continued_is_that_of_all_its_tokens(extras: BlockExtras, cut: int) -> None:
    ids, hashes = array("I", range(41)), array("Q")
    rest = append_hashes(hashes, ids[:cut].tobytes(), 4, extras)
    rest = append_hashes(hashes, rest + ids[cut:].tobytes(), 4, extras)

    assert chain_of_hashes(hashes, rest, 4, extras) == engine_chain(ids, 4, extras)
