"""Sampled prefixes of a chain: the few that enter the pool's prefix index.

A candidate pair finds the cache as long as its requests stay in the pair. To place a request outside a busy pair, and
still find the cache again afterwards, the pool keeps an index from sampled prefixes to the instance that was last given
them. One sample every ``SAMPLE_TOKENS`` and one at the last full block keep it small.
"""

from __future__ import annotations

from scheduling.chain import Chain

SAMPLE_TOKENS = 1024


def sample_depths(chain: Chain) -> tuple[int, ...]:
    """Depths in blocks at which the chain is sampled, shallowest first; the last is that of its last full block.

    A prompt shorter than one block has no full block and no sample: there is nothing to find again.
    """
    full_blocks = min(len(chain.hashes), chain.prompt_tokens // chain.block_tokens)
    if full_blocks == 0:
        return ()
    stride = max(1, SAMPLE_TOKENS // chain.block_tokens)
    return (*range(stride, full_blocks, stride), full_blocks)
