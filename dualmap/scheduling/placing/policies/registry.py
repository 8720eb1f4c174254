"""The one table from a policy's configured name to the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualmap.scheduling.placing.decision import Policy
from dualmap.scheduling.placing.policies.cache_affinity import CacheAffinity
from dualmap.scheduling.placing.policies.dualmap import DualMap
from dualmap.scheduling.placing.policies.dualmap_cache_affinity import DualMapCacheAffinity
from dualmap.scheduling.placing.policies.dualmap_least_cost import DualMapLeastCost
from dualmap.scheduling.placing.policies.dualmap_least_loaded import DualMapLeastLoaded
from dualmap.scheduling.placing.policies.dualmap_min_ttft import DualMapMinTtft
from dualmap.scheduling.placing.policies.dynamo import VLLM_KV_AWARE, Dynamo
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.placing.policies.least_loaded import LeastLoaded
from dualmap.scheduling.placing.policies.llm_d import LlmD
from dualmap.scheduling.placing.policies.llm_d_latency import LlmDLatency
from dualmap.scheduling.placing.policies.min_ttft import MinTtft
from dualmap.scheduling.placing.policies.pair import PairPolicy
from dualmap.scheduling.placing.policies.preble import Preble
from dualmap.scheduling.placing.policies.round_robin import RoundRobin
from dualmap.scheduling.placing.policies.sglang import Sglang
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.settings import OWN_POLICIES, Order, SchedulingSettings

Builder = Callable[[Any, SchedulingSettings], Policy]
"""Builder of a policy, by the name under which it is configured."""


def _in_pair(policy: type[PairPolicy]) -> Builder:
    return lambda name, settings: policy(name, settings.max_key_blocks, settings.decode_stall_s)


def _dualmap(*, rebalances: bool) -> Builder:
    return lambda name, settings: DualMap(name, settings.max_key_blocks, settings.decode_stall_s, rebalances)


def _in_fleet(policy: type[FleetPolicy]) -> Builder:
    return lambda name, settings: policy(name, settings.decode_stall_s)


BUILDERS: dict[str, Builder] = {
    "dualmap": _dualmap(rebalances=True),
    "dualmap-cache-affinity": _in_pair(DualMapCacheAffinity),
    "dualmap-least-loaded": _in_pair(DualMapLeastLoaded),
    "dualmap-min-ttft": _in_pair(DualMapMinTtft),
    "dualmap-no-rebalance": _dualmap(rebalances=False),
    "dualmap-least-cost": lambda name, settings: DualMapLeastCost(
        settings.max_key_blocks, settings.kv_weight_s, name, settings.least_cost
    ),
    "cache-affinity": _in_pair(CacheAffinity),
    "round-robin": _in_fleet(RoundRobin),
    "least-loaded": _in_fleet(LeastLoaded),
    "min-ttft": _in_fleet(MinTtft),
    "preble": lambda name, settings: Preble(name, settings.decode_stall_s, settings=settings.preble),
    "dynamo": lambda name, settings: Dynamo(name, settings.decode_stall_s, settings=settings.dynamo),
    "vllm-kv-aware": lambda name, settings: Dynamo(name, settings.decode_stall_s, settings=VLLM_KV_AWARE),
    "sglang": lambda name, settings: Sglang(name, settings.decode_stall_s, settings=settings.sglang),
    "llm-d": lambda name, settings: LlmD(name, settings.decode_stall_s, settings=settings.llm_d),
    "llm-d-latency": lambda name, settings: LlmDLatency(name, settings.decode_stall_s, settings=settings.llm_d),
}


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
    """The configured policy."""
    return BUILDERS[settings.policy](settings.policy, settings)
