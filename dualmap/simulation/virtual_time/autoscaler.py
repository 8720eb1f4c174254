"""The autoscaler in virtual time: the leader's round of ``scheduling.scaling.scale_job``, and the machines it starts.

A started instance is ready after ``start_s``, with an empty cache. One that drains hands over what it holds, as in a
fleet, and is parked once it has answered the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dualmap.scheduling.queues.leader_jobs import PARKED, evacuate, instances_to_evacuate, instances_to_park
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.scaling.role_plan import RoleTargets
from dualmap.scheduling.scaling.scale_job import ActuatorReply, FleetNow, ScaleKeeper
from dualmap.scheduling.scaling.scale_record import ScaleRecord
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from dualmap.scheduling.steps import drive_now
from dualmap.simulation.figures.results import SizeChange
from dualmap.simulation.virtual_time.autoscale import Autoscale
from dualmap.simulation.virtual_time.event_queue import EventQueue, Priority
from dualmap.simulation.virtual_time.leader import Leader
from dualmap.simulation.virtual_time.simulated_fleet import SimulatedFleet
from dualmap.statestore.led import LedScaling

INTERVAL_S = 1.0
"""Time between two scaling rounds."""


class SimulatedAutoscaler:
    """Runs once a second."""

    def __init__(
        self,
        autoscale: Autoscale,
        fleet: SimulatedFleet,
        leader: Leader,
        *,
        order: QueueOrder,
        events: EventQueue,
        spares: Sequence[InstanceSpec],
        start_engine: Callable[[InstanceSpec], None],
        arrived: Callable[[], int],
        waiting: Callable[[], int],
    ) -> None:
        """Parks the spares. ``start_engine`` gives an instance a new engine, with an empty cache. ``waiting`` is the
        number of requests that wait for the first instance."""
        self._pool = pool = fleet.pool
        for spec in spares:
            start_engine(spec)
            pool.put_instance(replace(spec, state=InstanceState.STANDBY))
        scheduling = pool.scheduling
        self._order = order
        self._stall_s = scheduling.decode_stall_s
        self._events = events
        self._led = leader.led
        self._start_engine = start_engine
        self._waiting_now = waiting
        self._scheduling = scheduling
        self._starting: set[str] = set()
        self._keepers = []
        planner = None if autoscale.planner_of is None else autoscale.planner_of(autoscale.settings)
        for decodes, settings in ((False, autoscale.settings), (True, autoscale.settings.of_decode)):
            if settings is not None:
                keeper = ScaleKeeper(
                    settings,
                    "simulator",
                    scheduling.slo_ttft_s,
                    scheduling.block_tokens,
                    tuple(spec.instance_id for spec in spares if (spec.role is Role.DECODE) is decodes),
                    arrived=arrived,
                    planner=None if decodes else planner,
                    decodes=decodes,
                )
                self._keepers.append(keeper)
        self._scaling = LedScaling(leader.led, now=self._now, actuate=_refuse)
        self.changes: list[SizeChange] = []
        self._seen: dict[str, int] = {}
        """Number of the last decision, by role."""

    def tick(self) -> None:
        """One round: hand over, park, decide, start."""
        self._finish_drains()
        for keeper in self._keepers:
            record = drive_now(keeper.tick(), self._scaling)
            if record.decision_id > self._seen.get(record.role, 0):
                self._seen[record.role] = record.decision_id
                change = SizeChange(record.at_ms / 1000, record.size, record.wanted, record.reason, record.role)
                self.changes.append(change)
        for name, spec in self._pool.members.instances.items():
            if spec.state is InstanceState.STARTING and name not in self._starting:
                self._start(name)

    async def _now(self) -> FleetNow:
        pool = self._pool
        pace = RoleTargets.of(self._scheduling, pool.members.learned).answer_pace
        waiting = self._waiting_now()
        return FleetNow(pool.now_ms(), pool.loads(), pool.members.instances, waiting, answer_pace=pace)

    def _start(self, name: str) -> None:
        self._starting.add(name)
        spec = self._pool.members.instances[name]
        self._start_engine(spec)
        start_s = next(each.settings.start_s for each in self._keepers if each.decodes is (spec.role is Role.DECODE))

        def ready(_: float) -> None:
            self._starting.discard(name)
            self._pool.set_instance_state(name, InstanceState.READY, expected=InstanceState.STARTING)

        self._events.push(self._pool.now_ms() / 1000 + start_s, Priority.MEMBERSHIP, ready)

    def _finish_drains(self) -> None:
        pool, instances = self._pool, self._pool.members.instances
        for name in instances_to_evacuate(pool.loads(), instances):
            steps = evacuate(name, self._order, pool.loads(), instances, decode_stall_s=self._stall_s)
            drive_now(steps, self._led)
        for name in instances_to_park(pool.loads()):
            pool.set_instance_state(name, PARKED, expected=InstanceState.DRAINING)


async def _refuse(_: ScaleRecord) -> ActuatorReply:
    return ActuatorReply(False, "no actuator")


def paid_instances(loads: Iterable[InstanceLoad]) -> int:
    """Instances whose machines are in use: not those that are parked, nor those that drained."""
    serving = (InstanceState.READY, InstanceState.STARTING)
    return sum(load.state in serving or load.in_flight > 0 for load in loads)
