"""One pool's share of a worker process: registration always, every other job while it leads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from scheduling.policies import build_policy
from scheduling.settings import SchedulingSettings
from statestore.base import PoolStore
from statestore.clock import Clock
from statestore.leases import Lease
from statestore.settings import PoolSettings
from workers.drainer import Drainer
from workers.evacuator import Evacuator
from workers.health import HealthChecker
from workers.hotness_keeper import HotnessKeeper
from workers.leader import Election
from workers.loop import Job, LoopContext, run_job
from workers.metrics import WorkerMetrics
from workers.overdue import OverdueGranter
from workers.pool_reader import CachedPoolReader, PoolReader
from workers.probe import Prober
from workers.reaper import Reaper
from workers.rebalancer import Rebalancer
from workers.registrar import Registrar
from workers.repairer import Repairer
from workers.settings import WorkerSettings

_READER_MAX_AGE_S = 0.4
"""Below the default pause between two rounds of evacuator and drainer, and between two sweeps of the rebalancer, so
that each sees what the last one changed. The health checker looks more often: what it sees may be so old, and its
writes say what state they expect."""


class PoolWorker:
    """Runs for ever; cancelling it stops the jobs and gives the leadership back."""

    def __init__(
        self,
        pool: PoolStore,
        settings: PoolSettings,
        scheduling: SchedulingSettings,
        worker: WorkerSettings,
        *,
        worker_id: str,
        clock: Clock,
        metrics: WorkerMetrics,
        jitter: random.Random,
    ) -> None:
        self.pool = pool
        self._settings = settings
        self._scheduling = scheduling
        self._worker = worker
        self._clock = clock
        self._metrics = metrics
        self._jitter = jitter
        self._context = LoopContext(
            pool.name, clock, metrics, jitter, tick_timeout_s=worker.tick_timeout_s, backoff_max_s=worker.backoff_max_s
        )
        self._election = Election(
            pool,
            worker_id,
            lease_ms=worker.lease_ms,
            stop_timeout_s=worker.stop_timeout_s,
            clock=clock,
            metrics=metrics,
            jitter=jitter,
        )

    @property
    def lease(self) -> Lease | None:
        """The leadership held now, if any."""
        return self._election.lease

    @property
    def store_error(self) -> str | None:
        """What the last call about the leadership, at most seconds ago, found wrong with the store; None if nothing."""
        return self._election.store_error

    async def run(self) -> None:
        """Until cancelled."""
        registrar = Registrar(
            self.pool, self._settings, interval_s=self._worker.register_interval_s, metrics=self._metrics
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(run_job(registrar, self._context))
            group.create_task(self._election.run(self._lead))

    async def _lead(self, lease: Lease) -> None:
        worker = self._worker
        reader = CachedPoolReader(self.pool, self._clock, _READER_MAX_AGE_S)
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
        ):
            await run_together([health, *self._other_jobs(lease.fence, reader)], self._context)

    def _prober(self) -> Prober:
        worker = self._worker
        key = worker.upstream_api_key
        return Prober(
            timeout_s=worker.health_timeout_s,
            canary_timeout_s=worker.health_canary_timeout_s,
            api_key=key.get_secret_value() if key else None,
        )

    def _other_jobs(self, fence: int, reader: PoolReader) -> list[Job]:
        pool, worker, metrics = self.pool, self._worker, self._metrics
        stall_s = self._scheduling.decode_stall_s
        by_deadline = self._scheduling.granting_order == "deadline"
        jobs: list[Job] = [
            HotnessKeeper(
                pool,
                fence,
                self._scheduling,
                interval_s=worker.hotness_interval_s,
                clock=self._clock,
                metrics=metrics,
            ),
            Evacuator(
                pool,
                fence,
                reader,
                interval_s=worker.evacuate_interval_s,
                decode_stall_s=stall_s,
                by_deadline=by_deadline,
                metrics=metrics,
            ),
            Reaper(
                pool,
                fence,
                interval_s=worker.reap_interval_s,
                grace_s=worker.reap_grace_s,
                clock=self._clock,
                metrics=metrics,
            ),
            Repairer(pool, fence, interval_s=worker.repair_interval_s, metrics=metrics),
            Drainer(pool, fence, reader, interval_s=worker.drain_interval_s, metrics=metrics),
        ]
        if by_deadline:
            jobs.append(OverdueGranter(pool, fence, interval_s=worker.overdue_interval_s, metrics=metrics))
        if build_policy(self._scheduling).rebalances:
            rebalancer = Rebalancer(
                pool,
                fence,
                reader,
                sweep_interval_s=worker.rebalance_interval_s,
                min_gap_s=worker.rebalance_min_gap_s,
                max_moves=worker.rebalance_max_moves,
                decode_stall_s=stall_s,
                clock=self._clock,
                metrics=metrics,
            )
            jobs.append(rebalancer)
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
