"""The parts of the data plane of one replica, in one place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dualmap.router.answers.kept_stream import KeptBudget
from dualmap.router.http.body_budget import BodyBudget
from dualmap.router.http.cors import CorsRule
from dualmap.router.http.deadlines import DeadlineChecks
from dualmap.router.http.long_bodies import LongBodies
from dualmap.router.http.port_checks import PortChecks
from dualmap.router.http.shadow import Shadows
from dualmap.router.http.short_bodies import ShortBodies
from dualmap.router.http.transfers import Transfers
from dualmap.router.http.upstream_pool import UpstreamPool
from dualmap.router.http.usage_requests import UsageRequests
from dualmap.router.relay.relay import NATIVE, Relay
from dualmap.router.requests.intake import Intake
from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.router.telemetry.trace_context import TraceContexts
from dualmap.router.tenants.cache_salts import CacheSalts
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.runtime.trust import InstanceTrust

_LONGEST_SWEEP_S = 0.5
MAX_IDLE_CONNECTIONS = 256
"""Idle connections that are kept for each instance."""
UPSTREAM_IDLE_S = 4.0
"""Below the five seconds after which vLLM closes an idle connection."""


MOST_KEPT_BYTES = 256 << 20
KEPT_PART = 8
"""Streams that may have to go on elsewhere are kept in at most this part of the memory."""


def _never() -> bool:
    return False


@dataclass(kw_only=True, frozen=True, slots=True)
class DataPlane:
    """Resources that the connections of a replica share. Made by ``build_data_plane``, closed by ``close``."""

    settings: RouterSettings
    intake: Intake
    upstreams: UpstreamPool
    transfers: Transfers
    port_checks: PortChecks
    deadlines: DeadlineChecks
    bodies: BodyBudget
    short_bodies: ShortBodies
    long_bodies: LongBodies
    tenants: TenantDirectory
    """Who may send requests."""
    cache_salts: CacheSalts | None
    """Salts of tenants that share no KV cache; None: all share it."""
    usage_requests: UsageRequests
    kept: KeptBudget
    """Memory for streams that may have to go on elsewhere."""
    relay: Relay | None
    """None: all bytes pass the interpreter."""
    shadows: Shadows
    metrics: RouterMetrics
    cors: CorsRule | None
    """None: pages of other origins may read nothing."""
    draining: Callable[[], bool]
    """Whether the replica drains: answers close their connections then."""
    traces: TraceContexts | None
    """None: the replica does not trace, and passes ``traceparent`` on as it came."""
    upstream_authorization: bytes | None
    """``Authorization`` sent to instances; None: the client's, as long as the router checks no key itself."""

    def close(self) -> None:
        """Close idle connections to instances and stop the timer; call after the server has shut down."""
        if self.relay is not None:
            self.relay.close()
        self.shadows.close()
        self.transfers.close()
        self.port_checks.close()
        self.upstreams.close()
        self.deadlines.close()


def build_data_plane(
    settings: RouterSettings,
    intake: Intake,
    *,
    tenants: TenantDirectory | None = None,
    trust: InstanceTrust | None = None,
    metrics: RouterMetrics | None = None,
    draining: Callable[[], bool] = _never,
    memory_bytes: int = 2 << 30,
) -> DataPlane:
    """The data plane over a life cycle, in a process that may use this much memory. Touches no event loop yet."""
    shortest_s = min(
        settings.client_timeout_s,
        settings.keep_alive_s,
        UPSTREAM_IDLE_S,
        settings.first_byte_timeout_s,
        settings.chunk_timeout_s,
        settings.total_timeout_s,
    )
    deadlines = DeadlineChecks(min(_LONGEST_SWEEP_S, shortest_s / 4))
    upstream_key, cache_secret = settings.upstream_api_key, settings.tenant_cache_secret
    if tenants is None:
        tenants = TenantDirectory(key.get_secret_value() for key in settings.api_keys)
    authorization = f"Bearer {upstream_key.get_secret_value()}".encode() if upstream_key is not None else None
    trust = trust or InstanceTrust()
    upstreams = UpstreamPool(
        deadlines,
        connect_timeout_s=settings.connect_timeout_s,
        idle_s=UPSTREAM_IDLE_S,
        max_idle=MAX_IDLE_CONNECTIONS,
        trust=trust,
    )
    bodies = BodyBudget(settings.max_buffered_body_bytes, own_bytes=settings.max_body_bytes)
    metrics = metrics or RouterMetrics(())
    return DataPlane(
        settings=settings,
        intake=intake,
        upstreams=upstreams,
        transfers=Transfers(upstreams),
        port_checks=PortChecks(upstreams),
        deadlines=deadlines,
        bodies=bodies,
        short_bodies=ShortBodies(trusts_transfers=settings.trust_transfers),
        long_bodies=LongBodies(bodies, trusts_transfers=settings.trust_transfers),
        usage_requests=UsageRequests(time.monotonic),
        kept=KeptBudget(min(MOST_KEPT_BYTES, memory_bytes // KEPT_PART)),
        relay=Relay(metrics.relayed) if settings.native_relay and NATIVE is not None else None,
        tenants=tenants,
        cache_salts=None if cache_secret is None else CacheSalts(cache_secret.get_secret_value()),
        shadows=Shadows(authorization, trust),
        metrics=metrics,
        cors=CorsRule(settings.cors_origins) if settings.cors_origins else None,
        draining=draining,
        traces=TraceContexts(settings.tracing_share) if settings.tracing_url is not None else None,
        upstream_authorization=authorization,
    )
