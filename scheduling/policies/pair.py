"""The frame of the policies that choose within a candidate pair: no cost of theirs grows with the fleet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from scheduling.decision import Decision, Horizon, Reason, RouteQuery
from scheduling.errors import NoInstanceError
from scheduling.instance import InstanceLoad
from scheduling.policies.choice import decide, usable
from scheduling.ttft import expected_ttft_s, queueing_s
from scheduling.view import ClusterView

PAIR = 2


@dataclass(frozen=True)
class PairPolicy(ABC):
    """Candidates from the two rings; a subclass picks between them."""

    name: str
    max_key_blocks: int
    decode_stall_s: float
    rebalances: bool = False
    looks_beyond: ClassVar[bool] = False

    def choose_or_look(self, query: RouteQuery, loads: Mapping[str, InstanceLoad], horizon: Horizon) -> Decision:
        return self.choose(query, loads)

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        return pair_of(query, view, self.max_key_blocks)

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        left = usable(query, loads)
        if len(left) < PAIR:
            decision = self._decide(query, left[0], None, Reason.ONLY_ONE)
        else:
            decision = self._pick(query, left[0], left[1])
        if query.excluded and decision.instance_id not in query.pair:
            return replace(decision, reason=Reason.BEYOND_PAIR)
        return decision

    @abstractmethod
    def _pick(self, query: RouteQuery, first: InstanceLoad, second: InstanceLoad) -> Decision:
        """Decide between the two candidates; ``first`` is from the first ring."""

    def _decide(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad | None, reason: Reason) -> Decision:
        """Write the decision down, and ask for the rebalancer when both candidates are past the SLO."""
        overloaded = self.rebalances and other is not None and self._both_late(query, chosen, other)
        return decide(query, chosen, other, reason, self.decode_stall_s, overloaded=overloaded)

    def _both_late(self, query: RouteQuery, first: InstanceLoad, second: InstanceLoad) -> bool:
        return self._ttft_s(query, first) > query.slo_s and self._ttft_s(query, second) > query.slo_s

    def _ttft_s(self, query: RouteQuery, load: InstanceLoad) -> float:
        return expected_ttft_s(load, query.chain.uncached_tokens(load.hit_blocks), self.decode_stall_s)

    def _less_loaded(self, first: InstanceLoad, second: InstanceLoad) -> tuple[InstanceLoad, InstanceLoad]:
        """Both, the one with less queued work first; without any, the one with less KV memory in use."""
        if self._load(second) < self._load(first):
            return second, first
        return first, second

    def _load(self, load: InstanceLoad) -> tuple[float, int]:
        return queueing_s(load, self.decode_stall_s), load.context_tokens


def pair_of(query: RouteQuery, view: ClusterView, max_key_blocks: int) -> tuple[str, ...]:
    """The candidate pair of the request's hash key, less those that are excluded; two others if both are.

    Raises:
        NoInstanceError: no ready instance is left for this request.
    """
    pair = view.rings.pair(view.tree.key(query.chain, max_key_blocks))
    if not query.excluded:
        if not pair:
            raise NoInstanceError("no instance is ready")
        return pair
    left = tuple(instance_id for instance_id in pair if instance_id not in query.excluded)
    return left or _beyond(pair, query.excluded, view.ready)


def _beyond(pair: tuple[str, ...], excluded: frozenset[str], ready: tuple[str, ...]) -> tuple[str, ...]:
    """Two more instances for a request whose whole pair is excluded: the next in id order after it."""
    start = bisect_right(ready, pair[-1]) if pair else 0
    left: list[str] = []
    for offset in range(len(ready)):
        instance_id = ready[(start + offset) % len(ready)]
        if instance_id not in excluded:
            left.append(instance_id)
            if len(left) == PAIR:
                break
    if not left:
        raise NoInstanceError("every ready instance is excluded")
    return tuple(left)
