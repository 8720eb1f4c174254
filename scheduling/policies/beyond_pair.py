"""Base of the policies that weigh the pair, and past it the instance that holds the prefix and the least loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from scheduling.decision import Decision, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.policies.pair import pair_of
from scheduling.view import ClusterView


@dataclass(frozen=True)
class BeyondPair:
    """A subclass says what an instance costs, and why one was taken."""

    max_key_blocks: int
    kv_weight_s: float
    rebalances: ClassVar[bool] = False
    holds: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    beyond_from_s: ClassVar[float] = 0.1

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        return pair_of(query, view, self.max_key_blocks)

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        raise NotImplementedError("the policy weighs: the store chooses by its weights")
