"""The metrics of tenants on one replica, in a bounded number of series."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Final

from dualmap.router.telemetry.instruments import Counter, Instruments
from dualmap.scheduling.request.outcome import Outcome, Usage

OTHER: Final = "_other"
"""The series of all tenants beyond those that have their own. No tenant can have this name."""

End = tuple[str, Outcome, Usage | None]
"""A request that ended: its tenant, the outcome, and the tokens that its instance reported."""
_TENANT: Final = itemgetter(0)
_TENANT_AND_OUTCOME: Final = itemgetter(0, 1)
_KINDS: Final = {
    "prompt": attrgetter("prompt_tokens"),
    "cached": attrgetter("cached_tokens"),
    "output": attrgetter("output_tokens"),
}


class TenantSeries:
    """The counters of one tenant."""

    def __init__(self, metrics: TenantMetrics, tenant: str) -> None:
        self._requests = metrics.requests
        self._tenant = tenant
        self.limited = metrics.limited.labels(tenant)
        self._tokens = [(metrics.tokens.labels(tenant, kind), of) for kind, of in _KINDS.items()]

    def ended(self, outcome: Outcome) -> Counter:
        return self._requests.labels(self._tenant, outcome.value)

    def count_tokens(self, usages: list[Usage]) -> None:
        for counter, tokens_of in self._tokens:
            counter.value += sum(filter(None, map(tokens_of, usages)))


class TenantMetrics:
    """Tenants have series of their own as they come, up to a number of them; the rest share ``OTHER``. One that has its
    own keeps it: a counter that changed its series would seem to start again.

    Ends are kept until they are folded into the counters, as ``instruments.Histogram`` does: a request pays for an
    entry in a list alone.
    """

    def __init__(self, make: Instruments, most: int) -> None:
        self.requests = make.counter(
            "dualmap_tenant_requests", "Requests of tenants by how they ended", "tenant", "outcome"
        )
        self.limited = make.counter(
            "dualmap_tenant_limited_requests", "Requests that a limit of their tenant kept out", "tenant"
        )
        self.tokens = make.counter(
            "dualmap_tenant_tokens", "Tokens of tenants' requests, as instances reported them", "tenant", "kind"
        )
        self.limit_used = make.gauge(
            "dualmap_tenant_limit_used_ratio",
            "Share of a tenant's limit that is used; above 1 it is overdrawn",
            "pool", "tenant", "limit", "of", largest=True,
        )  # fmt: skip
        self._most = most
        self._series: dict[str, TenantSeries] = {}
        self._other: TenantSeries | None = None
        self._ended: list[End] = []
        self.count_end: Callable[[End], None] = self._ended.append
        """Count how a request of a tenant ended."""
        make.fold_before_reading(self.fold)

    def fold(self) -> None:
        """Count the ends that were kept."""
        ended = self._ended
        if not ended:
            return
        for (tenant, outcome), count in Tally(map(_TENANT_AND_OUTCOME, ended)).items():
            self.of(tenant).ended(outcome).value += count
        for tenant, ends in groupby(sorted(ended, key=_TENANT), _TENANT):
            self.of(tenant).count_tokens([*filter(None, map(itemgetter(2), ends))])
        ended.clear()

    def of(self, tenant: str) -> TenantSeries:
        found = self._series.get(tenant)
        if found is not None:
            return found
        if len(self._series) < self._most:
            made = self._series[tenant] = TenantSeries(self, tenant)
            return made
        if self._other is None:
            self._other = TenantSeries(self, OTHER)
        return self._other

    @property
    def named(self) -> list[str]:
        """The tenants that have series of their own."""
        self.fold()
        return [*self._series]
