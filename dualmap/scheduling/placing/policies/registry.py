"""The one table from a policy's configured name to the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dualmap.scheduling.placing.decision import Policy
from dualmap.scheduling.placing.policies.cache_affinity import CacheAffinity
from dualmap.scheduling.placing.policies.dualmap import DualMap
from dualmap.scheduling.placing.policies.dualmap_cache_affinity import DualMapCacheAffinity
from dualmap.scheduling.placing.policies.dualmap_least_cost import DualMapLeastCost, LeastCostOptions
from dualmap.scheduling.placing.policies.dualmap_least_loaded import DualMapLeastLoaded
from dualmap.scheduling.placing.policies.dualmap_min_ttft import DualMapMinTtft
from dualmap.scheduling.placing.policies.dynamo import VLLM_KV_AWARE, Dynamo, DynamoOptions
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.placing.policies.least_loaded import LeastLoaded
from dualmap.scheduling.placing.policies.llm_d import LlmD, LlmDOptions
from dualmap.scheduling.placing.policies.llm_d_latency import LlmDLatency, LlmDLatencyOptions
from dualmap.scheduling.placing.policies.min_ttft import MinTtft
from dualmap.scheduling.placing.policies.options import PolicyOptions
from dualmap.scheduling.placing.policies.pair import PairPolicy
from dualmap.scheduling.placing.policies.preble import Preble, PrebleOptions
from dualmap.scheduling.placing.policies.round_robin import RoundRobin
from dualmap.scheduling.placing.policies.sglang import Sglang, SglangOptions
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.settings import OWN_POLICIES, Order, SchedulingSettings

Builder = Callable[..., Policy]
"""Builder of a policy: called with the name under which it is configured and the settings, and with the entries of
``policy_options`` by name. It raises ValueError, or TypeError as any call does, where it cannot take these."""


class _NoOptions(PolicyOptions):
    """The parameters of a policy that has none."""


@dataclass(frozen=True)
class _BuiltIn:
    """The builder of a policy of the product."""

    build: Callable[[Any, SchedulingSettings, Any], Policy]
    options: type[PolicyOptions] = _NoOptions

    def __call__(self, name: str, settings: SchedulingSettings, **options: Any) -> Policy:
        try:
            return self.build(name, settings, self.options.model_validate(options))
        except ValidationError as error:
            raise ValueError(self._wrong(name, error.errors()[0])) from None

    def _wrong(self, name: str, detail: Mapping[str, Any]) -> str:
        option = ".".join(map(str, detail["loc"]))
        if detail["type"] == "extra_forbidden":
            known = ", ".join(self.options.model_fields)
            return f"policy {name} has no option {option}" + (f"; it has {known}" if known else ", nor any other")
        return f"{option}: {detail['msg']}"


def _in_pair(policy: type[PairPolicy]) -> _BuiltIn:
    return _BuiltIn(lambda name, settings, _: policy(name, settings.decode_stall_s))


def _dualmap(*, rebalances: bool) -> _BuiltIn:
    return _BuiltIn(lambda name, settings, _: DualMap(name, settings.decode_stall_s, rebalances))


def _in_fleet(policy: type[FleetPolicy]) -> _BuiltIn:
    return _BuiltIn(lambda name, settings, _: policy(name, settings.decode_stall_s))


def _peer(policy: Callable[..., FleetPolicy], options: type[PolicyOptions]) -> _BuiltIn:
    return _BuiltIn(lambda name, settings, given: policy(name, settings.decode_stall_s, options=given), options)


_BUILT_IN: dict[str, _BuiltIn] = {
    "dualmap": _dualmap(rebalances=True),
    "dualmap-cache-affinity": _in_pair(DualMapCacheAffinity),
    "dualmap-least-loaded": _in_pair(DualMapLeastLoaded),
    "dualmap-min-ttft": _in_pair(DualMapMinTtft),
    "dualmap-no-rebalance": _dualmap(rebalances=False),
    "dualmap-least-cost": _BuiltIn(
        lambda name, settings, options: DualMapLeastCost(settings.kv_weight_s, name, options),
        LeastCostOptions,
    ),
    "cache-affinity": _in_pair(CacheAffinity),
    "round-robin": _in_fleet(RoundRobin),
    "least-loaded": _in_fleet(LeastLoaded),
    "min-ttft": _in_fleet(MinTtft),
    "preble": _peer(Preble, PrebleOptions),
    "dynamo": _peer(Dynamo, DynamoOptions),
    "vllm-kv-aware": _BuiltIn(lambda name, settings, _: Dynamo(name, settings.decode_stall_s, options=VLLM_KV_AWARE)),
    "sglang": _peer(Sglang, SglangOptions),
    "llm-d": _peer(LlmD, LlmDOptions),
    "llm-d-latency": _peer(LlmDLatency, LlmDLatencyOptions),
}
BUILDERS: dict[str, Builder] = {**_BUILT_IN}
OPTIONS: dict[str, type[PolicyOptions]] = {
    name: built.options for name, built in _BUILT_IN.items() if built.options.model_fields
}
"""The parameters of the policies of the product that have some."""


def add_policy(name: str, builder: Builder) -> None:
    """Make a policy of another package known, under a name that no other has; before settings that name it are read.

    Raises:
        ValueError: the name is taken.
    """
    if name in BUILDERS:
        raise ValueError(f"there is a policy {name!r} already")
    BUILDERS[name] = builder
    OWN_POLICIES.add(name)


def own_builders() -> dict[str, Builder]:
    """The builders of the policies that other packages added, by name."""
    return {name: BUILDERS[name] for name in BUILDERS if name in OWN_POLICIES}


def granting_order(settings: SchedulingSettings) -> Order:
    """The setting ``queue_order`` with ``auto`` resolved: the order that the policy is made for."""
    return build_policy(settings).queue_order if settings.queue_order == "auto" else settings.queue_order


def queue_order_of(settings: SchedulingSettings) -> QueueOrder:
    """The order in which held requests are granted, as settings and policy have it."""
    return QueueOrder.of(settings, granting_order(settings))


def build_policy(settings: SchedulingSettings) -> Policy:
    """The configured policy.

    Raises:
        ValueError: it cannot take the ``policy_options``; the message names them.
    """
    try:
        return BUILDERS[settings.policy](settings.policy, settings, **settings.policy_options)
    except (TypeError, ValueError) as error:
        if not settings.policy_options:
            raise
        raise ValueError(f"scheduling.policy_options: {error}") from error
