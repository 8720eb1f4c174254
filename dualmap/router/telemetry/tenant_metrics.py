"""The metrics of tenants on one replica, in a bounded number of series."""

from __future__ import annotations

from typing import Final

from dualmap.router.telemetry.instruments import Counter, Instruments
from dualmap.scheduling.request.outcome import Outcome, Usage

OTHER: Final = "_other"
"""The series of all tenants beyond those that have their own. No tenant can have this name."""


class TenantSeries:
    """The counters of one tenant."""

    def __init__(self, metrics: TenantMetrics, tenant: str) -> None:
        self._requests = metrics.requests
        self._tenant = tenant
        self.outcomes: dict[Outcome, Counter] = {}
        self.limited = metrics.limited.labels(tenant)
        self.prompt, self.cached, self.output = [
            metrics.tokens.labels(tenant, kind) for kind in ("prompt", "cached", "output")
        ]

    def count_end(self, outcome: Outcome, usage: Usage | None) -> None:
        counter = self.outcomes.get(outcome)
        if counter is None:
            counter = self.outcomes[outcome] = self._requests.labels(self._tenant, outcome.value)
        counter.value += 1
        if usage is None:
            return
        prompt_tokens, cached_tokens, output_tokens = usage.prompt_tokens, usage.cached_tokens, usage.output_tokens
        if prompt_tokens:
            self.prompt.value += prompt_tokens
        if cached_tokens:
            self.cached.value += cached_tokens
        if output_tokens:
            self.output.value += output_tokens


class TenantMetrics:
    """Tenants have series of their own as they come, up to a number of them; the rest share ``OTHER``. One that has its
    own keeps it: a counter that changed its series would seem to start again."""

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
        return [*self._series]
