"""Requests whose machines are driven by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Self

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.placing.decision import Decision, Reason
from dualmap.scheduling.placing.placement import (
    Chosen,
    Claim,
    Observation,
    Placed,
    PlaceReply,
    PlaceStatus,
    SearchCourse,
    SearchFailed,
)
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.evidence import Evidence
from dualmap.scheduling.request.machine import (
    Arrived,
    DecoderReserved,
    Effect,
    Ended,
    Event,
    Failed,
    FirstToken,
    NotPlaced,
    Phase,
    Post,
    PrefillEnded,
    PrefillPresumed,
    ReleaseFirst,
    RequestMachine,
    RequestRules,
    RequestSpec,
    Reserved,
    Sent,
)
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.request.retry_budget import RetryBudget
from dualmap.scheduling.request.waiting_room import WaitingRoom
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.tier_load import NO_LOAD, TierLoad
from dualmap.scheduling.state.view import ClusterView

CHAIN = Chain((1, 2, 3), 16, 48)
CLOSED = InstanceFailure(FailureKind.CLOSED)


def member(instance_id: str, role: Role = Role.MIXED) -> InstanceSpec:
    return InstanceSpec(instance_id, f"http://{instance_id}:1", role=role, state=InstanceState.READY)


@dataclass
class Fleet:
    """A fleet as a machine sees it."""

    members: tuple[InstanceSpec, ...]
    learned: Learned = field(default_factory=Learned)

    @property
    def view(self) -> ClusterView:
        instances = {spec.instance_id: spec for spec in self.members}
        return ClusterView.build(epoch=1, tree_version=1, instances=instances, tree=HotnessTree())

    @property
    def sight(self) -> Self:
        return self

    def blocked(self) -> frozenset[str]:
        return frozenset()

    def window_delay_s(self, spec: InstanceSpec, uncached_tokens: int) -> float:
        return 7.0


class Life:
    """A machine, a clock, and the effects of the last event."""

    def __init__(
        self,
        *,
        split: bool = False,
        decode_first: bool = False,
        max_tries: int = 3,
        budget: float = 100.0,
        room: WaitingRoom | None = None,
        admit_runs: bool = False,
        **spec: object,
    ) -> None:
        settings = SchedulingSettings(policy="dualmap", max_hold_s=60.0, admit_runs=admit_runs)
        roles = {"a": Role.PREFILL, "b": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE} if split else {}
        members = tuple(member(name, role) for name, role in roles.items()) or tuple(map(member, "abc"))
        if room is not None:
            members = ()
        self.fleet = Fleet(members)
        self.rules = RequestRules(
            replica_id="r",
            fleet=self.fleet,
            policy=build_policy(settings),
            order=queue_order_of(settings),
            scheduling=settings,
            max_tries=max_tries,
            decode_first=decode_first,
            evidence=Evidence(
                retries=RetryBudget(0.0, budget / 10, 0.0), continuations=RetryBudget(0.0, 0.0, 0.0, burst=budget)
            ),
            waiting_room=room,
        )
        self.now_s = 100.0
        claim = Claim(**{each.name: spec.pop(each.name) for each in fields(Claim) if each.name in spec})
        known = {"prompt_hash": 7, "chain": CHAIN, "slo_s": 5.0, "claim": claim, "may_split": split, **spec}
        self.machine = RequestMachine("x", RequestSpec(**known), self.rules, self.now_s)
        self.effects: tuple[Effect, ...] = ()

    def on(self, event: Event, *, after_s: float = 0.0) -> tuple[Effect, ...]:
        self.now_s += after_s
        self.effects = self.machine.on(event, self.now_s)
        return self.effects

    @property
    def names(self) -> list[str]:
        """The last effects, by name."""
        return [type(effect).__name__ for effect in self.effects]

    def one(self, kind: type) -> Effect:
        """The last effect of this kind."""
        (found,) = [effect for effect in self.effects if isinstance(effect, kind)]
        return found

    @property
    def released(self) -> list[tuple[str, int | None]]:
        """The releases of the last effects that leave nothing: request and attempt."""
        posted = [effect.release for effect in self.effects if isinstance(effect, Post)]
        waited = [each for effect in self.effects if isinstance(effect, ReleaseFirst) for each in effect.releases]
        return [(each.request_id, each.attempt) for each in (*waited, *posted) if not each.instance_id]

    def placed(
        self, instance_id: str = "a", *, held: bool = False, leg: Leg = Leg.WHOLE, loads: TierLoad = NO_LOAD
    ) -> Placed:
        status = PlaceStatus.HELD if held else PlaceStatus.DISPATCHED
        reply = PlaceReply(status, Observation(1, 1, {}), Chosen(instance_id, "b", leg, 48, 0.4, loads=loads), 1234)
        return Placed(reply, ("a", "b"), Decision(instance_id, 0, 48, 1.5, Reason.COST, "b", 48))

    def park(self) -> None:
        """Arrive as a turn whose run waits for memory."""
        self.on(Arrived())
        self.on(NotPlaced(SearchFailed(parked=True)))

    def reserve(self, instance_id: str = "a", *, leg: Leg = Leg.WHOLE) -> None:
        self.on(
            Reserved(
                course_of(self.placed(instance_id, leg=leg)), self.rules.fleet.sight.view.instances.get(instance_id)
            )
        )

    def hold(self) -> None:
        self.on(Arrived())
        self.on(Reserved(course_of(self.placed(held=True)), None))

    def dispatch(self, instance_id: str = "a", *, leg: Leg = Leg.WHOLE) -> None:
        self.on(Arrived())
        self.reserve(instance_id, leg=leg)

    def stage(self) -> None:
        """Its prefill leg has answered."""
        self.dispatch(leg=Leg.PREFILL)
        self.on(Sent())
        self.on(PrefillEnded(), after_s=1.0)

    def decode(self, instance_id: str = "d") -> None:
        self.on(DecoderReserved(self.placed(instance_id, leg=Leg.DECODE), member(instance_id, Role.DECODE)))


def course_of(placed: Placed) -> SearchCourse:
    """The course of a search that was placed at its first try."""
    return SearchCourse((placed,), trips=1)


def in_phase(phase: Phase) -> Life:
    """A request that came there by events."""
    life = Life(
        split=phase in (Phase.PAIRING, Phase.PAIRED, Phase.STAGED, Phase.DECODING),
        decode_first=phase in (Phase.PAIRING, Phase.PAIRED),
        streams=phase is not Phase.PRESUMED,
        room=WaitingRoom(3, 60.0) if phase is Phase.AWAITING else None,
        admit_runs=phase is Phase.PARKED,
    )
    match phase:
        case Phase.NEW:
            pass
        case Phase.ADMITTING:
            suspect(life)
            life.on(Arrived())
        case Phase.PLACING:
            life.on(Arrived())
        case Phase.PARKED:
            life.park()
        case Phase.AWAITING:
            life.on(Arrived())
            life.on(NotPlaced(SearchFailed()))
        case Phase.HELD:
            life.hold()
        case Phase.STAGED | Phase.DECODING:
            life.stage()
            if phase is Phase.DECODING:
                life.decode()
        case Phase.PAIRING | Phase.PAIRED:
            life.dispatch(leg=Leg.PREFILL)
            if phase is Phase.PAIRED:
                life.decode()
        case _:
            life.dispatch()
            if phase is not Phase.DISPATCHED:
                life.on(Sent())
            if phase is Phase.PRESUMED:
                life.on(PrefillPresumed())
            if phase in (Phase.ANSWERING, Phase.BROKEN_OFF):
                life.on(FirstToken())
            if phase is Phase.BROKEN_OFF:
                life.on(Failed(CLOSED, begun=True))
            if phase is Phase.DONE:
                life.on(Ended(Outcome.COMPLETED))
    assert life.machine.phase is phase
    return life


def suspect(life: Life) -> None:
    """Engines have died of its prompt, and another copy of it is on trial."""
    quarantine = life.rules.evidence.quarantine
    quarantine.answered("c", life.now_s)
    quarantine.died(7, "c", "other", life.now_s, life.now_s)
    quarantine.admit(7, life.now_s)
