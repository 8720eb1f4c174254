"""The autoscaler in virtual time: the leader's round of ``scheduling.scale_job``, and the machines that it starts.

A started instance is ready after ``start_s``, with an empty cache. One that drains hands over what it holds, as in a
fleet, and is parked once it has answered the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from scheduling.instance import InstanceSpec, InstanceState
from scheduling.leader_jobs import evacuate
from scheduling.queue_order import QueueOrder
from scheduling.scale_job import ActuatorReply, FleetNow, ScaleKeeper
from scheduling.steps import drive_now
from simulation.autoscale import Autoscale, SizeChange
from simulation.event_queue import EventQueue, Priority
from simulation.leader import Leader
from simulation.scalers import planner_of
from simulation.simulated_fleet import SimulatedFleet
from statestore.led import LedScaling
from statestore.memory.state import PoolState

INTERVAL_S = 1.0
"""Of the scaling round."""


class SimulatedAutoscaler:
    """Runs once a second."""

    def __init__(
        self,
        autoscale: Autoscale,
        fleet: SimulatedFleet,
        leader: Leader,
        order: QueueOrder,
        events: EventQueue,
        spares: Sequence[InstanceSpec],
        renew: Callable[[InstanceSpec], None],
        arrived: Callable[[], int],
    ) -> None:
        """Parks the spares. ``renew`` gives an instance a new engine, with an empty cache."""
        self._state = state = fleet.state
        for spec in spares:
            renew(spec)
            state.put_instance(replace(spec, state=InstanceState.STANDBY))
        scheduling = state.scheduling
        self._order = order
        self._stall_s = scheduling.decode_stall_s
        self._events = events
        self._led = leader.led
        self._renew = renew
        self._start_s = autoscale.settings.start_s
        self._starting: set[str] = set()
        self._keeper = ScaleKeeper(
            autoscale.settings,
            "simulator",
            scheduling.slo_ttft_s,
            scheduling.block_tokens,
            tuple(spec.instance_id for spec in spares),
            arrived=arrived,
            planner=planner_of(autoscale.scaler, autoscale.settings, dict(autoscale.options)),
        )
        self._scaling = LedScaling(
            state, leader.fence, now=self._now, actuate=lambda _: ActuatorReply(False, "no actuator")
        )
        self.changes: list[SizeChange] = []

    def tick(self) -> None:
        """One round: hand over, park, decide, start."""
        self._finish_drains()
        record = drive_now(self._keeper.tick(), self._scaling)
        if record.decision_id > len(self.changes):
            self.changes.append(SizeChange(record.at_ms / 1000, record.size, record.wanted, record.reason))
        for name, book in self._state.instances.items():
            if book.spec.state is InstanceState.STARTING and name not in self._starting:
                self._start(name)

    def _now(self) -> FleetNow:
        return FleetNow(self._state.now_ms(), self._state.loads(), self._fleet_instances())

    def _fleet_instances(self) -> Mapping[str, InstanceSpec]:
        return {name: book.spec for name, book in self._state.instances.items()}

    def _start(self, name: str) -> None:
        self._starting.add(name)
        self._renew(self._state.instances[name].spec)

        def ready(_: float) -> None:
            self._starting.discard(name)
            self._state.set_instance_state(name, InstanceState.READY, expected=InstanceState.STARTING)

        self._events.push(self._state.now_ms() / 1000 + self._start_s, Priority.MEMBERSHIP, ready)

    def _finish_drains(self) -> None:
        draining = [n for n, book in self._state.instances.items() if book.spec.state is InstanceState.DRAINING]
        for name in draining:
            if self._state.instances[name].queued_requests:
                steps = evacuate(
                    name, self._order, self._state.loads(), self._state.membership().instances,
                    reason="drain", decode_stall_s=self._stall_s,
                )  # fmt: skip
                drive_now(steps, self._led)
            if not self._state.instances[name].requests:
                self._state.set_instance_state(name, InstanceState.STANDBY, expected=InstanceState.DRAINING)


def paid_instances(state: PoolState) -> int:
    """Instances whose machines are in use: not those that are parked, nor those that drained."""
    serving = (InstanceState.READY, InstanceState.STARTING)
    return sum(book.spec.state in serving or bool(book.requests) for book in state.instances.values())
