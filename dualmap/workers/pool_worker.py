"""One pool's share of a worker process: registration always, every other job while it leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from dualmap.runtime.engine_adapters import EngineAdapters
from dualmap.runtime.pool_settings import KvTierSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.leases import Lease
from dualmap.workers.actuators import actuator_of
from dualmap.workers.adapter_keeper import AdapterKeeper
from dualmap.workers.allotter import Allotter, Pools
from dualmap.workers.context import LeaderContext, PoolContext
from dualmap.workers.health import HealthChecker
from dualmap.workers.leader import Election
from dualmap.workers.learning_jobs import HotnessJob, Learner
from dualmap.workers.loop import Job, StopJobsError, run_job
from dualmap.workers.pool_reader import CachedPoolReader, PoolReader
from dualmap.workers.probe import Prober
from dualmap.workers.queue_jobs import Evacuator, IdleFiller, Rebalancer, Sweeper
from dualmap.workers.registrar import Registrar
from dualmap.workers.role_mover import RoleMover
from dualmap.workers.rollout_keeper import RolloutKeeper
from dualmap.workers.scaler import Scaler
from dualmap.workers.tier_keeper import TierKeeper
from dualmap.workers.upkeep_jobs import Drainer, Mender, Reaper, Repairer

log = logging.getLogger(__name__)

_READER_MAX_AGE_S = 0.4
"""Below the pause between two rounds of any job that reads by it, so that each sees what its last round changed. The
health checker looks more often: what it sees may be so old, and its writes say what state they expect."""

_DISCOVERY_MAX_AGE_S = 2.0
"""Discovery knows its own changes, and what others change may be so old to it."""


class SettingsChangedError(StopJobsError):
    """The jobs use settings that are not those of the fleet any more."""


class SettingsWatch:
    """Ends the leader's jobs when scheduling settings change in the running fleet, to start them again."""

    name = "settings"
    interval_s = 0.5

    def __init__(self, reader: PoolReader, overrides: Mapping[str, Any]) -> None:
        """``overrides`` are those that the jobs were started with."""
        self._reader = reader
        self._overrides = overrides

    async def tick(self) -> None:
        """Raises SettingsChangedError, StoreUnavailableError."""
        if (await self._reader.membership()).overrides != self._overrides:
            raise SettingsChangedError


class PoolWorker:
    """Runs until cancelled, which stops the jobs and gives the leadership back."""

    def __init__(self, context: PoolContext, pools: Pools, *, trust: InstanceTrust | None = None) -> None:
        self.pool = context.pool
        self._context = context
        self._pools = pools
        self._trust = trust
        self._election = Election(context)

    @property
    def lease(self) -> Lease | None:
        """The leadership held now, if any."""
        return self._election.lease

    @property
    def store_error(self) -> str | None:
        """The store's error at the last call about the leadership, at most seconds ago; None if it answered."""
        return self._election.store_error

    async def run(self) -> None:
        """Run until cancelled."""
        async with self._kv_events() as events, asyncio.TaskGroup() as group:
            group.create_task(run_job(Registrar(self._context), self._context))
            group.create_task(self._election.run(self._lead))
            if events is not None:
                group.create_task(run_job(events, self._context))

    @contextlib.asynccontextmanager
    async def _kv_events(self) -> AsyncIterator[Job | None]:
        if not self._context.settings.has_kv_events:
            yield None
            return
        from dualmap.workers.kv_events.job import KvEventsJob  # with ZeroMQ, which is loaded only where it is used

        async with self._prober() as prober, KvEventsJob(self._context, prober) as job:
            yield job

    async def _lead(self, lease: Lease) -> None:
        own = self._context
        reader = CachedPoolReader(own.pool, own.clock, _READER_MAX_AGE_S / own.time_scale)
        context = own.leading(lease.fence, reader)
        async with (
            self._prober() as prober,
            AdapterKeeper(context, EngineAdapters(self._engine_key, self._trust)) as adapters,
            HealthChecker(context, prober, adapters.is_prepared) as health,
            _discovery(context, on_change=reader.forget_membership) as discovery,
        ):
            await context.pool.upkeep.mend(fence=context.fence)  # before anything is read
            while True:
                overrides = (await reader.membership()).overrides
                scheduling = context.pool.settings.in_force(overrides)
                hotness = HotnessJob(context, scheduling)
                lasting: list[Job] = [health, hotness, adapters, Allotter(context, self._pools), *discovery]
                jobs = [SettingsWatch(reader, overrides), *lasting, *_jobs_by_settings(context, scheduling, prober)]
                async with _scalers(context, scheduling, hotness) as scalers:
                    try:
                        await run_together([*jobs, *scalers], context)
                    except SettingsChangedError:
                        log.info("scheduling settings changed pool=%s", context.pool.name)

    @property
    def _engine_key(self) -> str | None:
        key = self._context.worker.upstream_api_key
        return key.get_secret_value() if key else None

    def _prober(self) -> Prober:
        worker = self._context.worker
        return Prober(timeout_s=worker.health_timeout_s, api_key=self._engine_key, trust=self._trust)


@contextlib.asynccontextmanager
async def _scalers(
    context: LeaderContext, scheduling: SchedulingSettings, hotness: HotnessJob
) -> AsyncIterator[list[Scaler]]:
    """The autoscaler, where the pool has one, and that of its decode instances, where they scale by themselves."""
    settings = context.settings
    if settings.autoscale is None:
        yield []
        return
    scalers = [
        Scaler(
            context,
            scheduling,
            actuator_of(settings, context.reader, decodes=decodes),
            arrived=lambda: hotness.arrived,
            decodes=decodes,
        )
        for decodes in (False, True)
        if settings.autoscale_of(decodes=decodes) is not None
    ]
    async with contextlib.AsyncExitStack() as term:
        for scaler in scalers:
            term.push_async_callback(scaler.close)
        term.callback(context.metrics.end_term, context.pool.name)
        yield scalers


@contextlib.asynccontextmanager
async def _discovery(context: LeaderContext, *, on_change: Callable[[], None]) -> AsyncIterator[list[Job]]:
    """Discovery, where the pool has it."""
    if context.settings.discovery is None:
        yield []
        return
    from dualmap.workers.discovery.job import discovery_of  # with an HTTP client, which is loaded where it is used

    members_age_s = _DISCOVERY_MAX_AGE_S / context.time_scale
    kubernetes = context.settings.discovery.kubernetes
    async with discovery_of(context, kubernetes, members_age_s=members_age_s, on_change=on_change) as discovery:
        yield [discovery]


def _jobs_by_settings(context: LeaderContext, scheduling: SchedulingSettings, prober: Prober) -> list[Job]:
    """The jobs of a term until the scheduling settings change."""
    jobs: list[Job] = [
        Evacuator(context, scheduling),
        Mender(context),
        Reaper(context),
        Repairer(context),
        Drainer(context),
        Sweeper(context, scheduling),
        Learner(context),
        RolloutKeeper(context),
    ]
    if context.settings.kv_tiers != KvTierSettings() or context.settings.pulls.enabled:
        jobs.append(TierKeeper(context, prober))
    if context.settings.moves_roles:
        jobs.append(RoleMover(context, scheduling))
    if build_policy(scheduling).rebalances:
        jobs.append(Rebalancer(context, scheduling))
    elif queue_order_of(scheduling).by_deadline:
        jobs.append(IdleFiller(context, scheduling))
    return jobs


async def run_together(jobs: Sequence[Job], context: PoolContext) -> None:
    """Run every job until the first one ends (LeaseLostError) or this is cancelled; then none is left running."""
    tasks = [asyncio.create_task(run_job(job, context), name=f"{context.pool.name}/{job.name}") for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
