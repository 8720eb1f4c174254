"""The question put to a policy and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from scheduling.chain import Chain
from scheduling.instance import InstanceLoad
from scheduling.ttft_model import TtftFeatures
from scheduling.values import value
from scheduling.view import ClusterView


@value
class RouteQuery:
    """One request to place."""

    chain: Chain
    slo_s: float
    """TTFT SLO of this request."""
    sequence: int = 0
    """A number that grows by one with every request (round robin counts with it)."""
    expected_output_tokens: int = 256
    excluded: frozenset[str] = frozenset()
    """Instances it must not go to: it failed there, or they are full, gone or behind an open breaker."""
    pair: tuple[str, ...] = ()
    """Its candidates as they would be if nothing were excluded; whoever else is chosen is beyond the pair."""


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
    """Where a request goes, where else it could go, and what the policy expected when it said so."""

    instance_id: str
    hit_blocks: int
    uncached_tokens: int
    expected_ttft_s: float
    reason: Reason
    alternative_id: str | None = None
    """The other candidate: a held request may migrate there, a failed one is retried there."""
    alternative_uncached_tokens: int = 0
    overloaded: bool = False
    """Both candidates were past the SLO: the rebalancer is asked to look at the instance now."""
    seen_pending_tokens: int | None = None
    """Pending tokens the decision relied on; the reservation re-checks them. None: it did not look."""
    ttft_features: TtftFeatures | None = None
    """What the expected TTFT was learned from, for the instance's model to learn more. None: it was not."""


@value
class Horizon:
    """Names beyond the pair, which the store knows at a cost that does not grow with the fleet."""

    holders: tuple[str, ...] = ()
    """Ready instances that were last given the chain's deepest known prefix, most recent first."""
    holder_blocks: int = 0
    """Length of that prefix in blocks."""
    lightest: tuple[tuple[str, float], ...] = ()
    """The ready instances with the least to do, least first: the queueing time of their on-time work and what their KV
    memory in use counts for (``SchedulingSettings.kv_weight_s``), in seconds."""


@value
class SecondLook:
    """Not a decision yet: instances whose loads the policy wants to see as well."""

    instance_ids: tuple[str, ...]


class Policy(Protocol):
    """A scheduling policy: pure functions. Implementations hold settings, never state."""

    @property
    def name(self) -> str:
        """As the configuration spells it."""

    @property
    def rebalances(self) -> bool:
        """Whether held requests may migrate to their other candidate: the rebalancer rests if not."""

    @property
    def looks_beyond(self) -> bool:
        """Whether the candidates are observed with a Horizon and ``choose_or_look`` is asked, not ``choose``."""

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        """The instances whose loads the policy wants to see, most preferred first; no network.

        Raises:
            NoInstanceError: no ready instance is left for this request.
        """

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        """Decide from the loads of the candidates (in their order; those gone meanwhile are missing).

        Raises:
            NoInstanceError: ``loads`` holds no ready instance.
        """

    def choose_or_look(
        self, query: RouteQuery, loads: Mapping[str, InstanceLoad], horizon: Horizon
    ) -> Decision | SecondLook:
        """``choose``, unless others are worth a second look first: seldom, few, and none of ``loads``.

        ``choose`` then gets both looks' loads.

        Raises:
            NoInstanceError: ``loads`` holds no ready instance.
        """
