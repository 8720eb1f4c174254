"""Cache groups of hybrid models: where a hit may end, and what a prompt leaves behind.

The layers of a hybrid model form several *cache groups*, each with blocks of its own. A hit of so many tokens needs, in
every group of a kind: of full attention all blocks up to there; of a sliding window the blocks of the window before it;
of layers with a state (Mamba, linear attention, short convolutions) the state at this very place. It is a multiple of
all block sizes: the least common one is the *step*.

So the longest hit is found in what full attention holds at the head of a prompt, from its end back to the first place
where the other groups hold what they need. A block after which a hit may end is a *hit end*, any other one is *inner*.
Of an instance with one group every block is a hit end.

By default vLLM keeps windows and states at two places of a prompt alone: at the last step before its last token, and
where full attention's own hit ended, if the common hit was shorter. What an answer adds is held by full attention only.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from dualmap.scheduling.values import value


class GroupKind(StrEnum):
    """The rule by which blocks of a group make a hit."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@value
class CacheGroup:
    """One cache group of an engine."""

    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0
    """The tokens that a token of a sliding window sees, itself among them."""

    @property
    def needed_blocks(self) -> int:
        """Blocks before the end of a hit that the group must hold; of full attention all, which this does not say."""
        return max(1, -((1 - self.window_tokens) // self.block_tokens)) if self.kind is GroupKind.WINDOW else 1


def end_within(tokens: int, block_tokens: int, step_tokens: int) -> int:
    """Blocks up to the last step within ``tokens``."""
    return tokens // step_tokens * step_tokens // block_tokens


def ends_left(prompt_tokens: int, block_tokens: int, step_tokens: int, hit_blocks: int, reach: int) -> tuple[int, ...]:
    """The hit ends that a prompt leaves in any case, as numbers of blocks, where ``hit_blocks`` are its hit and full
    attention's own one reaches to ``reach`` blocks."""
    ends = {end_within(prompt_tokens - 1, block_tokens, step_tokens)}
    if reach > hit_blocks:
        ends.add(end_within(reach * block_tokens, block_tokens, step_tokens))
    return tuple(sorted(ends - {0}))


def last_end(inner: Sequence[bool | None], most_blocks: int) -> int:
    """The hit of a chain by what is known of each of its blocks: that it is not listed (None), or whether it is inner.

    At most ``most_blocks`` count, as the last token of a prompt is always computed. Where the last of them is a hit
    end, the blocks after it change nothing, and all that are listed are returned.
    """
    listed = next((place for place, each in enumerate(inner) if each is None), len(inner))
    within = min(listed, most_blocks)
    if not within or not inner[within - 1]:
        return listed
    return next((place for place in range(within, 0, -1) if not inner[place - 1]), 0)
