"""The question put to a policy and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from enum import StrEnum
from typing import Protocol

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Weights
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.settings import Order
from dualmap.scheduling.state.hotness import HashKey
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.values import value


@value
class RouteQuery:
    """One request to place."""

    chain: Chain
    slo_s: float
    """TTFT SLO of this request."""
    sequence: int = 0
    """A number that grows by one with every observation (round robin counts with it)."""
    expected_output_tokens: int = 256
    excluded: frozenset[str] = frozenset()
    """Instances it must not go to: it failed there, or they are full, gone or behind an open breaker."""
    pair: tuple[str, ...] = ()
    """The candidates of the request as they would be if nothing were excluded; any other instance is beyond the
    pair."""
    key: HashKey | None = None
    """The hash key, by the view that the candidates are of; None: it has not been looked for."""


class Reason(StrEnum):
    """Why a policy took the instance; a label in metrics and in explanations."""

    ONLY_ONE = "only_one"
    CACHE = "cache"
    SLO = "slo"
    BALANCE = "balance"
    ROTATION = "rotation"
    COST = "cost"
    BOTH_OVERLOADED = "both_overloaded"
    BEYOND_PAIR = "beyond_pair"


@value
class Decision:
    """The choice for a request: where it goes, where else it could go, and what was expected when it was placed."""

    instance_id: str
    hit_blocks: int
    uncached_tokens: int
    expected_ttft_s: float
    reason: Reason
    alternative_id: str | None = None
    """The next best: a held request may migrate there, a failed one is retried there."""
    alternative_uncached_tokens: int = 0
    _: KW_ONLY
    seen_pending_tokens: int | None = None
    """Pending tokens the decision relied on; the reservation checks them again. None: nothing can be stale."""
    source: str | None = None
    """Of a policy that chooses: the instance that the chosen one pulls from where its weights have it pay."""


class Policy(Protocol):
    """A scheduling policy: pure functions. Implementations hold settings, never state.

    One that ``weighs`` gives weights, and the store takes the least weighted sum as it reserves. Any other observes
    its candidates, chooses, and reserves then.
    """

    @property
    def name(self) -> str:
        """The name of the policy, as the configuration spells it."""

    @property
    def rebalances(self) -> bool:
        """Whether held requests may migrate to their next best instance. If not, no rebalancer runs."""

    @property
    def holds(self) -> bool:
        """Whether requests for which an instance has no room wait in the fleet, so that they can migrate: DualMap's own
        idea. Any policy holds by deadline, see ``holds``."""

    @property
    def queue_order(self) -> Order:
        """The order that it is made for: what ``queue_order: auto`` means."""

    @property
    def weighs(self) -> bool:
        """Whether ``weights`` decides, and ``choose`` is never called."""

    @property
    def beyond_from_s(self) -> float | None:
        """The instance that holds the prefix, and the least loaded, are weighed beside the candidates where they could
        cost so much less, in seconds; None: they are not weighed."""

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        """The instances to weigh or to observe, most preferred first; no network.

        Raises:
            NoInstanceError: no ready instance is left for this request.
        """

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        """The weights by which the store compares placements. A policy that does not weigh only gives the expected
        TTFT."""

    def reason(
        self, query: RouteQuery, hits: Mapping[str, int], loads: Mapping[str, InstanceLoad], chosen: str, other: str
    ) -> Reason:
        """Why the instance of least cost was taken, and not the ``other`` one that costs the least beside it. Only
        policies that weigh are called. ``hits``, in blocks, are at hand; a load is made when it is first read."""

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        """Decide from the loads of the candidates (in their order; those gone meanwhile are missing).

        Raises:
            NoInstanceError: ``loads`` holds no ready instance.
        """


def holds(policy: Policy, order: QueueOrder) -> bool:
    """Whether requests wait in the fleet for the dispatch window of their instance: to be reordered, or to be moved.
    Where neither happens, waiting there is a loss: steps of the engine that its own queue would fill are half empty."""
    return order.by_deadline or policy.holds
