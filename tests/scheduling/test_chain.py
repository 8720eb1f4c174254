from __future__ import annotations

from scheduling.chain import Chain


def test_a_hit_covers_whole_blocks_and_never_the_block_of_the_last_token() -> None:
    # given a text prompt whose estimated tokens are fewer than its blocks suggest
    chain = Chain((1, 2, 3), block_tokens=128, prompt_tokens=300)

    assert [chain.hit_tokens(blocks) for blocks in range(4)] == [0, 128, 256, 256]


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again() -> None:
    chain = Chain((1, 2), block_tokens=100, prompt_tokens=200)

    assert [chain.uncached_tokens(blocks) for blocks in range(3)] == [200, 100, 100]
