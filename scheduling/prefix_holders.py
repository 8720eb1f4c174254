"""Marks of a chain: the few of its prefixes by which the pool remembers which instances were last given them.

A candidate pair finds the cache as long as its requests stay in the pair. To look past the pair when the pair is
too busy, and still to find the cache again afterwards, the pool keeps an index from marks to instances. One mark
every ``MARK_TOKENS`` and one at the last full block keep it small; marks at multiples of the stride are closed under
prefixes, so the deepest known one is found by binary search.
"""

from __future__ import annotations

from scheduling.chain import Chain

MARK_TOKENS = 1024
HOLDERS_PER_MARK = 2
"""Instances remembered for one prefix, most recent first."""


def mark_stride(block_tokens: int) -> int:
    """Blocks from one mark to the next."""
    return max(1, MARK_TOKENS // block_tokens)


def mark_depths(chain: Chain) -> tuple[int, ...]:
    """Depths in blocks at which the chain is marked, shallowest first; the last is that of its last full block.

    A prompt shorter than one block has no full block and no mark: there is nothing to find again.
    """
    full_blocks = min(len(chain.hashes), chain.prompt_tokens // chain.block_tokens)
    if full_blocks == 0:
        return ()
    stride = mark_stride(chain.block_tokens)
    return (*range(stride, full_blocks, stride), full_blocks)
