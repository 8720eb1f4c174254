"""DualMap with a wider look: the pair, and past it whoever holds the prefix or has the least to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from scheduling.decision import Decision, Horizon, Reason, RouteQuery, SecondLook
from scheduling.instance import InstanceLoad
from scheduling.placement_cost import PlacementCost
from scheduling.policies.choice import decide, usable
from scheduling.policies.pair import pair_of
from scheduling.settings import DualMapWideSettings
from scheduling.ttft import remaining_queueing_s, ttft_features
from scheduling.ttft_model import TtftFeatures, modelled_ttft_s
from scheduling.view import ClusterView


class _Offer(NamedTuple):
    """What one instance would mean for the request."""

    load: InstanceLoad
    features: TtftFeatures
    ttft_s: float
    cost_s: float


@dataclass(frozen=True)
class DualMapWide:
    """The least ``on-time work ahead + recompute_weight * own recompute``, over a handful of instances.

    Builds on DualMap (ICLR 2026): the rings still say where a prefix belongs. Four things differ, each for a
    measured reason (``docs/scheduling.md``). A recomputed token delays everybody queued behind it, so it weighs
    several times its own seconds, and more where it evicts what others would have found (``PlacementCost``). Work
    that has stepped behind its deadline weighs little, since new requests overtake it: otherwise a long tail of late
    work would hide the cache. KV memory in use weighs as well: where prompts are short and answers long, it is decoding
    that instances run out of. And when the pair is busy, the instances that were last given the prefix and the least
    loaded ones are asked as well: few names, whatever the size of the fleet, and the prefix is found again wherever it
    went.

    Held requests stay where they are unless ``settings.rebalance`` says otherwise: near saturation the moves of the
    paper's rebalancing cost more cache than they win time, once late requests step behind anyway.
    """

    name: str
    max_key_blocks: int
    decode_stall_s: float
    cost: PlacementCost
    settings: DualMapWideSettings = field(default_factory=DualMapWideSettings)
    looks_beyond: ClassVar[bool] = True

    @property
    def rebalances(self) -> bool:
        return self.settings.rebalance

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        return pair_of(query, view, self.max_key_blocks)

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        return self._decision(query, loads, self._offers(query, loads))

    def choose_or_look(
        self, query: RouteQuery, loads: Mapping[str, InstanceLoad], horizon: Horizon
    ) -> Decision | SecondLook:
        offers = self._offers(query, loads)
        further = self._further(query, loads, offers, horizon)
        return SecondLook(further) if further else self._decision(query, loads, offers)

    def _offers(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> list[_Offer]:
        """Of those that may be chosen, the best first."""
        return sorted([self._offer(query, load) for load in usable(query, loads)], key=lambda offer: offer.cost_s)

    def _further(
        self, query: RouteQuery, loads: Mapping[str, InstanceLoad], offers: list[_Offer], horizon: Horizon
    ) -> tuple[str, ...]:
        """Those that could still be cheaper than the best candidate, judged by what the horizon tells of them."""
        deepest = max([horizon.holder_blocks, *[offer.load.hit_blocks for offer in offers]])
        for offer in offers:
            if offer.load.pending_tokens == 0 and offer.load.hit_blocks == deepest:
                return ()  # idle, and nobody is known to hold more
        best = offers[0]
        recompute_s = self.cost.recompute_s(best.load, query.chain, deepest)
        if recompute_s >= best.cost_s:
            return ()
        lightest = [name for name, work_s in horizon.lightest if work_s + recompute_s < best.cost_s]
        names = dict.fromkeys((*horizon.holders, *lightest))
        return tuple(name for name in names if name not in loads and name not in query.excluded)

    def _decision(self, query: RouteQuery, loads: Mapping[str, InstanceLoad], offers: list[_Offer]) -> Decision:
        best, *others = offers
        return decide(
            query,
            best.load,
            others[0].load if others else None,
            self._reason(query, loads, best.load),
            self.decode_stall_s,
            ttft_s=best.ttft_s,
            features=best.features,
            overloaded=self.rebalances and bool(others) and best.ttft_s > query.slo_s,
        )

    def _offer(self, query: RouteQuery, load: InstanceLoad) -> _Offer:
        settings = self.settings
        uncached_tokens = query.chain.uncached_tokens(load.hit_blocks)
        queueing_s = remaining_queueing_s(load, self.decode_stall_s)
        features = ttft_features(load, queueing_s, uncached_tokens, query.chain.prompt_tokens - uncached_tokens)
        ttft_s = modelled_ttft_s(load.ttft_weights, features)
        behind_s = settings.late_weight * load.behind_tokens / load.prefill_tokens_per_s
        missed_s = settings.miss_penalty * query.slo_s if ttft_s > query.slo_s else 0.0
        cost_s = queueing_s + behind_s + self.cost.least_s(load, query.chain, load.hit_blocks) + missed_s
        return _Offer(load, features, ttft_s, cost_s)

    def _reason(self, query: RouteQuery, loads: Mapping[str, InstanceLoad], chosen: InstanceLoad) -> Reason:
        if chosen.instance_id not in query.pair:
            return Reason.BEYOND_PAIR
        best_hit = max(load.hit_blocks for load in loads.values())
        return Reason.CACHE if chosen.hit_blocks == best_hit > 0 else Reason.COST
