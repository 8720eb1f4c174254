"""Placement of decode legs, under every policy: on the pair of the decode-capable instances, or on the instance that
decodes least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Weights
from dualmap.scheduling.placing.decision import Reason, RouteQuery
from dualmap.scheduling.placing.policies.pair import BeyondPair
from dualmap.scheduling.placing.split import SplitRule
from dualmap.scheduling.state.instance import InstanceLoad


@dataclass(frozen=True)
class DecodeLegs(BeyondPair):
    """The least KV memory and sequences in use, and transfer. The pair of the decode-capable instances comes first, so
    that the next turn of a conversation finds its prefix where the last one was decoded."""

    rule: SplitRule
    name: ClassVar[str] = "decode-legs"

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return self.rule.decode_weights(self.kv_weight_s, learned)

    def reason(
        self, query: RouteQuery, hits: Mapping[str, int], loads: Mapping[str, InstanceLoad], chosen: str, other: str
    ) -> Reason:
        return Reason.COST if chosen in query.pair else Reason.BEYOND_PAIR
