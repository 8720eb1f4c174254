"""Builders of the scheduling core's values, with figures that are easy to reckon with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from scheduling.chain import Chain
from scheduling.decision import Decision, Policy, RouteQuery
from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.policies import build_policy
from scheduling.settings import SchedulingSettings
from scheduling.view import ClusterView


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
    """What the named policy decides, given these loads in this order."""

    def build(name: str, *loads: InstanceLoad, ask: RouteQuery | None = None, **settings: Any) -> Decision:
        return policy(name, **settings).choose(ask or query(), {each.instance_id: each for each in loads})

    return build
