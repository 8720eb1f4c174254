"""A request inside the engine, and its progress."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from dualmap.simulation.engine.engine_types import EngineRequest


@dataclass(slots=True, eq=False)
class EngineSequence:
    """Mutable state of one request; owned by its engine."""

    request: EngineRequest
    _: KW_ONLY
    rank: tuple[int, int] = (0, 0)
    """Its priority, and the number of its arrival: an engine that schedules by priority serves the least first, and
    preempts the greatest."""
    order: int = 0
    """Grows with every admission to the running set, so the latest is preempted first."""
    prefill_tokens: int = 0
    """Tokens to compute before it decodes: its prompt and, after a preemption, what it had generated."""
    computed_tokens: int = 0
    """Tokens of these that were computed or found in the cache."""
    held_blocks: int = 0
    """Leading blocks of ``request.block_hashes`` that it holds in the prefix cache."""
    private_blocks: int = 0
    """Other blocks that it holds for ``computed_tokens``; once it decodes, the batch knows the whole number."""
    generated_tokens: int = 0
    """Tokens generated before the sequence joined the batch, or at the end."""
    cached_tokens: int | None = None
    """Hit of its first scheduling."""
    started: bool = False
    """The first token is out."""
    decoding: bool = False
    incoming_blocks: int = 0
    """Leading blocks of ``request.block_hashes`` that it has once its load, or its transfer, is through."""
    awaits_kv: bool = False
    """The KV of its prompt is to come by a transfer; not any more once it came, or is to be computed here."""
    awaits_pull: bool = False
    """A part of its prompt may come from another engine's cache; not any more once that came, or did not."""
    loads_end_s: float = 0.0
    """When its loads end, where it pulls too."""
    joined_step: int = 0
    last_step: int = 0
