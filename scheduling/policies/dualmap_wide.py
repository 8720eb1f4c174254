"""DualMap with a wider look: the pair, and past it whoever holds the prefix or has the least to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from scheduling.decision import Decision, Horizon, Reason, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.policies.choice import Cost, decide, usable
from scheduling.policies.pair import PAIR, pair_of
from scheduling.settings import DualMapWideSettings
from scheduling.ttft import learned_ttft_s, remaining_queueing_s, ttft_features
from scheduling.ttft_model import TtftFeatures
from scheduling.view import ClusterView


@dataclass(frozen=True)
class DualMapWide:
    """The least ``on-time work ahead + recompute_weight * own recompute``, over a handful of instances.

    Builds on DualMap (ICLR 2026): the rings still say where a prefix belongs. Three things differ, each for a
    measured reason (``docs/scheduling.md``). A recomputed token delays everybody queued behind it, so it weighs
    several times its own seconds, though less than an expected miss of the SLO. Work that has stepped behind its
    deadline weighs little, since new requests overtake it: otherwise a long tail of late work would hide the cache.
    And when the pair is busy, the instances that were last given the prefix and the least loaded ones are asked as
    well: few names, whatever the size of the fleet, and the prefix is found again wherever it went.

    Held requests stay where they are unless ``settings.rebalance`` says otherwise: near saturation the moves of the
    paper's rebalancing cost more cache than they win time, once late requests step behind anyway.
    """

    name: str
    max_key_blocks: int
    decode_stall_s: float
    settings: DualMapWideSettings = field(default_factory=DualMapWideSettings)
    looks_beyond: ClassVar[bool] = True

    @property
    def rebalances(self) -> bool:
        return self.settings.rebalance

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        return pair_of(query, view, self.max_key_blocks)

    def beyond(self, query: RouteQuery, loads: Mapping[str, InstanceLoad], horizon: Horizon) -> tuple[str, ...]:
        """Those that could still be cheaper than the best candidate, judged by what the horizon tells of them."""
        left = usable(query, loads)
        deepest = max([horizon.holder_blocks, *[load.hit_blocks for load in left]])
        for load in left:
            if load.pending_tokens == 0 and load.hit_blocks == deepest:
                return ()  # idle, and nobody is known to hold more
        costs_s = [self._cost_s(query, load) for load in left]
        limit_s = min(costs_s)
        best = left[costs_s.index(limit_s)]
        recompute_s = self._recompute_s(query, best.prefill_tokens_per_s, deepest)
        if recompute_s >= limit_s:
            return ()
        lightest = [name for name, queueing_s in horizon.lightest if queueing_s + recompute_s < limit_s]
        names = dict.fromkeys((*horizon.holders, *lightest))
        return tuple(name for name in names if name not in loads and name not in query.excluded)

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        ranked = sorted(usable(query, loads), key=lambda load: self._rank(query, load))
        chosen, other = ranked[0], ranked[1] if len(ranked) > 1 else None
        ttft_s = self._ttft_s(query, chosen)
        return decide(
            query,
            chosen,
            other,
            self._reason(query, loads, chosen),
            self.decode_stall_s,
            ttft_s=ttft_s,
            features=self._features(query, chosen),
            overloaded=self.rebalances and other is not None and ttft_s > query.slo_s,
        )

    def _rank(self, query: RouteQuery, load: InstanceLoad) -> Cost:
        return self._cost_s(query, load), load.kv_usage

    def _cost_s(self, query: RouteQuery, load: InstanceLoad) -> float:
        settings, tokens_per_s = self.settings, load.prefill_tokens_per_s
        uncached_tokens = query.chain.uncached_tokens(load.hit_blocks)
        queueing_s = remaining_queueing_s(load, self.decode_stall_s)
        late_s = settings.late_weight * load.late_tokens / tokens_per_s
        recompute_s = settings.recompute_weight * uncached_tokens / tokens_per_s
        missed = self._ttft_s(query, load) > query.slo_s
        return queueing_s + late_s + recompute_s + (settings.miss_penalty * query.slo_s if missed else 0.0)

    def _ttft_s(self, query: RouteQuery, load: InstanceLoad) -> float:
        uncached_tokens = query.chain.uncached_tokens(load.hit_blocks)
        cached_tokens = query.chain.prompt_tokens - uncached_tokens
        return learned_ttft_s(load, uncached_tokens, cached_tokens, self.decode_stall_s)

    def _features(self, query: RouteQuery, load: InstanceLoad) -> TtftFeatures:
        uncached_tokens = query.chain.uncached_tokens(load.hit_blocks)
        cached_tokens = query.chain.prompt_tokens - uncached_tokens
        return ttft_features(load, uncached_tokens, cached_tokens, self.decode_stall_s)

    def _recompute_s(self, query: RouteQuery, tokens_per_s: float, hit_blocks: int) -> float:
        return self.settings.recompute_weight * query.chain.uncached_tokens(hit_blocks) / tokens_per_s

    def _reason(self, query: RouteQuery, loads: Mapping[str, InstanceLoad], chosen: InstanceLoad) -> Reason:
        """Candidates come first in ``loads``; whoever else was asked is from beyond the pair."""
        if chosen.instance_id not in [*loads][:PAIR]:
            return Reason.BEYOND_PAIR
        best_hit = max(load.hit_blocks for load in loads.values())
        return Reason.CACHE if chosen.hit_blocks == best_hit > 0 else Reason.COST
