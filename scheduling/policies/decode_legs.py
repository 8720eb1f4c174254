"""Where decode legs go, under every policy: to the pair of the decode-capable instances, or to the least decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from scheduling.decision import Decision, Reason, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.learned import Learned
from scheduling.policies.pair import pair_of
from scheduling.split import SplitRule
from scheduling.view import ClusterView
from scheduling.weights import Weights


@dataclass(frozen=True)
class DecodeLegs:
    """The least KV memory and sequences in use, and transfer. The pair of the decode-capable instances comes first, so
    that the next turn of a conversation finds its prefix where the last one was decoded."""

    max_key_blocks: int
    kv_weight_s: float
    rule: SplitRule
    name: ClassVar[str] = "decode-legs"
    rebalances: ClassVar[bool] = False
    holds: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    beyond_from_s: ClassVar[float] = 0.1

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        return pair_of(query, view, self.max_key_blocks)

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return self.rule.decode_weights(self.kv_weight_s)

    def reason(self, query: RouteQuery, loads: Mapping[str, InstanceLoad], chosen: str) -> Reason:
        return Reason.COST if chosen in query.pair else Reason.BEYOND_PAIR

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        raise NotImplementedError("decode legs are weighed: the store chooses by their weights")
