"""One replica, put together: its pools, its life cycle, its background work. Everything but the network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dualmap.router.errors import InvalidApiKeyError
from dualmap.router.peer_client import PeerClient
from dualmap.router.pool.adapter_loads import AdapterLoads
from dualmap.router.pool.contexts_ahead import ContextsAhead
from dualmap.router.pool.failover import FailoverPool
from dualmap.router.pool.grant_waiters import GrantWaiters
from dualmap.router.pool.instance_loss import InstanceLossNotifier
from dualmap.router.pool.instance_waiters import InstanceWaiters
from dualmap.router.pool.model_lengths import ModelLengths
from dualmap.router.pool.model_lists import InstanceQueries, ModelLists
from dualmap.router.pool.outbox import Outbox
from dualmap.router.pool.pool_directory import PoolDirectory
from dualmap.router.pool.pool_fleet import PoolFleet
from dualmap.router.pool.queue_planner import QueuePlanner
from dualmap.router.pool.recent_answers import RecentAnswers
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.pool.turn_waiters import TurnWaiters
from dualmap.router.pool.view import ViewKeeper
from dualmap.router.replica.peer_watch import PeerWatch
from dualmap.router.replica.replica import Replica
from dualmap.router.replica.supervision import Supervisor
from dualmap.router.requests.context import LiveRequests, ReplicaContext
from dualmap.router.requests.deadlines import Deadlines
from dualmap.router.requests.explain import DecisionLog, Explanation
from dualmap.router.requests.intake import Intake
from dualmap.router.requests.request_log import RequestLog, open_request_log
from dualmap.router.requests.tracing import SpanExport, open_tracing
from dualmap.router.settings import FLUSH_TIMEOUT_S, LEAVING_S, RouterSettings
from dualmap.router.telemetry.fleet_gauges import FleetGauges, FleetOverviews
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.router.telemetry.port_metrics import PortMetrics
from dualmap.router.telemetry.recording import open_recorder
from dualmap.router.telemetry.trace_context import TraceContext
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.router.tenants.keeper import TenantKeeper
from dualmap.router.tenants.limit_gauges import LimitGauges
from dualmap.router.tenants.signed_tokens import Tokens
from dualmap.router.timers import CallLater
from dualmap.router.tokens import build_tokenizer
from dualmap.runtime.certificates import FollowedFiles
from dualmap.runtime.clock import Clock, RealClock
from dualmap.runtime.engine_adapters import EngineAdapters
from dualmap.runtime.extras import package_version
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import TenantSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.prompts.blocks import BlockRule
from dualmap.scheduling.request.breaker import BreakerRule
from dualmap.scheduling.request.breakers import CircuitBreakers
from dualmap.scheduling.request.evidence import Evidence
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.request.quarantine import Quarantine
from dualmap.scheduling.request.retry_budget import (
    CONTINUATION_SHARE,
    RETRIES_PER_S,
    RETRY_SHARE,
    RetryBudget,
)
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.tenants.budgets import Limit
from dualmap.statestore.memory import wall_clock_ms
from dualmap.statestore.port import ReplicaStore

log = logging.getLogger(__name__)


def make_replica_id() -> str:
    """An id that no other replica has, and that shows where the replica runs."""
    host = "".join(char if char.isalnum() or char in "-_." else "-" for char in socket.gethostname())[:64]
    return f"{host}-{secrets.token_hex(3)}"


class Runtime:
    """The parts of one replica. Build it inside a running event loop; ``start``, serve, ``stop``."""

    def __init__(
        self, settings: RouterSettings, scheduling: SchedulingSettings, store: ReplicaStore,
        pools: Sequence[PoolSettings], *, trust: InstanceTrust | None = None, replica_id: str | None = None,
        clock: Clock | None = None, call_later: CallLater | None = None, info: Mapping[str, str] | None = None,
        now_ms: Callable[[], int] = wall_clock_ms, pairs_legs: bool = False, tenants: Sequence[TenantSettings] = (),
    ) -> None:  # fmt: skip
        """The store is open, and stays the caller's to close. It may go away: the replica then decides alone, by
        ``now_ms``, until it is back. ``pairs_legs``: both legs of a request are placed before it is sent, whatever the
        connector needs."""
        self.trust = trust or InstanceTrust()
        self.certificates: list[FollowedFiles[Any]] = [*self.trust.certificates, *store.certificates]
        """The certificates that this process presents or trusts, for reports."""
        self.warnings: list[str] = []
        """Facts about this replica that an operator has to know, in the form in which they are reported."""
        self.scheduling = scheduling
        clock = clock or RealClock()
        self.tokens = Tokens(settings.jwt, clock, lambda: self.tenant_keeper.now_ms() / 1000) if settings.jwt else None
        self.tenants = TenantDirectory(
            (key.get_secret_value() for key in settings.api_keys),
            tenants,
            needs_key=settings.needs_key,
            tokens=self.tokens,
            gateway=settings.gateway,
        )
        self.context = _context(
            settings,
            [pool.name for pool in pools],
            replica_id=replica_id or settings.replica_id or make_replica_id(),
            clock=clock,
            call_later=call_later or asyncio.get_running_loop().call_later,
        )
        self.tenant_keeper = TenantKeeper(
            store.tenants,
            self.tenants,
            self.context.clock,
            replica_id=self.context.replica_id,
            changed=self._tenants_changed,
        )
        live = self.context.live
        now_s, accepted = self.context.clock.monotonic_s(), lambda: live.accepted
        budgets = _Budgets(
            RetryBudget(RETRY_SHARE, RETRIES_PER_S, now_s, accepted),
            RetryBudget(CONTINUATION_SHARE, RETRIES_PER_S, now_s, accepted, burst=settings.max_requests),
        )
        self.pools: PoolDirectory[ServedPool] = PoolDirectory(
            [
                _served_pool(
                    pool,
                    FailoverPool(
                        store.pool(pool.name),
                        scheduling,
                        measures=self.context.metrics.store_calls,
                        clock=clock,
                        now_ms=now_ms,
                        needs_limits=settings.limits_without_store == "closed",
                    ),
                    scheduling,
                    self.context,
                    budgets,
                    self.trust,
                    pairs_legs,
                )
                for pool in pools
            ]
        )
        for pool in self.pools.pools.values():
            pool.view.on_names = partial(self.pools.learn, pool.settings.name)
        self.model_lengths = ModelLengths(self.context.clock, InstanceQueries(settings.upstream_api_key, self.trust))
        self.intake = Intake(self.pools, self.context, self.tenants, self.model_lengths)
        self.advertised_url = (info or {}).get("ops_url", "")
        """Base URL at which others reach its own port; "" where it is not known."""
        self.context.metaserver.base_url = self.advertised_url
        self.replicas = {
            name: Replica(pool, self.context, {"version": package_version(), **(info or {})})
            for name, pool in self.pools.pools.items()
        }
        self.fleet = FleetOverviews(
            {name: pool.store for name, pool in self.pools.pools.items()}, clock=self.context.clock
        )
        FleetGauges(self.fleet, self.context.metrics.registry)
        self.books = {name: pool.store.usage for name, pool in self.pools.pools.items()}
        self.limit_gauges = LimitGauges(
            self.books, self._limits_shown, self.context.metrics.tenants, self.context.clock
        )
        self.port = (info or {}).get("port", "")
        """Port of the endpoint, which other replicas may share; "" where it is not known."""
        models = {name: pool.settings.model for name, pool in self.pools.pools.items()}
        self.peer_client = PeerClient()
        self.port_metrics = PortMetrics(
            self.context.replica_id, self.context.metrics, self.fleet, models, info or {}, self.peer_client
        )
        self.peer_watch = PeerWatch(self.context.replica_id, self.addresses, self.context.clock, self.peer_client)
        self._supervisor = Supervisor(self.context.clock)
        self._end_listeners = [
            listener
            for listener in (
                open_request_log(settings, self.context.call_later),
                open_tracing(settings, self.context.replica_id),
            )
            if listener is not None
        ]
        self.context.ended = _call_each(self._end_listeners)
        self.joined = False

    async def start(self) -> None:
        """Join every pool and start the background work.

        Raises:
            StoreUnavailableError: the store is out of reach.
        """
        for replica in self.replicas.values():
            await replica.join()
        await self.tenant_keeper.refresh()
        self._supervisor.start("tenants", self.tenant_keeper.run)
        if self.tokens is not None:
            await self.tokens.start()
            self._supervisor.start("token keys", self.tokens.run)
        for name, pool in self.pools.pools.items():
            replica = self.replicas[name]
            self._supervisor.start(f"outbox {name}", pool.outbox.run)
            self._supervisor.start(f"view {name}", pool.view.run)
            pool.store.on_grant(self.context.replica_id, pool.grant_waiters.deliver)
            self._supervisor.start(f"held {name}", pool.grant_waiters.poll)
            pool.store.on_turn(self.context.replica_id, pool.turn_waiters.goes)
            self._supervisor.start(f"turns {name}", pool.turn_waiters.repeat)
            if pool.waiting_room is not None:
                self._supervisor.start(f"waiting {name}", pool.instance_waiters.watch)
            self._supervisor.start(f"lease {name}", replica.keep_lease)
            self._supervisor.start(f"leftovers {name}", replica.reconcile_all)
            if pool.tokenizer is not None:
                self._supervisor.start(f"tokens {name}", pool.tokenizer.run)
        self._supervisor.start("peers", self.peer_watch.run)
        self.joined = True

    def keep_running(self, name: str, job: Callable[[], Awaitable[None]]) -> None:
        """Run an endless job beside its own, until it stops."""
        self._supervisor.start(name, job)

    def _tenants_changed(self) -> None:
        """Keys may have ended: so do their requests, where the settings say so."""
        self.intake.tenants_changed()
        if self.context.settings.revoked_requests == "finish":
            return
        for live in self.context.live:
            caller = live.inference_request.caller
            if caller is not None and not self.tenants.is_known(caller):
                tenant, key = caller.tenant.name, caller.key
                log.warning(
                    "request %s ends: key %s of tenant %s gives no access any more", live.request_id, key, tenant
                )
                live.cut_off(InvalidApiKeyError("the key of this request was revoked while it was served"))

    async def addresses(self) -> dict[str, str]:
        """The operation addresses of all living replicas by their ids, "" of one that advertises none.

        Raises:
            StoreUnavailableError: the store is out of reach.
        """
        found: dict[str, str] = {}
        for pool in self.pools.pools:
            overview = await self.fleet.get(pool)
            for replica in overview.replicas:
                if replica.is_alive(overview.now_ms):
                    found[replica.replica_id] = replica.info.get("ops_url") or found.get(replica.replica_id, "")
        return found

    @property
    def accepts_traffic(self) -> bool:
        return self.joined and not self.context.draining

    @property
    def outbox_releases(self) -> int:
        """Releases that wait for the store."""
        return sum(len(pool.outbox) for pool in self.pools.pools.values())

    async def stop(self) -> None:
        """End what is still live, deliver the outbox to the store, give up the lease, end the background work."""
        self.context.draining = True
        await asyncio.sleep(0)  # requests that were cancelled when the drain took too long end by themselves
        for live in self.context.live:
            live.finish(Outcome.CUT_OFF)
        await asyncio.gather(*(_let_go(pool) for pool in self.pools.pools.values()))
        await self._supervisor.stop()
        await self.fleet.close()
        await self.limit_gauges.close()
        with contextlib.suppress(TimeoutError):  # a lease that is not given up runs out
            async with asyncio.timeout(LEAVING_S / 2):
                await asyncio.gather(*(replica.retire() for replica in self.replicas.values()))
        await self.peer_client.close()
        for pool in self.pools.pools.values():
            await pool.store.close()
            await pool.model_lists.close()
            await pool.adapter_loads.close()
            if pool.tokenizer is not None:
                await pool.tokenizer.close()
        if self.context.recorder is not None:
            self.context.recorder.close()
        self.context.ended = None
        while self._end_listeners:
            await asyncio.to_thread(self._end_listeners.pop().close)  # bounded: a collector or a disk may hang

    async def read_metrics(self) -> None:
        """Bring the gauges up to date; called before they are scraped."""
        self.read_own_gauges()
        await asyncio.gather(self.fleet.refresh(), self.limit_gauges.refresh())

    def _limits_shown(self) -> dict[str, Sequence[Limit]]:
        """The limits of the tenants that have metrics of their own."""
        known = self.tenants.tenants
        return {name: known[name].limits for name in self.context.metrics.tenants.named if name in known}

    def read_own_gauges(self) -> None:
        """Bring the gauges of this replica alone up to date."""
        metrics = self.context.metrics
        self.context.deadlines.report()
        metrics.outbox.set(self.outbox_releases)
        metrics.degraded.set(any(replica.store_state != "ok" for replica in self.replicas.values()))
        for followed in self.certificates:
            metrics.certificate(followed.report())
        for pool in self.pools.pools.values():
            if pool.tokenizer is not None:
                pool.metrics.tokens_mistrusted.set(pool.tokenizer.is_mistrusted)


async def _let_go(pool: ServedPool) -> None:
    """Deliver the releases of a pool, and what the room that they make is granted to; bounded."""
    with contextlib.suppress(TimeoutError):  # the leader's sweep grants instead
        async with asyncio.timeout(FLUSH_TIMEOUT_S):
            await pool.outbox.flush()
            await pool.planner.done()


def _call_each(
    listeners: Sequence[SpanExport | RequestLog],
) -> Callable[[Explanation, TraceContext | None], None] | None:
    """The callback for the end of a request; None while nothing is logged or traced."""
    if len(listeners) < 2:
        return listeners[0].ended if listeners else None

    def ended(explanation: Explanation, trace: TraceContext | None) -> None:
        for listener in listeners:
            listener.ended(explanation, trace)

    return ended


def _context(
    settings: RouterSettings, pools: Sequence[str], *, replica_id: str, clock: Clock, call_later: CallLater
) -> ReplicaContext:
    metrics, live = RouterMetrics(pools, tenants=settings.tenant_metrics), LiveRequests(settings.max_requests)
    return ReplicaContext(
        replica_id=replica_id,
        settings=settings,
        clock=clock,
        call_later=call_later,
        metrics=metrics,
        decisions=DecisionLog(),
        live=live,
        deadlines=Deadlines(clock, call_later),
        recorder=open_recorder(settings, replica_id),
    )


@dataclass(frozen=True, slots=True)
class _Budgets:
    """The budgets of a replica, over all its pools."""

    retries: RetryBudget
    continuations: RetryBudget


def _served_pool(
    pool: PoolSettings,
    shared: FailoverPool,
    scheduling: SchedulingSettings,
    context: ReplicaContext,
    budgets: _Budgets,
    trust: InstanceTrust,
    pairs_legs: bool,
) -> ServedPool:
    settings, clock = context.settings, context.clock
    loss_notifier = InstanceLossNotifier(budgets.retries, clock, pool.drain_within_s)
    view = ViewKeeper(
        shared,
        clock=clock,
        seen=loss_notifier.check,
    )
    waiters = GrantWaiters(
        shared,
        replica_id=context.replica_id,
        clock=clock,
        call_later=context.call_later,
        order=queue_order_of(scheduling),
        refuses_late=settings.late_requests == "refuse",
    )
    metrics = context.metrics.pools[pool.name]
    engine_key = settings.upstream_api_key.get_secret_value() if settings.upstream_api_key is not None else None
    warn = partial(log.warning, "pool %s: %s", pool.name)
    breakers = CircuitBreakers(
        BreakerRule(),
        view=lambda: view.view,
        on_fault=metrics.count_fault,
        on_ejection=metrics.count_ejection,
        warn=warn,
    )
    fleet = PoolFleet(view, breakers, clock.monotonic_s)
    shared.noted = fleet.note
    planner = QueuePlanner(waiters.plan)
    served = ServedPool(
        settings=pool,
        scheduling=scheduling,
        store=shared,
        view=view,
        loss_notifier=loss_notifier,
        grant_waiters=waiters,
        turn_waiters=TurnWaiters(shared, lambda: view.view, metrics, clock=clock, call_later=context.call_later),
        instance_waiters=InstanceWaiters(view, clock=clock, call_later=context.call_later),
        fleet=fleet,
        planner=planner,
        outbox=Outbox(shared.release, planner.plan, clock=clock, dropped=context.metrics.outbox_dropped),
        policy=build_policy(scheduling),
        evidence=Evidence(breakers, Quarantine(warn), budgets.retries, budgets.continuations),
        metrics=context.metrics.pools[pool.name],
        blocks=BlockRule.of(scheduling),
        recent_answers=RecentAnswers(clock),
        contexts_ahead=ContextsAhead(context.live.is_releasing),
        model_lists=ModelLists(shared, view, InstanceQueries(settings.upstream_api_key, trust), clock),
        adapter_loads=AdapterLoads(shared, view, EngineAdapters(engine_key, trust), clock, metrics),
        replica_id=context.replica_id,
        max_tries=settings.max_attempts,
        pairs_legs=pairs_legs,
        tokenizer=build_tokenizer(
            pool,
            settings,
            context.metrics.pools[pool.name],
            view=lambda: view.view,
            learned=lambda: view.learned,
            clock=clock,
            trust=trust,
        ),
    )
    view.follow = served.follow
    return served
