"""Builders of the scheduling core's values, with figures that are easy to count with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import features_of
from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.placing.policies import build_policy
from dualmap.scheduling.placing.policies.choice import usable
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.settings import DECODE_STALL_S, SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.view import ClusterView


@pytest.fixture(scope="session")
def load() -> Callable[..., InstanceLoad]:
    """A ready instance that prefills 1000 tokens a second: pending tokens are milliseconds of queueing."""

    def build(instance_id: str, **figures: Any) -> InstanceLoad:
        defaults = {"state": InstanceState.READY, "prefill_tokens_per_s": 1000.0}
        return InstanceLoad(instance_id, **{**defaults, **figures})

    return build


@pytest.fixture(scope="session")
def query() -> Callable[..., RouteQuery]:
    """A prompt of 10 blocks of 100 tokens: one more block hit saves 100 ms."""

    def build(first_hash: int = 1, *, blocks: int = 10, slo_s: float = 5.0, **figures: Any) -> RouteQuery:
        hashes = tuple(range(first_hash, first_hash + blocks))
        return RouteQuery(Chain(hashes, 100, blocks * 100), slo_s, **figures)

    return build


@pytest.fixture(scope="session")
def view() -> Callable[..., ClusterView]:
    def build(ids: Iterable[str], hot: dict[int, int] | None = None) -> ClusterView:
        instances = {name: InstanceSpec(name, f"http://{name}", state=InstanceState.READY) for name in ids}
        return ClusterView.build(
            epoch=1, tree_version=1, instances=instances, tree=HotnessTree(hot or {}), virtual_nodes=64
        )

    return build


@pytest.fixture(scope="session")
def policy() -> Callable[..., Policy]:
    def build(name: str, **settings: Any) -> Policy:
        return build_policy(SchedulingSettings.model_validate({"policy": name, **settings}))

    return build


@pytest.fixture(scope="session")
def choose(policy: Callable[..., Policy], query: Callable[..., RouteQuery]) -> Callable[..., Decision]:
    """What the named policy decides, given these loads in this order; of one that weighs, what its weights say."""

    def build(name: str, *loads: InstanceLoad, ask: RouteQuery | None = None, **settings: Any) -> Decision:
        made, asked, given = policy(name, **settings), ask or query(), {load.instance_id: load for load in loads}
        return weighed(made, asked, given, DECODE_STALL_S) if made.weighs else made.choose(asked, given)

    return build


def weighed(policy: Policy, query: RouteQuery, loads: Mapping[str, InstanceLoad], stall_from_s: float) -> Decision:
    """The decision that a store and a search make of the weights."""
    weights = policy.weights(query, Learned())
    features = {
        load.instance_id: features_of(load, query.chain, stall_from_s, query.key.hot_tokens if query.key else 0)
        for load in usable(query, loads)
    }
    chosen, *others = sorted(features, key=lambda name: weights.cost_of(features[name], query.slo_s))
    other, hits = loads[others[0]] if others else None, {name: load.hit_blocks for name, load in loads.items()}
    return Decision(
        chosen,
        loads[chosen].hit_blocks,
        query.chain.uncached_tokens(loads[chosen].hit_blocks),
        weights.ttft.of(features[chosen]),
        policy.reason(query, hits, loads, chosen, other.instance_id) if other is not None else Reason.ONLY_ONE,
        other.instance_id if other is not None else None,
        query.chain.uncached_tokens(other.hit_blocks) if other is not None else 0,
    )
