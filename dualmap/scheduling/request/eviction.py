"""Eviction: which answers under way leave an instance where a request of a higher class would miss its SLO.

Only answers of classes that say so (``evictable``), of a lower class than the request's, with which another try can go
on. They are placed again like any other request, behind those of higher classes: on another instance, or later on the
same one. An answer is evicted ``MOST_EVICTIONS`` times at most, and a request evicts ``MOST_AT_ONCE`` at most, once:
when it was placed. So every eviction is paid for by a request that arrived, and none causes another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from dualmap.scheduling.settings import PriorityClassSettings
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.values import value

MOST_EVICTIONS: Final = 2
"""The most times that an answer is evicted."""
MOST_AT_ONCE: Final = 4
"""The most answers that a request evicts."""


@value
class AnswerUnderWay:
    """An answer on an instance, or a request that was sent there for it."""

    request_id: str
    class_rank: int
    prefill_tokens: int
    """Prompt tokens that are still to be prefilled; 0 once its first token has come."""
    context_tokens: int
    """Tokens whose KV it holds, or is to hold."""
    since_s: float
    """The time at which it was sent, on the driver's clock."""
    evictions: int


@value
class Shortage:
    """The tokens that an instance has too much for a request, so that it would miss its SLO there."""

    prefill_tokens: float
    """Pending prefill in front of it, beyond what its SLO leaves time for."""
    kv_tokens: int
    """KV memory that it lacks."""


class EvictionRule:
    """The rule of one pool's classes."""

    def __init__(self, classes: Sequence[PriorityClassSettings]) -> None:
        self._evictable = frozenset(rank for rank, each in enumerate(classes) if each.evictable)

    @property
    def is_on(self) -> bool:
        return bool(self._evictable)

    def is_evictable(self, class_rank: int) -> bool:
        return class_rank in self._evictable

    def may_evict(self, class_rank: int) -> bool:
        """Whether requests of this class may evict any other."""
        return any(rank > class_rank for rank in self._evictable)

    def shortage(
        self,
        class_rank: int,
        load: InstanceLoad,
        *,
        ttft_s: float,
        slo_s: float,
        uncached_tokens: int,
        context_tokens: int,
    ) -> Shortage | None:
        """The shortage of a request that was placed on an instance with this load before; None where it lacks nothing,
        or no class below its own may be evicted.

        Args:
            ttft_s: the TTFT that is expected of it there.
            uncached_tokens: of its prompt.
            context_tokens: of its prompt and its answer.
        """
        if not self.may_evict(class_rank):
            return None
        used = load.context_tokens if load.kv_used_tokens is None else load.kv_used_tokens
        lacking = max(0, min(used + context_tokens - load.kv_capacity_tokens, context_tokens))
        # Dispatched work is not overtaken, also where nothing on time is expected to wait for it.
        ahead_s = max(ttft_s, (load.dispatched_tokens + uncached_tokens) / load.prefill_tokens_per_s)
        late_tokens = max(0.0, ahead_s - slo_s) * load.prefill_tokens_per_s
        return Shortage(late_tokens, lacking) if late_tokens or lacking else None

    def evicted(self, class_rank: int, shortage: Shortage, answers: Iterable[AnswerUnderWay]) -> list[str]:
        """The answers that leave, by their request ids: of the lowest class first, and of each class those that lose
        least, which were sent last. Nothing leaves that ends no shortage, even in a small part."""
        below = self._by_loss(each for each in answers if each.class_rank > class_rank)
        leave: list[str] = []
        prefill_tokens, kv_tokens = shortage.prefill_tokens, shortage.kv_tokens
        for each in below:
            helps = (prefill_tokens > 0 and each.prefill_tokens > 0) or (kv_tokens > 0 and each.context_tokens > 0)
            if helps and len(leave) < MOST_AT_ONCE:
                leave.append(each.request_id)
                prefill_tokens -= each.prefill_tokens
                kv_tokens -= each.context_tokens
        return leave

    def cheapest(self, answers: Iterable[AnswerUnderWay], count: int) -> list[str]:
        """So many answers that may leave, by their request ids, those first that lose least."""
        return [each.request_id for each in self._by_loss(answers)[:count]]

    def _by_loss(self, answers: Iterable[AnswerUnderWay]) -> list[AnswerUnderWay]:
        """The answers that may leave: of the lowest class first, and of each class those that were sent last."""
        found = [each for each in answers if self.is_evictable(each.class_rank) and each.evictions < MOST_EVICTIONS]
        return sorted(found, key=lambda each: (-each.class_rank, -each.since_s, each.request_id))
