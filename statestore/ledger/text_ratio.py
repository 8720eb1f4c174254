"""Bytes per token of a pool's prompts, learned from prompts whose token count an instance reported.

The published ratio tells replicas how many tokens a prompt and its blocks are believed to have; where text is cut
follows from the configuration alone (``scheduling.blocks``). A change counts as a new epoch, upon which every replica
reads the members again: so there is one only when the learned ratio has left the published one by more than a tenth.
"""

from __future__ import annotations

MEMORY_TOKENS = 4_000_000
"""Sums are halved above this, so that old prompts fade."""
MIN_TOKENS = 16_384
"""Tokens seen before the prior is given up."""
TOLERANCE = 0.1
LEAST_RATIO = 0.001
"""Bytes per token at least, so that it can be divided by."""


class TextRatio:
    """Sums of bytes and tokens, and the ratio in use."""

    __slots__ = ("bytes_per_token", "prompt_bytes", "prompt_tokens")

    def __init__(self, bytes_per_token: float) -> None:
        self.bytes_per_token = bytes_per_token
        self.prompt_bytes = 0
        self.prompt_tokens = 0

    def learn(self, prompt_bytes: int, prompt_tokens: int) -> bool:
        """Count one prompt; True when the published ratio changed."""
        self.prompt_bytes += prompt_bytes
        self.prompt_tokens += prompt_tokens
        if self.prompt_tokens > MEMORY_TOKENS:
            self.prompt_bytes //= 2
            self.prompt_tokens //= 2
        if self.prompt_tokens < MIN_TOKENS:
            return False
        learned = max(LEAST_RATIO, self.prompt_bytes / self.prompt_tokens)
        if abs(learned - self.bytes_per_token) <= TOLERANCE * self.bytes_per_token:
            return False
        self.bytes_per_token = learned
        return True
