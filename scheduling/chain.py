"""The hash chain of a prompt: what every routing decision is made from."""

from __future__ import annotations

from scheduling.values import value


@value
class Chain:
    """A prompt cut into blocks, as the list of their prefix hashes.

    ``hashes[k]`` is an unsigned 64-bit hash that covers blocks ``0..k``, so two prompts share their
    first ``k + 1`` blocks exactly when ``hashes[k]`` agrees. Only full blocks are listed, except that a
    prompt shorter than one block is listed as that one partial block: a chain is never empty.
    """

    hashes: tuple[int, ...]
    block_tokens: int
    """Tokens in one block; with text input this is an estimate (bytes of a block / bytes per token)."""
    prompt_tokens: int
    """Tokens in the whole prompt, the partial last block included."""
    tail_hash: int | None = None
    """Hash of the whole prompt when a partial block follows the full ones. No KV cache lists it, but it
    distinguishes the requests of a popular prefix whose own part is shorter than a block."""

    def prefix_hash(self, blocks: int) -> int:
        """Hash of the first ``blocks`` blocks, counted from 1; the partial last block, if there is one, counts too."""
        if blocks > len(self.hashes) and self.tail_hash is not None:
            return self.tail_hash
        return self.hashes[blocks - 1]

    def hit_tokens(self, hit_blocks: int) -> int:
        """Prompt tokens that need no prefill when the first ``hit_blocks`` blocks are cached.

        Fewer than the prompt has: an engine computes the last token in any case, and with it, as vLLM's cache knows
        whole blocks only, the block that holds it.
        """
        return min(hit_blocks, (self.prompt_tokens - 1) // self.block_tokens) * self.block_tokens

    def uncached_tokens(self, hit_blocks: int) -> int:
        """Prompt tokens left to prefill after a hit, at least 1."""
        # ``hit_tokens`` written out: a decision asks this for every instance it weighs.
        return self.prompt_tokens - min(hit_blocks, (self.prompt_tokens - 1) // self.block_tokens) * self.block_tokens
