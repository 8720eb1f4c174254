"""The leader's jobs on the queues of instances: sweep, evacuation, rebalance and idle work."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.queues.floors import Floors
from dualmap.scheduling.queues.idle_work import IdleWork
from dualmap.scheduling.queues.leader_jobs import (
    Moved,
    MovingPort,
    evacuate,
    give_idle_work,
    instances_to_evacuate,
    rebalance,
    sweep,
)
from dualmap.scheduling.queues.rebalance import MigrateStatus, plan_sweep
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.steps import Steps, drive
from dualmap.workers.context import LeaderContext

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 1.0
MIN_GAP_S = 0.02
"""Shortest time between two rounds for triggers, so that those of a burst share one."""
MAX_MOVES = 256
"""Migrations of one round on one instance: its bound in time."""
_LONGEST_WAIT_S = 1.0
"""Longest wait for a trigger in one round: a round must end within the bound of every job's rounds."""


class Sweeper:
    """Plans every queue that holds requests, even if no transition made room there: deadlines pass, deferred requests
    get idle instances, and what a dead planner left is granted.

    Replicas plan a queue when they make room. The rest is found here. Before that, classes get what their floors give
    them.
    """

    name = "sweeper"
    interval_s = SWEEP_INTERVAL_S

    def __init__(self, context: LeaderContext, scheduling: SchedulingSettings) -> None:
        self._context = context
        self._order = queue_order_of(scheduling)
        self._floors = Floors(self._order)

    async def tick(self) -> None:
        """Plan once on every instance that holds requests. Raises StoreUnavailableError, LeaseLostError."""
        context, led = self._context, self._context.led
        for instance_id, steps in sweep(await context.reader.loads(), self._order, self._floors):
            if granted := await drive(steps, led):
                context.metrics.swept_granted.labels(context.pool.name).inc(granted)
                log.debug("swept pool=%s instance=%s granted=%d", context.pool.name, instance_id, granted)


# moves ---------------------------------------------------------------------------------------------------------------
async def move(context: LeaderContext, steps: Steps[MovingPort, tuple[Moved, ...]]) -> int:
    """Carry moves of held requests out with the leader's fence, count and log them; returns how many moved. A request
    that was granted, finished or moved meanwhile stays where it is. Raises StoreUnavailableError, LeaseLostError."""
    return count_moves(context, await drive(steps, context.led))


def count_moves(context: LeaderContext, moves: Sequence[Moved]) -> int:
    """How many moved."""
    by_source = dict[tuple[str, str], list[bool]]()
    for moved in moves:
        context.metrics.migrations.labels(context.pool.name, moved.reason, moved.status).inc()
        migrated = by_source.setdefault((moved.source_id, moved.reason), [])
        migrated.append(moved.status == MigrateStatus.MIGRATED)
    for (source_id, reason), migrated in by_source.items():
        log.info(
            "moved pool=%s source=%s reason=%s planned=%d migrated=%d",
            context.pool.name, source_id, reason, len(migrated), sum(migrated),
        )  # fmt: skip
    return sum(map(sum, by_source.values()))


# evacuation ----------------------------------------------------------------------------------------------------------
class Evacuator:
    """Moves the held requests of an instance that left service to instances that take requests.

    All instances are checked in every round, so leftovers of an interrupted evacuation are found as well.
    """

    name = "evacuator"
    interval_s = 0.5

    def __init__(self, context: LeaderContext, scheduling: SchedulingSettings) -> None:
        self._context = context
        self._order = queue_order_of(scheduling)
        self._decode_stall_s = scheduling.decode_stall_s

    async def tick(self) -> None:
        """Evacuate every instance that needs it. Raises StoreUnavailableError, LeaseLostError."""
        instances = (await self._context.reader.membership()).instances
        for instance_id in instances_to_evacuate(await self._context.reader.loads(), instances):
            loads = await self._context.pool.loads()
            steps = evacuate(instance_id, self._order, loads, instances, decode_stall_s=self._decode_stall_s)
            await move(self._context, steps)


# rebalance -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RebalanceRound:
    """Whether the next round sweeps, and how long it may wait for a trigger first."""

    sweep: bool
    wait_s: float


def next_round(now_s: float, next_sweep_s: float) -> RebalanceRound:
    """Sweep when it is due; until then listen for triggers."""
    if now_s >= next_sweep_s:
        return RebalanceRound(sweep=True, wait_s=0.0)
    return RebalanceRound(sweep=False, wait_s=min(_LONGEST_WAIT_S, next_sweep_s - now_s))


class Rebalancer:
    """Moves held requests off overloaded instances, on request of the routing path and by sweep. Runs only for policies
    that rebalance.

    One round at a time, so that no two plans ever act on the same queue: never recursive.
    """

    name = "rebalancer"

    def __init__(
        self,
        context: LeaderContext,
        scheduling: SchedulingSettings,
        *,
        sweep_interval_s: float = SWEEP_INTERVAL_S,
        max_moves: int = MAX_MOVES,
    ) -> None:
        self.interval_s = MIN_GAP_S
        self._context = context
        self._clock = context.clock
        self._order = queue_order_of(scheduling)
        self._sweep_interval_s = sweep_interval_s / context.time_scale
        self._max_moves = max_moves
        self._decode_stall_s = scheduling.decode_stall_s
        self._next_sweep_s = self._clock.monotonic_s()
        self._fruitless: set[str] = set()
        """Instances whose trigger since the last sweep led to no move: under lasting overload every request would
        trigger another round, and each reads a whole queue. The next sweep clears the set."""

    async def tick(self) -> None:
        """One sweep, or one wait for a trigger. Raises StoreUnavailableError, LeaseLostError."""
        plan = next_round(self._clock.monotonic_s(), self._next_sweep_s)
        if plan.sweep:
            self._fruitless.clear()
            await self._rebalance_all(plan_sweep(await self._context.reader.loads()), "sweep")
            self._next_sweep_s = self._clock.monotonic_s() + self._sweep_interval_s
        else:
            wanted = await self._context.pool.queues.wanted_rebalances(plan.wait_s)
            await self._rebalance_all([name for name in wanted if name not in self._fruitless], "triggered")

    async def _rebalance_all(self, instance_ids: Iterable[str], cause: str) -> None:
        """Rebalance each; then pause for as long as that took, so that overload costs half of the time at most."""
        started_s = self._clock.monotonic_s()
        for instance_id in dict.fromkeys(instance_ids):
            self._context.metrics.rebalances.labels(self._context.pool.name, cause).inc()
            if not await self._rebalance(instance_id) and cause == "triggered":
                self._fruitless.add(instance_id)
        self.interval_s = max(MIN_GAP_S, self._clock.monotonic_s() - started_s)

    async def _rebalance(self, instance_id: str) -> int:
        """One round for one instance; returns how many requests moved."""
        steps = rebalance(instance_id, self._order, decode_stall_s=self._decode_stall_s, max_moves=self._max_moves)
        return await move(self._context, steps)


# idle work -----------------------------------------------------------------------------------------------------------
class IdleFiller:
    """Gives idle instances the held requests that their own queue would make late; by deadline, where no rebalancer
    runs.

    A round reads the queues only while an instance is idle.
    """

    name = "idle filler"
    interval_s = SWEEP_INTERVAL_S

    def __init__(self, context: LeaderContext, scheduling: SchedulingSettings) -> None:
        self._context = context
        self._order = queue_order_of(scheduling)
        self._decode_stall_s = scheduling.decode_stall_s

    async def tick(self) -> None:
        """One round. Raises StoreUnavailableError, LeaseLostError."""
        reader = self._context.reader
        loads, instances = await reader.loads(), (await reader.membership()).instances
        known = {name: load for name, load in loads.items() if name in instances}
        idle = IdleWork(known, self._decode_stall_s, instances)
        await move(self._context, give_idle_work(plan_sweep(loads), self._order, idle))
