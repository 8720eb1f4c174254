"""The hash chain of a prompt, which every routing decision is made from."""

from __future__ import annotations

from collections.abc import Sequence

from dualmap.scheduling.values import value

SAMPLE_TOKENS = 1024
"""Distance between sampled prefixes of a chain. These enter the pool's prefix index, which names the instance that was
last given them; one more sample is at the last full block. The index finds a request again that was placed outside a
busy pair."""


MAX_SAMPLES = 3000
"""Samples of a chain at most, the deepest: a script's commands take 8,000 words, and a sample is two of them."""


@value
class Chain:
    """A prompt cut into blocks, as the list of their prefix hashes.

    ``hashes[k]`` is an unsigned 64-bit hash that covers blocks ``0..k``, so two prompts share their
    first ``k + 1`` blocks exactly when ``hashes[k]`` agrees. Only full blocks are listed, except that a
    prompt shorter than one block is listed as that one partial block: a chain is never empty.
    """

    hashes: Sequence[int]
    """A tuple, or an ``array`` of type ``Q``: chains of the engine's blocks are long, and as numbers of their own they
    would be spread over the memory."""
    block_tokens: int
    """Tokens in one block; with text input this is an estimate (bytes of a block / bytes per token)."""
    prompt_tokens: int
    """Tokens in the whole prompt, the partial last block included."""
    tail_hash: int | None = None
    """Hash of the whole prompt when a partial block follows the full ones. No KV cache lists it, but it
    distinguishes the requests of a popular prefix whose own part is shorter than a block."""
    key_stride: int = 1
    """Blocks in one *key block*, the unit of hash keys and hotness. Blocks of 16 tokens, as engines have them, are too
    short for that: a popular prompt of some thousand tokens would have a key of hundreds of them."""
    root: int | None = None
    """Hash of the adapter that computes the prompt, which is a key block before the prompt's own: instances have room
    for few adapters, so the requests of one belong together before those of a prefix do. None: there is none."""

    @property
    def key_hashes(self) -> Sequence[int]:
        """The hashes of all key blocks: the root, where there is one, then ``hashes`` in full key blocks; of a chain
        shorter than one, its last hash."""
        stride, hashes = self.key_stride, self.hashes
        if stride != 1:
            hashes = hashes[stride - 1 :: stride] or hashes[-1:]
        return hashes if self.root is None else (self.root, *hashes)

    def prefix_hash(self, key_blocks: int) -> int:
        """Hash of the first ``key_blocks`` key blocks, counted from 1; a partial last one counts too."""
        if self.root is not None:
            if key_blocks == 1:
                return self.root
            key_blocks -= 1
        place = key_blocks * self.key_stride
        if place > len(self.hashes):
            return self.hashes[-1] if self.tail_hash is None else self.tail_hash
        return self.hashes[place - 1]

    def hit_tokens(self, hit_blocks: int) -> int:
        """Prompt tokens that need no prefill when the first ``hit_blocks`` blocks are cached.

        Fewer than the prompt has: an engine computes the last token in any case, and with it, as vLLM's cache knows
        whole blocks only, the block that holds it.
        """
        return min(hit_blocks, (self.prompt_tokens - 1) // self.block_tokens) * self.block_tokens

    def uncached_tokens(self, hit_blocks: int) -> int:
        """Prompt tokens left to prefill after a hit, at least 1."""
        # ``hit_tokens`` written out, and without ``min``: a decision calls this for every instance it weighs.
        tokens, block_tokens = self.prompt_tokens, self.block_tokens
        whole_blocks = (tokens - 1) // block_tokens
        return tokens - (hit_blocks if hit_blocks < whole_blocks else whole_blocks) * block_tokens


def sample_depths(chain: Chain) -> tuple[int, ...]:
    """Depths in blocks at which the chain is sampled, shallowest first; the last is that of its last full block.

    A prompt shorter than one block has no full block and no sample: there is nothing to find again.
    """
    block_tokens, full_blocks = chain.block_tokens, len(chain.hashes)
    if (whole_blocks := chain.prompt_tokens // block_tokens) < full_blocks:
        full_blocks = whole_blocks
    if full_blocks == 0:
        return ()
    stride = SAMPLE_TOKENS // block_tokens or 1
    if stride >= full_blocks:
        return (full_blocks,)
    depths = range(stride, full_blocks, stride)
    return (*(depths if len(depths) < MAX_SAMPLES else depths[1 - MAX_SAMPLES :]), full_blocks)
