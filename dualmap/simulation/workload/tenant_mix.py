"""Traffic of several tenants at once: each with a trace and a rate of its own, merged into one trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import merge

from dualmap.scheduling.tenants.tenant import Tenant
from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class TenantTraffic:
    """The traffic of one tenant."""

    tenant: Tenant
    source: TraceSource
    rate_per_s: float
    priority: str = ""
    """The priority class that its requests ask for; empty: none."""


@dataclass(frozen=True, slots=True)
class TenantMix:
    """The traffic of all tenants for a time. Takes the place of a trace in a job."""

    traffic: tuple[TenantTraffic, ...]
    seconds: float

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(each.tenant for each in self.traffic)

    @property
    def sources(self) -> tuple[str, ...]:
        """The files and generators that it comes from."""
        return tuple(each.source.source for each in self.traffic)

    def load(self, rate_per_s: float | None = None) -> Trace:
        """The merged trace, by order of arrival. Raises TraceError."""
        traces = [each.source.load() for each in self.traffic]
        sent = [_sent(each, trace, self.seconds) for each, trace in zip(self.traffic, traces, strict=True)]
        if len({trace.block_tokens for trace in traces}) > 1:
            raise TraceError("tenants", None, "have traces of different block sizes: give them one, see --block-tokens")
        trace = Trace("+".join(each.tenant.name for each in self.traffic), traces[0].block_tokens, tuple(_merged(sent)))
        return trace if rate_per_s is None else trace.at_rate(rate_per_s)

    def alone(self, name: str) -> TenantMix:
        """The traffic of one tenant."""
        return replace(self, traffic=tuple(each for each in self.traffic if each.tenant.name == name))


def _sent(traffic: TenantTraffic, trace: Trace, seconds: float) -> list[TraceRequest]:
    """The requests that a tenant sends in this time: those of its trace, at its rate."""
    trace = trace.at_rate(traffic.rate_per_s)
    count = math.ceil(traffic.rate_per_s * seconds)
    if len(trace.requests) < count:
        raise TraceError(
            trace.name, None,
            f"has {len(trace.requests)} requests; {traffic.tenant.name} sends {count} in {seconds:g} s:"
            " take less time, or a longer trace",
        )  # fmt: skip
    name = traffic.tenant.name
    return [
        replace(
            each,
            tenant=name,
            priority=traffic.priority or each.priority,
            session=each.session and f"{name}/{each.session}",
            after=tuple(f"{name}/{session}" for session in each.after),
        )
        for each in trace.requests
        if each.arrival_s < seconds
    ]


def _merged(sent: Sequence[Sequence[TraceRequest]]) -> Iterable[TraceRequest]:
    """The requests of all, whose prefixes differ."""
    first_ids, next_id = [], 0
    for requests in sent:
        first_ids.append(next_id)
        next_id += 1 + max((block for each in requests for block in each.hash_ids), default=0)
    own = [
        [replace(each, hash_ids=tuple([block + first_id for block in each.hash_ids])) for each in requests]
        for requests, first_id in zip(sent, first_ids, strict=True)
    ]
    return merge(*own, key=lambda each: each.arrival_s)
