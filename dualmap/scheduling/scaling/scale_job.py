"""The leader's scaling round, as steps that a worker or the simulator drives.

A decision is recorded before it is acted on, so that a leader that dies in between leaves it to the next one; and every
act states what it expects to find, so that carrying a decision out twice does nothing twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import exp
from typing import Protocol

from dualmap.scheduling.estimates.load_window import WINDOW_MS
from dualmap.scheduling.estimates.ttft import queueing_s
from dualmap.scheduling.scaling.decode_plan import DecodePlanner
from dualmap.scheduling.scaling.leaving import plan_leaving, plan_leaving_in_order
from dualmap.scheduling.scaling.scale_plan import FleetFigures, Plan, ScalePlanner, ScaleRule
from dualmap.scheduling.scaling.scale_record import DecisionStatus, ScaleEntry, ScaleRecord
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.instance_lifecycle import InstanceEvent, next_state
from dualmap.scheduling.state.view import is_ready
from dualmap.scheduling.steps import Step, Steps
from dualmap.scheduling.values import value

RECENT_BLOCKS = 2048
"""Blocks of an instance that are compared to find out what only it has."""
MAX_CALLS = 5
"""Calls of an actuator that fails, before the decision is given up."""
OTHERS_TERM_MS = 60_000
"""A decision under other bounds keeps this leader's hands off for so long: two fleets may share the pool."""
FAILED_PAUSE_MS = 60_000
"""Time after a failed decision before the next one that starts instances."""

_S, _E = InstanceState, InstanceEvent


@value
class FleetNow:
    """The fleet as one round sees it."""

    now_ms: int
    loads: Mapping[str, InstanceLoad]
    instances: Mapping[str, InstanceSpec]
    waiting: int = 0
    """Requests that wait at replicas for the first instance."""
    live: int = 0
    """Requests that replicas serve now, those that are not scheduled among them."""
    ended: int = 0
    """Requests that replicas have served since they began. It falls where one restarts."""
    answer_pace: float = 0.0
    """Mean time per output token of recent answers, in its SLO; 0 where none was seen."""


@value
class ActuatorReply:
    """An actuator's reply to one call."""

    accepted: bool
    text: str = ""
    retry_after_s: float = 0.0
    """Pause before the next call that the other side requests."""


class ScalingPort(Protocol):
    """Calls that the scaling round makes."""

    def now(self) -> Awaitable[FleetNow]: ...

    def scaling(self, role: str, /) -> Awaitable[ScaleRecord]: ...

    def record_scaling(self, record: ScaleRecord, entry: ScaleEntry, /) -> Awaitable[None]: ...

    def recent_blocks(self, instance_ids: Sequence[str], limit: int, /) -> Awaitable[Mapping[str, Sequence[int]]]: ...

    def set_instance_state(
        self, instance_id: str, state: InstanceState, /, *, expected: InstanceState
    ) -> Awaitable[bool]: ...

    def actuate(self, record: ScaleRecord, /) -> Awaitable[ActuatorReply | None]: ...


@value
class ReadFleet(Step[ScalingPort, FleetNow]):
    """Read what the round looks at."""

    def on(self, port: ScalingPort) -> Awaitable[FleetNow]:
        return port.now()


@value
class ReadScaling(Step[ScalingPort, ScaleRecord]):
    """Read the last decision, on the decode instances or on all others."""

    role: str

    def on(self, port: ScalingPort) -> Awaitable[ScaleRecord]:
        return port.scaling(self.role)


@value
class RecordScaling(Step[ScalingPort, None]):
    """Record a decision, and add a line to the log of scaling."""

    record: ScaleRecord
    entry: ScaleEntry

    def on(self, port: ScalingPort) -> Awaitable[None]:
        return port.record_scaling(self.record, self.entry)


@value
class ReadRecentBlocks(Step[ScalingPort, Mapping[str, Sequence[int]]]):
    """Read the blocks that each instance was last given."""

    instance_ids: tuple[str, ...]
    limit: int

    def on(self, port: ScalingPort) -> Awaitable[Mapping[str, Sequence[int]]]:
        return port.recent_blocks(self.instance_ids, self.limit)


@value
class SetInstanceState(Step[ScalingPort, bool]):
    """Change an instance's state, if it is in the expected one."""

    instance_id: str
    state: InstanceState
    expected: InstanceState

    def on(self, port: ScalingPort) -> Awaitable[bool]:
        return port.set_instance_state(self.instance_id, self.state, expected=self.expected)


@value
class Actuate(Step[ScalingPort, ActuatorReply | None]):
    """Have the actuator carry a decision out; None while it works on its last call."""

    record: ScaleRecord

    def on(self, port: ScalingPort) -> Awaitable[ActuatorReply | None]:
        return port.actuate(self.record)


class Planner(Protocol):
    """The plan that decides the size: ``scheduling.scaling.scale_plan``, or another project's in the simulator."""

    def observe(self, now: FleetFigures) -> None: ...

    def plan(self) -> Plan: ...


class WorkMeter:
    """The work that arrived between two looks, from the decayed sums that the store keeps for each instance."""

    def __init__(self) -> None:
        self._former: dict[str, float] = {}
        self._former_ms: int | None = None

    def read(self, now_ms: int, loads: Mapping[str, InstanceLoad]) -> tuple[float, float]:
        """(seconds, seconds of prefill assigned since the last call); (0, 0) at the first."""
        elapsed_ms = 0 if self._former_ms is None else max(0, now_ms - self._former_ms)
        kept, work_s = exp(-elapsed_ms / WINDOW_MS), 0.0
        for name, load in loads.items():
            if elapsed_ms and name in self._former:
                work_s += max(0.0, load.window_tokens - kept * self._former[name]) / load.prefill_tokens_per_s
        self._former = {name: load.window_tokens for name, load in loads.items()}
        self._former_ms = now_ms
        return elapsed_ms / 1000, work_s


@dataclass(slots=True)
class ScaleKeeper:
    """One leader's term of scaling the decode instances of a pool, or all others. Each of both has its own bounds, plan
    and record, and knows nothing of the other."""

    settings: AutoscaleSettings
    worker_id: str
    slo_s: float
    block_tokens: int
    configured_spares: tuple[str, ...] = ()
    """Instances that the configuration parks from the start."""
    _: KW_ONLY
    time_scale: float = 1.0
    """Engine seconds in one of the store's."""
    arrived: Callable[[], int] = lambda: 0
    """Requests that were routed since the pool began, as far as the leader has read."""
    record: ScaleRecord | None = None
    """The record as of the last round; None before the first."""
    plan: Plan = field(default_factory=lambda: Plan(0, "nothing seen yet"))
    """The plan of the last round."""
    hands_off: str | None = None
    """Why the size is left alone, if it is."""
    planner: Planner | None = None
    """None: the fleet's own."""
    decodes: bool = False
    """Whether it scales the decode instances."""
    _meter: WorkMeter = field(default_factory=WorkMeter)
    _failed: dict[str, int] = field(default_factory=dict)
    """Spares that did not become ready, and when that was found."""
    _arrived: int | None = None
    _ended: int | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        if self.planner is None:
            rule = ScaleRule(settings.min_instances, settings.max_instances, settings.margin, settings.idle_s)
            self.planner = DecodePlanner(rule) if self.decodes else ScalePlanner(rule)

    def tick(self) -> Steps[ScalingPort, ScaleRecord]:
        """One round. The record as it is after it."""
        if self.record is None:
            self.record = yield from self._first_record()
        fleet = yield from ReadFleet()
        now = self._own(fleet)
        figures = self._figures(now)
        assert self.planner is not None
        self.planner.observe(figures)
        self.plan = self.planner.plan()
        self.hands_off = self._find_rival(now, self.record)
        if self.record.is_open:
            yield from self._continue(now, self.record)
        elif self.hands_off is None and self._is_due(now, figures):
            yield from self._decide(now, figures)
        return self.record

    # looking -----------------------------------------------------------------------------------------------------
    def _first_record(self) -> Steps[ScalingPort, ScaleRecord]:
        record = yield from ReadScaling(self._role)
        spares = tuple(sorted({*record.spares, *self.configured_spares}))
        return replace(record, spares=spares)

    @property
    def _role(self) -> str:
        return Role.DECODE.value if self.decodes else ""

    def _own(self, now: FleetNow) -> FleetNow:
        """The fleet without the instances of the other role."""
        own = {name: spec for name, spec in now.instances.items() if (spec.role is Role.DECODE) is self.decodes}
        loads = {name: load for name, load in now.loads.items() if name in own}
        return replace(now, instances=own, loads=loads)

    def _figures(self, now: FleetNow) -> FleetFigures:
        elapsed_s, work_s = self._meter.read(now.now_ms, now.loads)
        serving = [now.loads[name] for name, spec in now.instances.items() if is_ready(spec) and name in now.loads]
        arrived, self._arrived = self._arrived, self.arrived()
        ended, self._ended = self._ended, now.ended
        late = [late_s for load in serving if (late_s := self._late_s(load)) > 0]
        return FleetFigures(
            at_s=now.now_ms / 1000 * self.time_scale,
            ready=len(serving),
            starting=_starting(now),
            elapsed_s=elapsed_s * self.time_scale,
            work_s=work_s * self.time_scale,
            late_s=sum(late),
            late_instances=len(late),
            kv_demand=sum(load.kv_demand for load in serving),
            sequences=sum(load.running_share for load in serving),
            answer_pace=now.answer_pace,
            arrived_requests=0 if arrived is None else self._arrived - arrived,
            held_requests=sum(load.queued_requests for load in serving),
            running_requests=sum(load.running_requests for load in serving),
            waiting_requests=now.waiting,
            is_used=now.live > 0 or ended != now.ended,
        )

    def _late_s(self, load: InstanceLoad) -> float:
        """Late work of an instance, in seconds of its engine."""
        deferred_s = load.deferred_tokens / load.prefill_tokens_per_s
        return self.time_scale * max(deferred_s, queueing_s(load) - self.slo_s / self.time_scale)

    def _spares(self, now: FleetNow, record: ScaleRecord) -> list[str]:
        """Parked instances that may be started, those that failed lately last."""
        parked = [name for name in record.spares if name in now.instances and now.instances[name].state is _S.STANDBY]
        return sorted(parked, key=lambda name: (self._failed.get(name, 0), name))

    # deciding ----------------------------------------------------------------------------------------------------
    def _find_rival(self, now: FleetNow, record: ScaleRecord) -> str | None:
        """Why this leader leaves the size alone, if it does."""
        rival = record.by != self.worker_id and record.bounds not in ("", self.settings.bounds)
        if rival and now.now_ms - record.at_ms < OTHERS_TERM_MS:
            return f"{record.by} decided with other bounds ({record.bounds}): give all workers the same settings"
        return None

    def _is_due(self, now: FleetNow, figures: FleetFigures) -> bool:
        record, wanted = self.record, self.plan.wanted
        assert record is not None
        if self.settings.actuator == "none":
            return wanted != (record.wanted if record.decision_id else figures.size)
        if record.status is DecisionStatus.FAILED and wanted > figures.size:
            return (now.now_ms - record.at_ms) * self.time_scale >= FAILED_PAUSE_MS
        return wanted != figures.size and (
            wanted < figures.size or self.settings.actuator != "standby" or bool(self._spares(now, record))
        )

    def _decide(self, now: FleetNow, figures: FleetFigures) -> Steps[ScalingPort, None]:
        former, plan = self.record, self.plan
        assert former is not None
        starting: tuple[str, ...] = ()
        leaving: tuple[str, ...] = ()
        publish_only = self.settings.actuator == "none"
        if not publish_only and plan.wanted > figures.size:
            starting = tuple(self._spares(now, former)[: plan.wanted - figures.size])
        elif not publish_only:
            leaving = yield from self._leaving(now, figures.size - plan.wanted)
        record = ScaleRecord(
            role=self._role,
            decision_id=former.decision_id + 1,
            at_ms=now.now_ms,
            by=self.worker_id,
            bounds=self.settings.bounds,
            size=figures.size,
            wanted=plan.wanted,
            reason=plan.reason,
            status=DecisionStatus.PUBLISHED if publish_only else DecisionStatus.OPEN,
            starting=starting,
            leaving=leaving,
            spares=tuple(name for name in former.spares if name not in starting),
        )
        yield from self._write(now, record, "decided", self._in_words(record))
        if record.is_open:
            yield from self._continue(now, record)

    def _in_words(self, record: ScaleRecord) -> str:
        who = f"; starts {', '.join(record.starting)}" if record.starting else ""
        who += f"; drains {', '.join(record.leaving)}" if record.leaving else ""
        return f"{record.size} -> {record.wanted}: {record.reason}{who}"

    def _leaving(self, now: FleetNow, count: int) -> Steps[ScalingPort, tuple[str, ...]]:
        serving = {name: now.loads[name] for name, spec in now.instances.items() if is_ready(spec)}
        if self.settings.leaves_in_order:
            return plan_leaving_in_order(serving, count)
        blocks = yield from ReadRecentBlocks(tuple(serving), RECENT_BLOCKS)
        return plan_leaving(serving, blocks, self.block_tokens, count)

    # acting ------------------------------------------------------------------------------------------------------
    def _continue(self, now: FleetNow, record: ScaleRecord) -> Steps[ScalingPort, None]:
        """Carry the open decision on, as far as that is possible now."""
        if record.wanted > record.size:
            yield from self._grow(now, record)
        else:
            yield from self._shrink(now, record)

    def _grow(self, now: FleetNow, record: ScaleRecord) -> Steps[ScalingPort, None]:
        states = {name: now.instances[name].state for name in record.starting if name in now.instances}
        for name, state in states.items():
            if state is _S.STANDBY:
                yield from self._move(name, state, _E.RESUME)
        outside = record.wanted - record.size - len(record.starting)
        if outside > 0 and self.settings.actuator != "standby" and not record.accepted:
            record = yield from self._actuate(now, record)
            if not record.is_open:
                return
        size = _ready(now)
        lost = [name for name in record.starting if states.get(name) in (None, _S.DOWN)]
        waited_s = (now.now_ms - record.at_ms) / 1000 * self.time_scale
        own = all(states.get(name) is _S.READY for name in record.starting)
        if own and (outside <= 0 or size >= record.wanted or self.settings.actuator == "standby"):
            yield from self._close(now, record, DecisionStatus.DONE, f"{size} ready after {waited_s:.0f} s")
        elif waited_s > self.settings.gives_up_s or lost:
            yield from self._give_up(now, record, states, waited_s)
        elif self.plan.wanted > record.wanted and now.now_ms > record.at_ms:
            yield from self._supersede(now, record)

    def _supersede(self, now: FleetNow, record: ScaleRecord) -> Steps[ScalingPort, None]:
        """The load grew meanwhile: what is starting goes on, a further decision adds to it."""
        size = _starting(now) + _ready(now)
        if size < record.wanted or (self.settings.actuator == "standby" and not self._spares(now, record)):
            return
        yield from self._close(now, record, DecisionStatus.DONE, "more are needed before all were ready")

    def _give_up(
        self, now: FleetNow, record: ScaleRecord, states: Mapping[str, InstanceState], waited_s: float
    ) -> Steps[ScalingPort, None]:
        late = [name for name in record.starting if states.get(name) is not _S.READY]
        for name in late:
            self._failed[name] = now.now_ms
            if states.get(name) is _S.STARTING:
                yield from self._move(name, _S.STARTING, _E.PARK)
        parked = {name for name in late if states.get(name) in (_S.STARTING, _S.STANDBY)}
        record = replace(record, spares=tuple(sorted({*record.spares, *parked})))
        missing = record.wanted - _ready(now)
        outcome = f"{', '.join(late)} not ready after {waited_s:.0f} s" if late else f"{missing} did not come"
        yield from self._close(
            now, record, DecisionStatus.FAILED, f"{outcome} ({waited_s:.0f} s)" if not late else outcome
        )

    def _actuate(self, now: FleetNow, record: ScaleRecord) -> Steps[ScalingPort, ScaleRecord]:
        """Call the actuator, unless its last answer is not in yet."""
        reply = yield from Actuate(record)
        if reply is None:
            return record
        record = replace(record, asked=record.asked + 1, accepted=int(reply.accepted))
        event = "accepted" if reply.accepted else "refused"
        yield from self._write(now, record, event, reply.text)
        # An instance that drained and cannot be removed yet costs money, and serves no request: it is never given up.
        # Load that returns withdraws the decision.
        gives_up = not (self.settings.removes_leaving and record.leaving)
        if not reply.accepted and record.asked >= MAX_CALLS and gives_up:
            outcome = f"the actuator failed {record.asked} times: {reply.text}"
            yield from self._close(now, record, DecisionStatus.FAILED, outcome)
        return self.record or record

    def _shrink(self, now: FleetNow, record: ScaleRecord) -> Steps[ScalingPort, None]:
        states = {name: now.instances[name].state for name in record.leaving if name in now.instances}
        busy = [name for name, state in states.items() if state in (_S.READY, _S.DRAINING)]
        ready = _ready(now)
        undrained = [name for name in busy if states[name] is _S.READY]
        if self.plan.wanted > ready - len(undrained) and now.now_ms > record.at_ms:
            yield from self._take_back(now, record, states)
            return
        for name in undrained:
            if ready > self.settings.min_instances:
                ready -= 1
                yield from self._move(name, _S.READY, _E.DRAIN)
        if busy:
            return
        if not self.settings.removes_leaving:
            record = replace(record, spares=tuple(sorted({*record.spares, *states})))
        if self.settings.actuator != "standby" and not record.accepted:
            record = yield from self._actuate(now, record)
            if not (record.accepted and record.is_open):
                return
        waited_s = (now.now_ms - record.at_ms) / 1000 * self.time_scale
        yield from self._close(now, record, DecisionStatus.DONE, f"drained after {waited_s:.0f} s")

    def _take_back(
        self, now: FleetNow, record: ScaleRecord, states: Mapping[str, InstanceState]
    ) -> Steps[ScalingPort, None]:
        for name, state in states.items():
            if state is _S.DRAINING:
                yield from self._move(name, state, _E.RESUME)
        parked = {name for name, state in states.items() if state is _S.STANDBY}
        record = replace(record, spares=tuple(sorted({*record.spares, *parked})))
        yield from self._close(now, record, DecisionStatus.WITHDRAWN, f"load returned: {self.plan.reason}")

    def _move(self, name: str, state: InstanceState, event: InstanceEvent) -> Steps[ScalingPort, None]:
        yield from SetInstanceState(name, next_state(state, event), state)

    def _close(
        self, now: FleetNow, record: ScaleRecord, status: DecisionStatus, outcome: str
    ) -> Steps[ScalingPort, None]:
        yield from self._write(now, record.closed(status, outcome), status.value, outcome)

    def _write(self, now: FleetNow, record: ScaleRecord, event: str, text: str) -> Steps[ScalingPort, None]:
        entry = ScaleEntry(now.now_ms, record.decision_id, event, f"{self._role}: {text}" if self._role else text)
        yield from RecordScaling(record, entry)
        self.record = record


def _ready(now: FleetNow) -> int:
    return sum(is_ready(spec) for spec in now.instances.values())


def _starting(now: FleetNow) -> int:
    return sum(spec.state is _S.STARTING for spec in now.instances.values())
