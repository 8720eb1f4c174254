"""The leader's rounds in virtual time: the jobs of ``scheduling.queues.leader_jobs``, one after the other.

As in a worker, with two exceptions. A worker evacuates instances that drain; here they serve what they hold, unless
the fleet scales itself (``autoscaler``). And a worker spares the store: after a rebalance that led to no move it
ignores triggers until the next sweep, and it pauses after a round for as long as that took.
"""

from __future__ import annotations

from collections.abc import Iterable

from dualmap.scheduling.estimates.learning import FleetLearner
from dualmap.scheduling.queues.floors import Floors
from dualmap.scheduling.queues.idle_work import IdleWork
from dualmap.scheduling.queues.leader_jobs import (
    HotnessKeeper,
    LearningKeeper,
    give_idle_work,
    rebalance,
    sweep,
)
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.queues.rebalance import plan_sweep
from dualmap.scheduling.scaling.role_plan import RoleChange, RoleState, RoleTargets, plan_roles
from dualmap.scheduling.state.hotness import HotnessRule, HotnessWindow
from dualmap.scheduling.steps import at_once, drive_now
from dualmap.simulation.virtual_time.event_queue import EventQueue, Priority
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulated_fleet import SimulatedFleet
from dualmap.simulation.virtual_time.simulated_pool import SimulatedLed

_FOR_EVER_MS = 1 << 50
"""Long, and yet a figure that the store takes for one."""


class Leader:
    """One round at a time; grants are left in the pool."""

    def __init__(
        self,
        scenario: Scenario,
        fleet: SimulatedFleet,
        order: QueueOrder,
        events: EventQueue,
        *,
        learns_rates: bool = True,
    ) -> None:
        """``learns_rates``: prefill rates are learned and published; else they stay as instances are described."""
        settings = scenario.scheduling
        self._scenario = scenario
        self._fleet = fleet
        self._pool = pool = fleet.pool
        lease = at_once(pool.store.leader_lease.acquire("simulator", _FOR_EVER_MS))
        assert lease is not None  # nobody else leads a simulated pool
        self._fence = lease.fence
        self.led = SimulatedLed(pool, lease.fence, learns_rates=learns_rates)
        self._order = order
        self._floors = Floors(order)
        self._events = events
        self._hotness = HotnessKeeper(HotnessWindow.of(settings), HotnessRule())
        self._learning = LearningKeeper(FleetLearner(fleet.learned))
        self._roles = RoleState(changed_ms=0)
        self.role_changes: list[tuple[float, RoleChange]] = []
        """Time and what was changed, in order."""
        self._wanted: dict[str, None] = {}
        """Instances that placements found overloaded, oldest first."""
        self._next_round_s = 0.0
        self._armed = False

    def grow_tree(self) -> None:
        """Read the arrival log, and publish the hotness tree where it changed."""
        drive_now(self._hotness.tick(self._pool.members.tree, self._fleet.view.instances), self.led)

    def learn(self) -> None:
        """Learn from the samples since the last round."""
        pool = self._pool
        drive_now(self._learning.tick(pool.loads(), self._fleet.view.instances, pool.now_ms()), self.led)

    def sweep(self) -> None:
        """Do the leader's work of each second."""
        self.sweep_queues()
        if self._scenario.move_roles:
            self.move_roles()

    def sweep_queues(self) -> None:
        """Plan every queue: in deadline order, what is due changes with time alone."""
        for _, steps in sweep(self._pool.loads(), self._order, self._floors):
            drive_now(steps, self.led)

    def rebalance_by_sweep(self) -> None:
        self._rebalance(plan_sweep(self._pool.loads()))

    def give_idle_work(self) -> None:
        """Move what is late in its own queue to idle instances."""
        loads = self._pool.loads()
        idle = IdleWork(loads, self._scenario.scheduling.decode_stall_s, self._fleet.view.instances)
        drive_now(give_idle_work(plan_sweep(loads), self._order, idle), self.led)

    def move_roles(self) -> None:
        """Give an instance of one role to the other, if that is due."""
        pool = self._pool
        targets = RoleTargets.of(self._scenario.scheduling, pool.members.learned)
        instances, now_ms = self._fleet.view.instances, pool.now_ms()
        self._roles, change = plan_roles(self._roles, instances, pool.loads(), targets, now_ms)
        if change is not None:
            self.role_changes.append((now_ms / 1000, change))
            pool.update_instance(change.instance_id, {"role": change.role}, fence=self._fence)

    def listen(self, now_s: float) -> None:
        """Plan a round if a placement requested one: ``rebalance_min_gap_s`` after the last one at the earliest."""
        self._wanted |= dict.fromkeys(at_once(self._pool.store.queues.wanted_rebalances(0)))
        if self._wanted and not self._armed:
            self._armed = True
            self._events.push(max(now_s, self._next_round_s), Priority.LEADER, self._rebalance_wanted)

    def _rebalance_wanted(self, now_s: float) -> None:
        self._armed = False
        self._next_round_s = now_s + self._scenario.rebalance_min_gap_s
        wanted, self._wanted = self._wanted, {}
        self._rebalance(wanted)

    def _rebalance(self, instance_ids: Iterable[str]) -> None:
        stall_s, max_moves = self._scenario.scheduling.decode_stall_s, self._scenario.rebalance_max_moves
        for instance_id in instance_ids:
            steps = rebalance(instance_id, self._order, decode_stall_s=stall_s, max_moves=max_moves)
            drive_now(steps, self.led)
