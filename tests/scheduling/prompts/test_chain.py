from __future__ import annotations

import pytest

from dualmap.scheduling.prompts.chain import MAX_SAMPLES, Chain, sample_depths


def test_a_hit_covers_whole_blocks_and_never_the_block_of_the_last_token() -> None:
    # given a text prompt whose estimated tokens are fewer than its blocks suggest
    chain = Chain((1, 2, 3), block_tokens=128, prompt_tokens=300)

    assert [chain.hit_tokens(blocks) for blocks in range(4)] == [0, 128, 256, 256]


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again() -> None:
    chain = Chain((1, 2), block_tokens=100, prompt_tokens=200)

    assert [chain.uncached_tokens(blocks) for blocks in range(3)] == [200, 100, 100]


@pytest.mark.parametrize(
    ("prompt_tokens", "block_tokens", "depths"),
    [
        (100, 128, ()),
        (128, 128, (1,)),
        (1024, 128, (8,)),
        (2500, 128, (8, 16, 19)),
        (2500, 512, (2, 4)),
        (2600, 512, (2, 4, 5)),
        (5000, 4096, (1,)),
    ],
)
def test_a_chain_is_sampled_every_so_many_tokens_and_at_its_last_full_block(
    prompt_tokens: int, block_tokens: int, depths: tuple[int, ...]
) -> None:
    blocks = max(1, prompt_tokens // block_tokens)
    chain = Chain(tuple(range(blocks)), block_tokens, prompt_tokens)
    assert sample_depths(chain) == depths


def test_a_follow_up_is_sampled_wherever_its_beginning_was_but_for_the_end() -> None:
    shorter = Chain(tuple(range(20)), 128, 20 * 128)
    longer = Chain(tuple(range(50)), 128, 50 * 128)
    assert set(sample_depths(shorter)[:-1]) <= set(sample_depths(longer))


def test_of_a_very_long_chain_the_deepest_prefixes_are_sampled() -> None:
    depths = sample_depths(Chain(range(90_000), 100, 9_000_000))

    assert len(depths) == MAX_SAMPLES
    assert depths[-2:] == (89_990, 90_000)
