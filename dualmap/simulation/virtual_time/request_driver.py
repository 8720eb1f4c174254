"""Drives the machines of a run's requests in virtual time, as a router does with awaits.

What is left out is the network: calls of the store have their answers at once. A driver has no rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import assert_never

from dualmap.scheduling.placing.placement import PlaceStatus, Search, SearchFailed
from dualmap.scheduling.queues.granting import Grant, grant_queue
from dualmap.scheduling.queues.queue_order import QueueHead
from dualmap.scheduling.request.machine import (
    AwaitGrant,
    AwaitInstance,
    AwaitTrial,
    AwaitTurn,
    Close,
    CountRetry,
    DecoderReserved,
    Effect,
    Enter,
    Event,
    Evict,
    Failed,
    Granted,
    InstanceReady,
    LeaveInstance,
    NoDecoder,
    NotPlaced,
    Phase,
    Post,
    PrefillPresumed,
    Refusal,
    Refuse,
    Register,
    ReleaseFirst,
    Rename,
    Renamed,
    RequestMachine,
    RequestRules,
    Reserve,
    Reserved,
    ReserveDecoder,
    Send,
    StartTimer,
    TrialOver,
    TurnedAway,
    TurnGoes,
    turned_away,
)
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.turn import Turn
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.steps import drive_now
from dualmap.scheduling.values import replaced
from dualmap.simulation.virtual_time.event_queue import EventQueue, Priority
from dualmap.simulation.virtual_time.simulated_fleet import SimulatedFleet
from dualmap.statestore.pool.runs import TurnStatus

OnMachine = Callable[[RequestMachine], None]


class RequestDriver:
    """The live requests of a run, by id."""

    def __init__(
        self,
        fleet: SimulatedFleet,
        rules: RequestRules,
        events: EventQueue,
        *,
        now_s: Callable[[], float],
        send: OnMachine,
        left: OnMachine,
        ended: OnMachine,
        stop: Callable[[RequestMachine], int],
    ) -> None:
        """``send`` gives a request, or the leg that is to be sent now, to its engine; ``left`` hears when it is no
        longer on its instances, ``ended`` when it is over. ``send`` may report further events of the request. ``stop``
        takes a request from its engine, and returns the tokens of its whole answer so far."""
        self.live: dict[str, RequestMachine] = {}
        self.retries = 0
        """Times that a request was tried again after a failure."""
        self.evictions = 0
        """Answers that left an instance for a request of a higher class."""
        self._fleet = fleet
        self._pool = fleet.pool
        self._rules = rules
        self._events = events
        self._now_s = now_s
        self._send, self._left, self._ended, self._stop = send, left, ended, stop
        self._hold_until_s: dict[str, float] = {}
        self._timers: dict[str, object] = {}
        self._awaiting: list[RequestMachine] = []
        """Requests that wait for the first instance, in the order of their arrival."""
        self._parked: dict[str, Turn] = {}
        """Turns that wait for memory, by the id of their request."""

    def report(self, machine: RequestMachine, event: Event | None) -> None:
        """Report an event, and what comes of its effects, until something else has to happen first."""
        while event is not None:
            effects, event = machine.on(event, self._now_s()), None
            for effect in effects:
                event = self._answer(machine, effect)

    def _answer(self, machine: RequestMachine, effect: Effect) -> Event | None:
        """Carry an effect out; returns the event that answers it, if that is there at once."""
        match effect:
            case Reserve():
                return self._reserve(effect.search)
            case Send():
                self._send(machine)
            case Post():
                self._post(machine, effect)
            case AwaitGrant():
                self._hold_until_s[machine.request_id] = self._now_s() + effect.within_s
                self.grant_from(effect.placed.reply.queue)
            case Evict():
                self._evict(machine, effect)
            case ReserveDecoder():
                return self._reserve_decoder(effect.search)
            case ReleaseFirst():
                for release in effect.releases:
                    self.grant_from(self._pool.release(release))
            case LeaveInstance():
                self._timers.pop(machine.request_id, None)
                self._left(machine)
            case Close():
                self.live.pop(machine.request_id, None)
                self._hold_until_s.pop(machine.request_id, None)
                self._parked.pop(machine.request_id, None)
                self._ended(machine)
            case CountRetry():
                self.retries += 1
            case StartTimer():
                self._start_timer(machine, effect.delay_s)
            case AwaitInstance():
                self._await_instance(machine, effect.within_s)
            case AwaitTurn():
                return self._admit(effect)
            case AwaitTrial():
                self._await_trial(machine, effect)
            case Rename():
                return self._rename(machine)
            case Refuse() | Enter() | Register():
                pass  # no client waits for the error, no gateway moves a request, and none is passed on
            case _:
                assert_never(effect)
        return None

    # placing -----------------------------------------------------------------------------------------------------
    def _reserve(self, search: Search) -> Event:
        try:
            course = drive_now(search.run(), self._fleet)
        except SearchFailed as failed:
            return NotPlaced(failed)
        placed = course.placed
        held = placed.reply.status is PlaceStatus.HELD
        return Reserved(course, None if held else self._member(placed.instance_id))

    def _reserve_decoder(self, search: Search) -> Event:
        try:
            placed = drive_now(search.run(), self._fleet).placed
        except SearchFailed:
            return NoDecoder()
        return DecoderReserved(placed, self._member(placed.instance_id))

    def _member(self, instance_id: str) -> InstanceSpec | None:
        return self._fleet.view.instances.get(instance_id)

    def _rename(self, machine: RequestMachine) -> Event:
        former = machine.request_id
        self.live.pop(former, None)
        self.live[former + "'"] = machine
        return Renamed(former + "'")

    # runs --------------------------------------------------------------------------------------------------------
    def _admit(self, effect: AwaitTurn) -> Event | None:
        turn = effect.turn
        (status,) = self._pool.admit((turn,), self._fleet.view.kv_capacity_tokens)
        if status is TurnStatus.GOES:
            return TurnGoes()
        if status is TurnStatus.REFUSED:
            return TurnedAway(Refusal.TOO_MANY_TURNS)
        self._parked[turn.turn_id] = turn
        return None

    def repeat_parked(self) -> None:
        """Look turns up that wait for memory."""
        turns = tuple(self._parked.values())
        statuses = self._pool.admit(turns, self._fleet.view.kv_capacity_tokens) if turns else ()
        self._pool.gone += [
            turn.turn_id for turn, status in zip(turns, statuses, strict=True) if status is TurnStatus.GOES
        ]

    def deliver_turns(self) -> Iterator[RequestMachine]:
        """Have turns go on that need not wait any more; gives each when it is placed, or over."""
        while self._pool.gone:
            turn_id = self._pool.gone.pop(0)
            machine = self.live.get(turn_id)
            if self._parked.pop(turn_id, None) is not None and machine is not None:
                self.report(machine, TurnGoes())
                yield machine

    # searches ----------------------------------------------------------------------------------------------------
    def _await_trial(self, machine: RequestMachine, effect: AwaitTrial) -> None:
        over = False

        def end(_: float = 0.0) -> None:
            nonlocal over
            if not over:
                over = True
                self._events.push(self._now_s(), Priority.ARRIVAL, lambda _: self.report(machine, TrialOver()))

        effect.trial.when_passed(end)
        self._events.push(self._now_s() + effect.within_s, Priority.ARRIVAL, end)

    def _await_instance(self, machine: RequestMachine, within_s: float) -> None:
        self._awaiting.append(machine)

        def give_up(_: float) -> None:
            if machine in self._awaiting:
                self._awaiting.remove(machine)
                self.report(machine, TurnedAway(Refusal.NOT_STARTED))

        self._events.push(self._now_s() + within_s, Priority.ARRIVAL, give_up)

    def admit_waiting(self) -> None:
        """Have the requests that wait for the first instance searched for again, if there is one."""
        if self._awaiting and self._fleet.view.ready:
            waiting, self._awaiting = self._awaiting, []
            for machine in waiting:
                self.report(machine, InstanceReady())

    def _evict(self, machine: RequestMachine, effect: Evict) -> None:
        """Have answers leave, once what is reported now is over: a stopped one is placed again at once."""
        rule, instance_id = self._rules.eviction, effect.instance_id
        assert rule is not None
        on_instance = [each for each in self.live.values() if each.answering_id == instance_id]
        under_way = [answer for each in on_instance if (answer := each.under_way()) is not None]
        leave = rule.evicted(machine.spec.claim.class_rank, effect.shortage, under_way)

        self._leave(instance_id, leave)

    def evict_lines(self, instance_id: str, count: int) -> None:
        """Have so many answers of the lowest class leave an instance, those first that lose least."""
        rule = self._rules.eviction
        if rule is None or count <= 0:
            return
        on_instance = [each for each in self.live.values() if each.answering_id == instance_id]
        under_way = [answer for each in on_instance if (answer := each.under_way()) is not None]
        self._leave(instance_id, rule.cheapest(under_way, count))

    def _leave(self, instance_id: str, leave: Sequence[str]) -> None:
        def stop(_: float) -> None:
            for request_id in leave:
                leaving = self.live.get(request_id)
                if leaving is not None and leaving.answering_id == instance_id and leaving.under_way() is not None:
                    self.evictions += 1
                    begun, tokens = leaving.phase is Phase.ANSWERING, self._stop(leaving)
                    evicted = InstanceFailure(FailureKind.EVICTED, f"for a request of a higher class on {instance_id}")
                    self.report(leaving, Failed(evicted, sent_tokens=tokens if begun else None))

        if leave:
            self._events.push(self._now_s(), Priority.ARRIVAL, stop)

    def _start_timer(self, machine: RequestMachine, delay_s: float) -> None:
        timer = self._timers[machine.request_id] = object()

        def fire(_: float) -> None:
            if self._timers.get(machine.request_id) is timer:
                self.report(machine, PrefillPresumed())

        self._events.push(self._now_s() + delay_s, Priority.ARRIVAL, fire)

    # queues ------------------------------------------------------------------------------------------------------
    def _post(self, machine: RequestMachine, post: Post) -> None:
        release: Release = post.release
        if post.teaches:
            release = replaced(release, note=machine.ttft_sample())
        self.grant_from(self._pool.release(release))

    def grant_from(self, queue: QueueHead | None) -> None:
        """Plan a queue that has room, by a transition's reply. The grants wait in the pool."""
        if queue is not None:
            drive_now(grant_queue(queue, self._rules.order), self._fleet)

    def deliver_grants(self) -> None:
        """Hand over what was granted meanwhile, and refuse what was deferred where late requests are refused."""
        while self._pool.granted:
            for grant in self._pool.take_grants():
                self._deliver(grant)
        if self._rules.refuses_late:
            self.turn_away(self._pool.take_deferred())

    def _deliver(self, grant: Grant) -> None:
        machine = self.live.get(grant.request_id)
        if machine is not None and machine.phase is Phase.HELD and machine.attempt == grant.attempt:
            self.report(machine, Granted(grant, self._member(grant.instance_id)))

    def turn_away(self, held: Iterable[StoredRequest]) -> None:
        """Refuse held requests that were held for as long as they may be."""
        now_s = self._now_s()
        found: list[tuple[str, Refusal]] = []
        for record in held:
            waited_s = (self._pool.now_ms() - record.enqueued_ms) / 1000
            why = turned_away(record, waited_s, self._rules.order, refuses_late=self._rules.refuses_late)
            if why is None and now_s >= self._hold_until_s.get(record.request_id, now_s + 1.0):
                why = Refusal.HELD_TOO_LONG
            if why is not None:
                found.append((record.request_id, why))
        self._turn_away(found)

    def _turn_away(self, requests: Iterable[tuple[str, Refusal]]) -> None:
        """Turn away requests. One that was granted meanwhile, as another left room, is not refused."""
        for request_id, why in requests:
            machine = self.live.get(request_id)
            if machine is not None and all(grant.request_id != request_id for grant in self._pool.granted):
                self.report(machine, TurnedAway(why))
