"""One pool's share of a worker process: registration always, every other job while it leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from dualmap.runtime.clock import Clock
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.leases import Lease
from dualmap.statestore.pool import PoolStore
from dualmap.workers.actuators import actuator_of
from dualmap.workers.allotter import Allotter, Pools
from dualmap.workers.drainer import Drainer
from dualmap.workers.evacuator import Evacuator
from dualmap.workers.health import HealthChecker
from dualmap.workers.hotness_keeper import HotnessJob
from dualmap.workers.idle_filler import IdleFiller
from dualmap.workers.leader import Election
from dualmap.workers.learner import Learner
from dualmap.workers.loop import Job, LoopContext, run_job
from dualmap.workers.mender import Mender
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.pool_reader import CachedPoolReader, PoolReader
from dualmap.workers.probe import Prober
from dualmap.workers.reaper import Reaper
from dualmap.workers.rebalancer import SWEEP_INTERVAL_S, Rebalancer
from dualmap.workers.registrar import Registrar
from dualmap.workers.repairer import Repairer
from dualmap.workers.role_mover import RoleMover
from dualmap.workers.scaler import Scaler
from dualmap.workers.settings import WorkerSettings
from dualmap.workers.settings_watch import SettingsChangedError, SettingsWatch
from dualmap.workers.sweeper import Sweeper

log = logging.getLogger(__name__)

_READER_MAX_AGE_S = 0.4
"""Below the pause between two rounds of any job that reads by it, so that each sees what its last round changed. The
health checker looks more often: what it sees may be so old, and its writes say what state they expect."""

_DISCOVERY_MAX_AGE_S = 2.0
"""Discovery knows its own changes, and what others change may be so old to it."""


class PoolWorker:
    """Runs until cancelled, which stops the jobs and gives the leadership back."""

    def __init__(
        self,
        pool: PoolStore,
        pools: Pools,
        settings: PoolSettings,
        worker: WorkerSettings,
        *,
        trust: InstanceTrust | None = None,
        worker_id: str,
        clock: Clock,
        metrics: WorkerMetrics,
        jitter: random.Random,
    ) -> None:
        self.pool = pool
        self._pools = pools
        self._settings = settings
        self._worker = worker
        self._trust = trust
        self._worker_id = worker_id
        self._clock = clock
        self._metrics = metrics
        self._jitter = jitter
        self._context = LoopContext(pool.name, clock, metrics, jitter, time_scale=worker.time_scale)
        self._election = Election(
            pool, worker_id, lease_ms=worker.lease_ms, clock=clock, metrics=metrics, jitter=jitter
        )

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
        registrar = Registrar(self.pool, self._settings, metrics=self._metrics)
        async with self._kv_events() as events, asyncio.TaskGroup() as group:
            group.create_task(run_job(registrar, self._context))
            group.create_task(self._election.run(self._lead))
            if events is not None:
                group.create_task(run_job(events, self._context))

    def _kv_events(self) -> AbstractAsyncContextManager[Job | None]:
        if not self._settings.has_kv_events:
            return nullcontext()
        from dualmap.workers.kv_events.job import KvEventsJob  # with ZeroMQ, which is loaded only where it is used

        return KvEventsJob(self.pool, self._settings, self._worker_id, clock=self._clock, metrics=self._metrics)

    async def _lead(self, lease: Lease) -> None:
        worker = self._worker
        reader = CachedPoolReader(self.pool, self._clock, _READER_MAX_AGE_S / self._worker.time_scale)
        async with (
            self._prober() as prober,
            HealthChecker(
                self.pool,
                lease.fence,
                reader,
                self._settings.model,
                worker,
                prober=prober,
                clock=self._clock,
                metrics=self._metrics,
                jitter=self._jitter,
            ) as health,
            self._discovery(lease.fence, reader) as discovery,
        ):
            await self.pool.upkeep.mend(fence=lease.fence)  # before anything is read
            while True:
                overrides = (await reader.membership()).overrides
                watch = SettingsWatch(reader, overrides)
                scheduling = self.pool.settings.in_force(overrides)
                hotness = HotnessJob(self.pool, lease.fence, scheduling, clock=self._clock, metrics=self._metrics)
                jobs = self._other_jobs(lease.fence, reader, scheduling)
                async with self._scalers(lease.fence, reader, scheduling, hotness) as scalers:
                    try:
                        await run_together([watch, health, hotness, *jobs, *scalers, *discovery], self._context)
                    except SettingsChangedError:
                        log.info("scheduling settings changed pool=%s", self.pool.name)

    @contextlib.asynccontextmanager
    async def _scalers(
        self, fence: int, reader: PoolReader, scheduling: SchedulingSettings, hotness: HotnessJob
    ) -> AsyncIterator[list[Scaler]]:
        """The autoscaler, where the pool has one, and that of its decode instances, where they scale by themselves."""
        if self._settings.autoscale is None:
            yield []
            return
        scalers = [
            Scaler(
                self.pool,
                fence,
                self._settings,
                scheduling,
                reader,
                actuator_of(self._settings, reader, decodes=decodes),
                worker_id=self._worker_id,
                arrived=lambda: hotness.arrived,
                time_scale=self._worker.time_scale,
                clock=self._clock,
                metrics=self._metrics,
                decodes=decodes,
            )
            for decodes in (False, True)
            if self._settings.autoscale_of(decodes=decodes) is not None
        ]
        async with contextlib.AsyncExitStack() as term:
            for scaler in scalers:
                term.push_async_callback(scaler.close)
            term.callback(self._metrics.end_term, self.pool.name)
            yield scalers

    @contextlib.asynccontextmanager
    async def _discovery(self, fence: int, reader: CachedPoolReader) -> AsyncIterator[list[Job]]:
        """Discovery, where the pool has it."""
        if self._settings.discovery is None:
            yield []
            return
        from dualmap.workers.discovery.job import discovery_of  # with an HTTP client, which is loaded where it is used

        async with discovery_of(
            self.pool,
            fence,
            reader,
            self._settings,
            self._settings.discovery.kubernetes,
            worker_id=self._worker_id,
            clock=self._clock,
            metrics=self._metrics,
            jitter=self._jitter,
            members_age_s=_DISCOVERY_MAX_AGE_S / self._worker.time_scale,
            on_change=reader.forget_membership,
        ) as discovery:
            yield [discovery]

    def _prober(self) -> Prober:
        worker = self._worker
        key = worker.upstream_api_key
        return Prober(
            timeout_s=worker.health_timeout_s, api_key=key.get_secret_value() if key else None, trust=self._trust
        )

    def _other_jobs(self, fence: int, reader: PoolReader, scheduling: SchedulingSettings) -> list[Job]:
        pool, clock, metrics = self.pool, self._clock, self._metrics
        stall_s, order = scheduling.decode_stall_s, queue_order_of(scheduling)
        jobs: list[Job] = [
            Evacuator(pool, fence, reader, order, decode_stall_s=stall_s, metrics=metrics),
            Mender(pool, fence, metrics=metrics),
            Reaper(pool, fence, clock=clock, metrics=metrics),
            Repairer(pool, fence, metrics=metrics),
            Drainer(pool, fence, reader, metrics=metrics),
            Sweeper(pool, fence, reader, order, metrics=metrics),
            Learner(pool, fence, reader, metrics=metrics),
            Allotter(pool, self._pools, metrics=metrics),
        ]
        if self._settings.moves_roles:
            jobs.append(RoleMover(pool, fence, reader, scheduling=scheduling, clock=clock, metrics=metrics))
        if build_policy(scheduling).rebalances:
            rebalancer = Rebalancer(
                pool,
                fence,
                reader,
                order,
                decode_stall_s=stall_s,
                clock=clock,
                metrics=metrics,
                sweep_interval_s=SWEEP_INTERVAL_S / self._worker.time_scale,
            )
            jobs.append(rebalancer)
        elif order.by_deadline:
            pace_s = SWEEP_INTERVAL_S / self._worker.time_scale
            jobs.append(
                IdleFiller(pool, fence, reader, order, decode_stall_s=stall_s, metrics=metrics, interval_s=pace_s)
            )
        return jobs


async def run_together(jobs: Sequence[Job], context: LoopContext) -> None:
    """Run every job until the first one ends (LeaseLostError) or this is cancelled; then none is left running."""
    tasks = [asyncio.create_task(run_job(job, context), name=f"{context.pool_name}/{job.name}") for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
