"""One request of this replica: its machine, driven with awaits over the store."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

from dualmap.router.errors import RouterError, from_exception
from dualmap.router.pool.grant_waiters import GrantWaiter, ReservationLostError, TurnedAwayError
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.router.prompts.prompt import ReadPrompt
from dualmap.router.requests.context import ReplicaContext
from dualmap.router.requests.deadlines import Deadline
from dualmap.router.requests.explain import Explanation, explanation
from dualmap.router.requests.refusals import outcome_of, refusal
from dualmap.router.requests.request_counts import (
    count_end,
    count_first_token,
    count_placed,
    count_turn,
    count_usage,
)
from dualmap.router.telemetry.recording import Recorded, TrafficRecorder
from dualmap.router.tenants.rate_limits import refused_fields
from dualmap.router.timers import TimerHandle
from dualmap.scheduling.placing.placement import PlaceStatus, SearchCourse, SearchFailed
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.charge import NOTHING_COUNTED, Counted
from dualmap.scheduling.request.machine import (
    TO_BE_SENT,
    Arrived,
    AwaitGrant,
    AwaitInstance,
    AwaitTrial,
    AwaitTurn,
    Close,
    CountRetry,
    DeadlinePassed,
    DecoderReserved,
    Effect,
    Ended,
    Enter,
    Event,
    Evict,
    Failed,
    FirstToken,
    Granted,
    InstanceReady,
    LeaveInstance,
    Moved,
    NoDecoder,
    NotPlaced,
    Post,
    PrefillEnded,
    PrefillPresumed,
    Refusal,
    Refuse,
    Register,
    Registered,
    ReleaseFirst,
    Rename,
    Renamed,
    RequestMachine,
    ReservationLost,
    Reserve,
    Reserved,
    ReserveDecoder,
    Send,
    Sent,
    StartTimer,
    TrialOver,
    TurnedAway,
    TurnGoes,
)
from dualmap.scheduling.request.outcome import ANSWERED, FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.request.stored_request import stored_requests
from dualmap.scheduling.state.instance import InstanceSpec, Running
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.steps import drive
from dualmap.scheduling.tenants.classes import class_name
from dualmap.statestore.errors import StoreError

_WHOLE: Final = Leg.WHOLE
_PLACE_HELD: Final = PlaceStatus.HELD
_ARRIVED: Final = Arrived()
_SENT: Final = Sent()
_NO_USAGE: Final = Usage()
_FIRST_TOKEN: Final = FirstToken()
_PREFILL_PRESUMED: Final = PrefillPresumed()
_DEADLINE_PASSED: Final = DeadlinePassed()


class LiveRequest:
    """A driver without a rule of a request's life: it reports events, and carries out the effects of the machine.

    The caller that took it in must call ``finish``. A method that raises, or is cancelled, has done so already.
    """

    _timer: TimerHandle | None = None
    _waiter: GrantWaiter | None = None
    """Made in the same step as the reservation: its grant can arrive before anything else happens."""
    _uncounted: SearchCourse | None = None
    """The course of the last placement, until it is counted."""
    _expected_cached: int | None = None
    """Prompt tokens that its instance was expected to find when it was sent there; None: not sent yet."""
    _continued_at_s: float | None = None
    """The time since which its client waits for the rest of its answer; None: it does not."""
    _deadline: Deadline | None = None
    """The deadline, until it is counted whether the request was on time; None: that is done, or it has none."""
    _is_overdue: bool = False
    """The deadline has passed, and the request waits for its first token, as far as that is seen."""
    on_leave: Callable[[InstanceFailure | None], None] | None = None
    """Called when it leaves its instances, with what failed it there, if anything did."""
    on_evict: Callable[[str], None] | None = None
    """Called when it is to leave its instance for a request of a higher class, with the reason."""
    adapter_wait_s = 0.0
    """The time that it has waited for loads of its adapter."""
    abort_requested: bool = False
    """The client has requested the end by the id: an answer that its instance aborts then has not failed."""

    def __init__(
        self,
        machine: RequestMachine,
        inference_request: InferenceRequest,
        pool: ServedPool,
        prompt: ReadPrompt | None,
        context: ReplicaContext,
    ) -> None:
        """``prompt`` is None for a request that is passed on."""
        self.machine = machine
        self.inference_request = inference_request
        self.pool = pool
        self.prompt = prompt
        self.context = context
        self._now_s = context.clock.monotonic_s

    # what the doors read -----------------------------------------------------------------------------------------
    @property
    def request_id(self) -> str:
        """The id in the fleet. It is the client's own, unless another live request has that."""
        return self.machine.request_id

    @property
    def expected_cached_tokens(self) -> int:
        """Prompt tokens that its instance is expected to find in its KV cache."""
        expected = self._expected_cached
        return self._expect_cached() if expected is None else expected

    def _expect_cached(self) -> int:
        machine, pool = self.machine, self.pool
        target, chain = machine.target, machine.spec.chain
        if target is None or chain is None:
            return 0
        if self._is_hybrid_there:
            cached = max(0, chain.prompt_tokens - machine.uncached_tokens)
        else:
            cached = pool.recent_answers.cached(target.instance_id, chain, machine.uncached_tokens)
        if cached:
            running = self._ran_there()
            cached = pool.contexts_ahead.left(target.instance_id, chain, cached, target.kv_capacity_tokens, running)
        return machine.spec.stored_tokens + cached

    @property
    def _is_hybrid_there(self) -> bool:
        """Whether its instance was known to run a hybrid model when it was placed: it finds nothing of an answer then,
        and what it finds of a prompt is booked."""
        estimate = self.machine.estimate
        return estimate is not None and estimate.reply.chosen.is_hybrid

    def _ran_there(self) -> Running | None:
        """The requests that the store counted as running on its instance when it was dispatched."""
        machine = self.machine
        if machine.grant is not None or machine.estimate is None:
            return machine.grant
        chosen = machine.estimate.reply.chosen
        return chosen if chosen.instance_id == machine.instance_id else None

    def limit_fields(self) -> Sequence[tuple[bytes, bytes]]:
        """Header fields that tell its client what is left of its limits."""
        draws = self.machine.spec.claim.draws
        if draws is None:
            return ()
        return self.context.limit_reports.fields(self.inference_request.path, draws, self.machine, self._now_s())

    # what happens to it ------------------------------------------------------------------------------------------
    def place(self) -> Awaitable[None]:
        """Find an instance, and wait until it may be sent there.

        Raises:
            RouterError: it is refused. ``finish`` has been called.
        """
        return self._run(_ARRIVED)

    def sent(self) -> None:
        """Report that it is on its way, and do what was put off so as not to delay it. Never waits."""
        self._count_placed()
        machine = self.machine
        chain = machine.spec.chain
        if chain is not None and machine.phase in TO_BE_SENT:
            self._expected_cached = self._expect_cached()  # as it is sent: others come behind it, or are over
            self._note_context(chain)
        self._report(_SENT)
        if self.on_evict is not None:
            self.pool.evictable.enter(machine.instance_id, self)

    def _note_context(self, chain: Chain) -> None:
        """Note what its answer will hold of its instance's cache."""
        machine = self.machine
        if machine.leg is _WHOLE:
            output_tokens = machine.spec.expected_output_tokens
            self.pool.contexts_ahead.sent(machine.instance_id, machine.request_id, chain, output_tokens)

    def first_token(self) -> None:
        """Report the first token of its instance. Never waits; repetitions change nothing."""
        machine = self.machine
        is_first = machine.first_token_s is None
        self._report(_FIRST_TOKEN)
        if self._continued_at_s is not None:
            self.pool.metrics.continuation_gap_s.observe(self._now_s() - self._continued_at_s)
            self._continued_at_s = None
        if is_first and machine.first_token_s is not None and machine.spec.chain is not None:
            count_first_token(machine, self.pool.metrics)
            self._count_on_time()

    def watch_deadline(self) -> None:
        """Have it judged when its TTFT deadline passes."""
        machine = self.machine
        self._deadline = self.context.deadlines.watch(self, machine.started_s + machine.spec.slo_s)

    def deadline_passed(self) -> None:
        """Report that its TTFT deadline has passed. Never waits."""
        self._report(_DEADLINE_PASSED)
        if self.machine.on_time is False and not self.machine.is_done:
            self._is_overdue = True
            self.pool.metrics.overdue.value += 1
        self._count_on_time()

    def _count_on_time(self) -> None:
        """Count once whether it was on time, as soon as it is judged; and that it is overdue no more. At its end it may
        not be judged: its client left in time, or was refused for its own doing."""
        deadline, machine = self._deadline, self.machine
        if deadline is None:
            if self._is_overdue:
                self._is_overdue = False
                self.pool.metrics.overdue.value -= 1
            return
        on_time = machine.on_time
        if on_time is not None or machine.is_done:
            deadline.forget()
            self._deadline = None
            if on_time is not None:
                self.pool.metrics.count_on_time(on_time, machine.outcome)

    async def prefill_ended(self) -> None:
        """Report that its prefill leg has answered. Afterwards its decode leg is to be sent, unless none takes that.

        Raises:
            RouterError: it is refused. ``finish`` has been called.
        """
        await self._run(PrefillEnded())

    async def failed(self, event: Failed) -> None:
        """An instance failed it, and its client has nothing of the answer, or can have the rest from another one:
        ``broke_off`` is for all others. Afterwards ``to_send``, and where to, name the new try.

        Raises:
            RouterError: no try, budget or instance is left. ``finish`` has been called.
        """
        self._count_placed()
        if event.sent_tokens is not None:
            self._continued_at_s = self._now_s()
        if event.failure.status == HTTPStatus.NOT_FOUND:
            event = await self._doubt(event)
        await self._run(event)

    async def _doubt(self, event: Failed) -> Failed:
        """The failure of an instance that found no such model, by what it lists: one that has lost a registered
        adapter, as it was restarted, may have the request again."""
        pool, instance_id, adapter = self.pool, self.machine.answering_id, self.machine.spec.adapter
        if adapter not in pool.view.adapters:
            pool.model_lists.doubt(instance_id)
            return event
        pool.adapter_loads.doubt(instance_id)
        with contextlib.suppress(StoreError):
            await pool.model_lists.read_now([instance_id])
        if not pool.adapter_loads.lacks(instance_id, adapter):
            return event
        detail = f"{instance_id} had lost the adapter {adapter!r}"
        return replace(event, failure=InstanceFailure(FailureKind.ADAPTER, detail, event.failure.status))

    def broke_off(self, failure: InstanceFailure) -> None:
        """Report that an instance failed it for good, in an answer that has begun. Never waits."""
        if self.inference_request.stream:
            self.pool.metrics.cut_streams.inc()
        self._report(Failed(failure, begun=True))

    async def moved(self, failure: InstanceFailure, target: InstanceSpec) -> None:
        """The instance failed the request, and the gateway that carries its bytes has sent it to ``target``.

        Raises:
            RouterError: the store did not take it. ``finish`` has been called.
        """
        self._count_placed()
        await self._run(Moved(failure, target))
        chain = self.machine.spec.chain
        if chain is not None and not self.machine.is_done:
            self._note_context(chain)

    def cut_off(self, error: RouterError) -> None:
        """End it with an error, if its client can be told; ``finish`` is called then. Never waits."""
        if self.inference_request.cut_off is not None:
            self.inference_request.cut_off(error)

    def finish(self, outcome: Outcome, usage: Usage | None = None, counted: Counted | None = None) -> None:
        """Report that it is over, however it went: release everything. Never waits; only the first call counts.
        ``counted``: what was seen of its answer; None: nothing of it passes here. A stored response that is read again
        was counted for the request that had it computed."""
        if self.prompt is None and self.inference_request.pinned_to is not None:
            usage, counted = None, NOTHING_COUNTED
        self._report(Ended(outcome, usage, counted))

    # the driver --------------------------------------------------------------------------------------------------
    def _report(self, event: Event) -> None:
        """Report an event whose effects need no waiting."""
        for effect in self.machine.on(event, self._now_s()):
            _CARRIED_OUT[type(effect)](self, effect)

    async def _run(self, event: Event | None) -> None:
        """Report an event, and what comes of its effects, until the request is to be sent, or is over."""
        try:
            while event is not None:
                effects, event = self.machine.on(event, self._now_s()), None
                for effect in effects:
                    kind = type(effect)
                    if kind is Send:  # by the caller, who reads where to
                        event = await self._load_adapter() if self.machine.spec.adapter else None
                        break
                    answer = _ANSWERED.get(kind)
                    if answer is None:
                        _CARRIED_OUT[kind](self, effect)
                    else:
                        event = await answer(self, effect)
        except BaseException as error:
            self.finish(outcome_of(error))
            if isinstance(error, Exception):
                raise from_exception(error) from error
            raise

    async def _load_adapter(self) -> Failed | None:
        """Have the adapter loaded where it is to be sent; the failure of an instance that does not load it.

        Raises:
            UnknownModelError: the adapter was unloaded meanwhile.
        """
        machine, loads = self.machine, self.pool.adapter_loads
        adapter, decode = machine.spec.adapter, machine.decode
        legs = {machine.instance_id: None if decode is None else Leg.PREFILL}
        if decode is not None and decode.target is not None:
            legs.setdefault(decode.target.instance_id, Leg.DECODE)
        for instance_id, leg in legs.items():
            if not loads.lacks(instance_id, adapter):
                continue
            began_s = self._now_s()
            why = (await loads.ensure(instance_id, adapter)).complaint
            self.adapter_wait_s += self._now_s() - began_s
            if why:
                detail = f"{instance_id} does not have the adapter {adapter!r}: {why}"
                return Failed(InstanceFailure(FailureKind.ADAPTER, detail), leg=leg)
        return None

    # effects without an answer -------------------------------------------------------------------------------------
    def leave(self, why: str) -> None:
        """Leave its instance, if another one could go on with it. Never waits."""
        if self.on_evict is not None:
            self.on_evict(why)

    def _evict(self, effect: Evict) -> None:
        rule = self.machine.rules.eviction
        assert rule is not None
        self.pool.evictable.evict(rule, self.machine.spec.claim.class_rank, effect.instance_id, effect.shortage)

    def _leave_instance(self, effect: LeaveInstance) -> None:
        self.pool.contexts_ahead.over(effect.instance_id, self.machine.request_id)
        if self.on_evict is not None:
            self.pool.evictable.remove(effect.instance_id, self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.on_leave is not None:
            self.on_leave(effect.failure)

    def _start_timer(self, effect: StartTimer) -> None:
        self._timer = self.context.call_later(effect.delay_s, self._presume_prefill)

    def _presume_prefill(self) -> None:
        self._report(_PREFILL_PRESUMED)
        self._count_on_time()

    def _count_retry(self, effect: CountRetry) -> None:
        metrics = self.pool.metrics
        if effect.continues:
            metrics.continuations[effect.kind].inc()
        else:
            (metrics.decode_retries if effect.decodes else metrics.retries[effect.kind]).inc()

    def _post(self, post: Post) -> None:
        release, settled = post.release, None
        if post.teaches and self.pool.fleet.teaches():
            release = Release(
                release.request_id, release.instance_id, note=self.machine.ttft_sample(), seen=release.seen
            )
        if post.last:
            settled = self.context.live.releasing(self.machine.request_id)
        self.pool.outbox.post(release, settled)

    # effects with an answer --------------------------------------------------------------------------------------
    async def _reserve(self, effect: Reserve) -> Event:
        pool, request_id = self.pool, self.machine.request_id
        placing = pool.grant_waiters.placing
        placing[request_id] = None
        try:
            course = await drive(effect.search.run(), pool.placing)
            self._uncounted, placed = course, course.placed
            if placed.reply.status is _PLACE_HELD:
                self._waiter = pool.grant_waiters.expect(request_id, self.machine.attempt)
                return Reserved(course, None)
        except SearchFailed as failed:
            pool.metrics.stale.inc(failed.course.stale_rounds)
            return NotPlaced(failed)
        finally:
            placing.pop(request_id, None)
        instance_id = placed.instance_id
        return Reserved(course, pool.view.view.instances.get(instance_id) or await self._new_member(instance_id))

    async def _await_instance(self, effect: AwaitInstance) -> Event:
        is_ready = await self.pool.instance_waiters.wait(effect.within_s)
        return InstanceReady() if is_ready else TurnedAway(Refusal.NOT_STARTED)

    async def _await_grant(self, effect: AwaitGrant) -> Event:
        pool, waiter, queue = self.pool, self._waiter, effect.placed.reply.queue
        assert waiter is not None
        self._count_placed()
        if queue is not None:
            pool.planner.plan(queue)
        try:
            grant = await pool.grant_waiters.wait(waiter, effect.within_s)
        except ReservationLostError:
            pool.metrics.replaced.inc()
            return ReservationLost()
        except TurnedAwayError as turned_away:
            return TurnedAway(turned_away.why)
        finally:
            pool.grant_waiters.leave(waiter)
            self._waiter = None
        return Granted(
            grant, self.pool.view.view.instances.get(grant.instance_id) or await self._new_member(grant.instance_id)
        )

    async def _register(self, effect: Register) -> Event:
        status, drawn = await self.pool.store.register(effect.request, effect.draws)
        if status is PlaceStatus.DISPATCHED:
            return Registered(drawn)
        is_taken = status is PlaceStatus.DUPLICATE
        return NotPlaced(SearchFailed(duplicate=is_taken, limited=None if is_taken else drawn))

    async def _reserve_decoder(self, effect: ReserveDecoder) -> Event:
        try:
            placed = (await drive(effect.search.run(), self.pool.placing)).placed
        except SearchFailed:
            return NoDecoder()
        known = self.pool.view.view.instances.get(placed.instance_id)
        return DecoderReserved(placed, known or await self._new_member(placed.instance_id))

    async def _new_member(self, instance_id: str) -> InstanceSpec | None:
        """An instance that joined after the last refresh of this replica's view; None if it is gone."""
        return (await self.pool.view.refresh()).instances.get(instance_id)

    async def _release_first(self, effect: ReleaseFirst) -> None:
        await self.pool.outbox.release(effect.releases)

    async def _enter(self, _: Enter) -> None:
        machine = self.machine
        since_placed_s = machine.age_s(self._now_s()) - (machine.placed_s or 0.0)
        await self.pool.store.adopt(self.records(machine.enqueued_ms + round(since_placed_s * 1000)))

    async def _rename(self, _: Rename) -> Event:
        request_id = f"{self.inference_request.request_id}-{secrets.token_hex(4)}"
        self.context.live.rename(self, request_id)
        return Renamed(request_id)

    async def _refuse(self, effect: Refuse) -> Event:
        if effect.why is Refusal.LIMITED:
            self.context.metrics.tenants.of(self.machine.spec.claim.tenant).limited.inc()
            self.pool.metrics.limited.inc()
        error = refusal(effect, self.machine, self.pool)
        draws, drawn = self.machine.spec.claim.draws, self.machine.drawn
        if effect.why is Refusal.LIMITED and draws is not None and drawn is not None:
            self.context.limit_hits.hit(self.machine.spec.claim.tenant, draws, drawn, self._now_s())
        if draws is not None and drawn is not None and drawn.left:
            error.limit_fields = refused_fields(self.inference_request.path, draws, drawn, datetime.now(UTC))
        raise error

    async def _await_turn(self, effect: AwaitTurn) -> Event:
        try:
            await self.pool.turn_waiters.wait(effect.turn, effect.within_s, self._class_name())
        except TurnedAwayError as turned_away:
            return TurnedAway(turned_away.why)
        return TurnGoes()

    def _class_name(self) -> str:
        return class_name(self.pool.scheduling.classes, self.machine.spec.claim.class_rank)

    async def _await_trial(self, effect: AwaitTrial) -> Event:
        over = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not over.done():
                over.set_result(None)

        effect.trial.when_passed(end)
        timer = self.context.call_later(effect.within_s, end)
        try:
            await over
        finally:
            timer.cancel()
        return TrialOver()

    # its end, and what is reported of it --------------------------------------------------------------------------
    def _count_placed(self) -> None:
        """Count each placement once: when the request is held, else when it is on its way, which counting would
        delay."""
        course, self._uncounted = self._uncounted, None
        if course is not None:
            count_placed(course, self.machine, self.pool.metrics)

    def _close(self, _: Close) -> None:
        machine, context, pool = self.machine, self.context, self.pool
        spec, usage, outcome = machine.spec, machine.usage or _NO_USAGE, machine.outcome
        chain = spec.chain
        context.live.leave(self)
        if self.on_evict is not None:
            pool.evictable.remove(machine.instance_id, self)
            self.on_evict = None
        self.on_leave = None  # the legs of a split request refer to this
        if self._uncounted is not None:
            self._count_placed()
        count_end(machine, pool.metrics)
        if spec.cohort:
            named_slo = self.inference_request.slo_s is not None
            version, slo_tpot_s = pool.view.revisions.version, pool.scheduling.split.slo_tpot_s
            pool.revision_counts.count(machine, version, slo_tpot_s, named_slo=named_slo)
        if machine.turn is not None:
            count_turn(machine, pool.metrics.turns_of(self._class_name()))
        if self._deadline is not None or self._is_overdue:
            self._count_on_time()
        if spec.claim.tenant and outcome is not None:
            context.metrics.tenants.count_end((spec.claim.tenant, outcome, machine.usage))
        if chain is None:
            if context.ended is not None:
                context.ended(self._explanation(0), self.inference_request.trace)
            return
        expected_cached = self.expected_cached_tokens
        if outcome in ANSWERED:
            if machine.leg is _WHOLE:
                pool.recent_answers.ended(machine.instance_id, chain, usage)
            if context.recorder is not None:
                self._record(context.recorder, chain, usage)
            if self.inference_request.stores:
                pool.stored_responses.answered(
                    self.request_id, machine.instance_id, self.inference_request, usage, spec.run.run
                )
        count_usage(machine, pool, self.prompt, expected_cached, self.inference_request.prompts)
        explanation = self._explanation(expected_cached)
        context.decisions.add(explanation)
        if context.ended is not None:
            context.ended(explanation, self.inference_request.trace)

    def _record(self, recorder: TrafficRecorder, chain: Chain, usage: Usage) -> None:
        """Record its shape for a replay, and how it was served. Expected counts replace those that the instance did not
        report."""
        machine = self.machine
        spec, age_s, classes = machine.spec, machine.age_s(self._now_s()), self.pool.rules.scheduling.classes
        recorder.record(
            Recorded(
                received_unix_s=time.time() - age_s,
                chain=chain,
                prompt_tokens=usage.prompt_tokens or chain.prompt_tokens,
                output_tokens=usage.output_tokens or spec.expected_output_tokens,
                duration_s=age_s if machine.ended_s is None else machine.ended_s,
                ttft_s=machine.first_token_s if spec.streams and not spec.hides_first_token else None,
                cached_tokens=usage.cached_tokens,
                slo_s=self.inference_request.slo_s,
                tenant=spec.claim.tenant,
                priority=classes[spec.claim.class_rank].name if classes else "",
                adapter=spec.adapter,
                run=spec.run.branch,
            )
        )

    def records(self, now_ms: int) -> Sequence[StoredRequest]:
        """The records that the store should have of it: one for each leg that is reserved."""
        return stored_requests(self.machine, now_ms, self._now_s())

    def explain(self) -> Explanation | None:
        """Describe what has happened so far; None if it was passed on without a decision."""
        return None if self.machine.spec.chain is None else self._explanation(self.expected_cached_tokens)

    def _explanation(self, expected_cached_tokens: int) -> Explanation:
        return explanation(self, expected_cached_tokens, self._now_s(), time.time())


_CARRIED_OUT: Final[Mapping[type[Effect], Callable[[LiveRequest, Any], None]]] = {
    Post: LiveRequest._post,
    LeaveInstance: LiveRequest._leave_instance,
    Close: LiveRequest._close,
    StartTimer: LiveRequest._start_timer,
    CountRetry: LiveRequest._count_retry,
    Evict: LiveRequest._evict,
}
"""The methods that carry out effects without an answer."""

_ANSWERED: Final[Mapping[type[Effect], Callable[[LiveRequest, Any], Awaitable[Event | None]]]] = {
    Reserve: LiveRequest._reserve,
    Register: LiveRequest._register,
    AwaitInstance: LiveRequest._await_instance,
    AwaitGrant: LiveRequest._await_grant,
    ReserveDecoder: LiveRequest._reserve_decoder,
    ReleaseFirst: LiveRequest._release_first,
    Enter: LiveRequest._enter,
    AwaitTrial: LiveRequest._await_trial,
    AwaitTurn: LiveRequest._await_turn,
    Rename: LiveRequest._rename,
    Refuse: LiveRequest._refuse,
}
"""The methods that carry out effects that are waited for. The last effect of an event is answered by another event."""
