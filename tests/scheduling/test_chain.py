from __future__ import annotations

from scheduling.chain import Chain


def test_a_hit_covers_no_more_tokens_than_the_prompt_has() -> None:
    # given a text prompt whose estimated tokens are fewer than its blocks suggest
    chain = Chain((1, 2, 3), block_tokens=128, prompt_tokens=300)

    assert [chain.hit_tokens(blocks) for blocks in range(4)] == [0, 128, 256, 300]


def test_at_least_one_token_is_always_left_to_compute() -> None:
    chain = Chain((1, 2), block_tokens=100, prompt_tokens=200)

    assert [chain.uncached_tokens(blocks) for blocks in range(3)] == [200, 100, 1]
