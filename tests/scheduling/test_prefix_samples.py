"""Which prefixes of a chain are remembered."""

from __future__ import annotations

import pytest

from scheduling.chain import Chain
from scheduling.prefix_samples import sample_depths


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
