"""One live request: where it is, what was reserved for it, and what is released when it is over."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Protocol

import orjson

from dualmap.router.context import ReplicaContext
from dualmap.router.decode_leg import DecodeLeg
from dualmap.router.errors import UnavailableError, from_exception
from dualmap.router.failures import Disputes, end_trial, nobody_left, note_loss, outcome_after, spend_retry
from dualmap.router.inference_request import InferenceRequest
from dualmap.router.instance_loss import InstanceLossNotifier
from dualmap.router.metaserver import Metaserver
from dualmap.router.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.router.pools import Route
from dualmap.router.prompt import ReadPrompt
from dualmap.router.quarantine import Trial
from dualmap.router.request_story import RequestStory
from dualmap.router.served_pool import ServedPool
from dualmap.router.stored_record import stored_record
from dualmap.router.timers import TimerHandle
from dualmap.scheduling.estimates.learning import features_to_note, finished_note
from dualmap.scheduling.placing.placement import Placed, Search
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.request.slo import slo_s
from dualmap.scheduling.state.instance import InstanceSpec, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import Request, RequestState
from dualmap.statestore.answers import Release


class Placer(Protocol):
    async def place(self, request: ScheduledRequest) -> None:
        """Find an instance for the request's present attempt, and wait until it may be sent there."""


class ScheduledRequest(RequestStory):
    """A request that the method placed. Its transitions go to the store through the outbox, in order.

    It is the only owner of what it reserved: every end calls ``finish``, which releases once.
    """

    # Where it is; what starts the same for every request is its class's until it changes.
    instance_id = ""
    instance_url = ""
    data_parallel_rank: int | None = None
    attempts = 0
    store_attempt = 1
    """Counts reservations that replaced one another, also of requests the store had lost."""
    failed: frozenset[str] = frozenset()
    """Instances that this request failed on."""
    trial: Trial | None = None
    sent_s = 0.0
    """When its present try began."""
    enqueued_ms = 0
    """Its first reservation, of the store's clock."""
    may_be_reserved = False
    """Whether the store was asked for a reservation, and has not said that it made none."""
    _placed: Placed | None = None
    """The last placement that took effect."""
    _held_since_s: float | None = None
    _prefilled = False
    _staged_kv_gone = False
    """The decode leg has it: what was reserved for the prefill leg is released."""
    leg = Leg.WHOLE
    """PREFILL: it is split, and its decode leg answers."""
    decode: DecodeLeg | None = None
    """Once its prompt was prefilled for it."""
    decode_attempts = 0
    disputes: Disputes | None = None
    """Once an instance failed it."""
    _judged = False
    """What its instance did with its present try was recorded."""
    _done = False
    _release: TimerHandle | None = None

    def __init__(
        self, inference_request: InferenceRequest, request_id: str, route: Route[ServedPool], prompt: ReadPrompt,
        context: ReplicaContext, placer: Placer,
    ) -> None:  # fmt: skip
        pool = self.pool = route.pool
        self.request_id = request_id
        self.model = route.model
        self.inference_request = inference_request
        self.prompt = prompt
        self.chain = prompt.chain
        self.slo_s = slo_s(pool.scheduling, prompt.tokens, inference_request.slo_s)
        self.started_s = context.clock.monotonic_s()
        self.searches: list[tuple[Search, int]] = []
        """Every search for an instance, with its attempt."""
        view = pool.view.view  # not kept: a long answer would keep every former view of the fleet alive
        self._seen_epoch, self._seen_tree_version = view.epoch, view.tree_version
        self._seen_tree, self._max_key_blocks = view.tree, pool.scheduling.max_key_blocks
        self._context = context
        self._placer = placer

    @property
    def prompt_hash(self) -> int:
        return self.chain.hashes[-1] if self.chain.tail_hash is None else self.chain.tail_hash

    @property
    def loss_notifier(self) -> InstanceLossNotifier:
        return self.pool.loss_notifier

    @property
    def asked_name(self) -> str:
        if self.inference_request.pinned_to is not None:
            return ""
        return self.pool.view.view.asked_name(self.model)

    @property
    def age_s(self) -> float:
        return self._context.clock.monotonic_s() - self.started_s

    def not_reserved(self) -> None:
        """The store has no reservation of this request."""
        self.may_be_reserved, self._placed = False, None

    def try_again(self) -> None:
        """Its instance failed, or the store lost it: a new attempt to place it begins."""
        self.store_attempt += 1
        self._placed = None

    def rename(self) -> None:
        """Take another id: the client's own is that of another live request."""
        self._context.live.rename(self, f"{self.inference_request.request_id}-{secrets.token_hex(4)}")

    @property
    def expected_ttft_s(self) -> float | None:
        """None once it was placed again: no estimate includes the time lost on the first attempt."""
        return self._expected_s if self.store_attempt == 1 else None

    @property
    def _expected_s(self) -> float | None:
        return None if self._estimate is None else self._estimate.decision.expected_ttft_s

    # transitions ------------------------------------------------------------------------------------------------
    def was_placed(self, placed: Placed) -> None:
        """A reservation was made; its TTFT is expected from now on."""
        now_s, breakers = self._context.clock.monotonic_s(), self.pool.breakers
        if breakers.troubled:
            breakers.sending(placed.instance_id, now_s)
        self._placed = self._estimate = self._uncounted = placed
        self.enqueued_ms, self.leg = placed.reply.enqueued_ms, placed.reply.leg
        if self.attempts == 0:
            self.placed_s = now_s - self.started_s

    def hold_began(self) -> None:
        self._held_since_s = self.age_s

    def hold_ended(self) -> None:
        self.held_s, self._held_since_s = self._held_until_now_s(), None

    def _held_until_now_s(self) -> float:
        since_s = self._held_since_s
        return self.held_s if since_s is None else self.held_s + self.age_s - since_s

    def dispatched(self, spec: InstanceSpec, uncached_tokens: int, *, held_by: Grant | None = None) -> None:
        """The request may be sent to the instance now."""
        self._spec, self._held_by = spec, held_by
        self._uncached_tokens = uncached_tokens
        self.instance_id, self.instance_url = spec.instance_id, spec.url
        self.data_parallel_rank = spec.data_parallel_rank
        if held_by is not None:
            self.pool.metrics.hold_s.observe(self.held_s)
        self._expected_cached = None
        self.attempts += 1
        self.sent_s = self._context.clock.monotonic_s()
        self._dispatched = True

    def sent(self) -> None:
        self.count_placed()
        self._expected_cached = self.expected_cached_tokens  # as it is sent: others come behind it, or are over
        if self.leg is Leg.WHOLE and not self._done:
            output_tokens = self.prompt.expected_output_tokens
            self.pool.contexts_ahead.sent(self.instance_id, self.request_id, self.chain, output_tokens)
        spec = self._spec
        if spec is not None and not (self.shows_first_token or self._prefilled or self._release is not None):
            self._release = self._context.call_later(self._prefill_delay_s(spec), self._prefill_presumed)

    @property
    def shows_first_token(self) -> bool:
        """Whether the first byte of its answer comes with the first token. Of another, it comes with the last."""
        return self.inference_request.stream or self.leg is Leg.PREFILL

    def _prefill_delay_s(self, spec: InstanceSpec) -> float:
        """When a request that is dispatched now is expected to have its first token, seconds from dispatch. A held one
        waited for room in a full dispatch window, which is prefilled before it."""
        if self._held_by is None and self._placed is not None:
            return self._placed.decision.expected_ttft_s
        return self.pool.fleet.window_delay_s(spec, self._uncached_tokens)

    def first_token(self) -> None:
        if self._done:
            return
        if self.trial is not None:
            self.trial.passed.set()
        if self._first_token_s is None:
            self._count_first_token()
        # A stream that was given back has another first token, and another reservation.
        if self.decode is None:
            if not self._prefilled:
                self._send_first_token()
        elif not self._staged_kv_gone:
            self._release_staged()

    @property
    def is_decoded(self) -> bool:
        """Whether a decode instance answers it, or another one as such."""
        return self.leg is Leg.PREFILL or (self._spec is not None and self._spec.role is Role.DECODE)

    @property
    def answering_id(self) -> str:
        """The instance whose answer the client gets, or is to get."""
        return (self.decode and self.decode.instance_id) or self.instance_id

    def begin_decode(self) -> DecodeLeg:
        """Its decode leg, which is to be placed."""
        if self.decode is None:
            self.decode = DecodeLeg(self, self._context)
        return self.decode

    async def drop_decode(self) -> None:
        """The prefill leg failed before its decode leg, which was placed first, could answer. Raises
        StoreUnavailableError."""
        if self.decode is not None:
            await self.decode.released()
            self.decode = None

    def prefill_done(self) -> DecodeLeg:
        """The prefill leg has answered. Its decode leg, which is to be placed if it is not."""
        self.pool.breakers.succeeded(self.instance_id, self._context.clock.monotonic_s())
        if not (self._done or self._prefilled):
            self._prefilled_s = self.age_s
            self._send_first_token()
        decode = self.begin_decode()
        decode.staged_s = self.age_s
        return decode

    @property
    def metaserver(self) -> Metaserver:
        return self._context.metaserver

    def _release_staged(self) -> None:
        """The decode leg has the KV: what the prefill leg reserved is free."""
        self._staged_kv_gone = True
        note = self.decode.transfer_note(self.age_s) if self.decode is not None else ""
        self.pool.outbox.post(self.pool.fleet.over(self.request_id, self.store_attempt, note))

    def _prefill_presumed(self) -> None:
        """An answer that does not stream shows no first token: its expected time is taken instead."""
        self._release = None
        if not (self._done or self._prefilled):
            self._send_first_token()

    def _send_first_token(self) -> None:
        self._prefilled = True
        shows_it = self.shows_first_token
        note = self._note() if shows_it else ""
        self.pool.outbox.post(Release(self.request_id, self.instance_id, note=note, seen=shows_it))

    def _note(self) -> str:
        """The sample of its first token (``scheduling.estimates.learning``). Its TTFT is part of it only if the request
        went to where it was placed, at the first try."""
        placed, held_by = self._placed, self._held_by
        if placed is None or self.store_attempt > 1 or placed.decision.instance_id != self.instance_id:
            return "{}"
        if (held_by is not None and held_by.deferred) or not self.pool.fleet.teaches():
            return "{}"
        features = placed.features(self.chain, self.pool.scheduling.decode_stall_s)
        return orjson.dumps({"features": features_to_note(features)}).decode()

    def _count_first_token(self) -> None:
        self._first_token_s = self.age_s
        self.pool.metrics.count_ttft(self._first_token_s, self.slo_s, self.expected_ttft_s)
        breakers = self.pool.breakers
        self.pool.quarantine.answered(self.answering_id)
        if breakers.troubled:
            breakers.began(self.answering_id, self._context.clock.monotonic_s())
        if self.decode is not None and self.decode.placed_s is not None:
            self.pool.metrics.transfer_s.observe(self._first_token_s - self.decode.placed_s)

    async def reroute(self, failure: InstanceFailure) -> None:
        failed_id, decode = self.instance_id, self.decode
        self.count_placed()
        self._leave_instance()
        self._dispatched, self._placed = False, None
        if failure.status == HTTPStatus.NOT_FOUND:
            self.pool.model_lists.doubt(self.answering_id)
        if decode is not None:
            decode.give_up(failure)
            # What is not found is prefilled elsewhere: its source may be what failed. Decoders are not at fault then.
            stuck_again = failure.kind is FailureKind.TRANSFER and self.failed
            suspect = stuck_again or (decode.lost and failure.kind is not FailureKind.RECOMPUTED)
            self.failed |= {self.instance_id} if suspect else decode.failed
            failed_id = decode.last_instance_id or failed_id
        else:
            self.judge(failed_id, failure)
            self.failed |= {failed_id}
        self._failures += (f"{failed_id}: {failure}",)
        self._failed_after_s += (self.age_s,)
        try:
            await spend_retry(failure, self, self._context, failed_id=failed_id, attempts=self.attempts)
            self.pool.metrics.retries[failure.kind].inc()
            # Release what the failed attempt had reserved, before the next one reserves.
            if decode is not None:
                await decode.released()
                self.decode = None
            await self.pool.fleet.release((self.pool.fleet.over(self.request_id, self.store_attempt),))
            self.try_again()
            self._prefilled = self._staged_kv_gone = False
            await self._place_again(failure)
        except BaseException as error:
            self.finish(outcome_after(failure, error))
            if isinstance(error, Exception):
                raise from_exception(error) from error
            raise

    async def _place_again(self, failure: InstanceFailure) -> None:
        try:
            await self._placer.place(self)
        except UnavailableError as error:
            if failure.kind is not FailureKind.RECOMPUTED or not self.failed:
                raise nobody_left(failure, self.attempts) from error
            self.failed = frozenset()  # the one that gave it back is better than none
            await self._place_again(failure)

    def instance_failed(self, failure: InstanceFailure) -> None:
        if self._done or not self._dispatched:
            return
        self.judge(self.answering_id, failure)
        self._judged = True
        note_loss(failure, self, self.answering_id)

    def judge(self, instance_id: str, failure: InstanceFailure) -> None:
        if self.disputes is None:
            self.disputes = Disputes()
        self.disputes.judge(self.pool, instance_id, failure, self._context.clock.monotonic_s())

    def finish(self, outcome: Outcome, usage: Usage | None = None) -> None:
        if self._done:
            return
        self._done = True
        end_trial(self, completed=outcome is Outcome.COMPLETED)
        self._leave_instance()
        self._context.live.leave(self)
        self.count_placed()
        self._count_end(outcome, usage)
        if self.may_be_reserved:
            self._send_finish(self._taught(usage), answered=outcome is Outcome.COMPLETED)
        explanation = self.explain()
        self.decode = None  # which has its owner: a cycle would be left to the garbage collector
        self._context.decisions.add(explanation)
        if self._context.ended is not None:
            self._context.ended(explanation, self.inference_request.trace)

    def _send_finish(self, note: str, *, answered: bool) -> None:
        request_id, settled = self.request_id, partial(self._context.live.released, self.request_id)
        self._context.live.releasing(request_id)
        decode, last = self.decode, settled if self._staged_kv_gone else None
        if decode is not None and decode.release(note, last, answered=answered):
            if self._staged_kv_gone:  # released when the decode leg had it
                return
            note = ""
        self.pool.outbox.post(self.pool.fleet.over(request_id, self.store_attempt, note, seen=answered), settled)

    def _taught(self, usage: Usage | None) -> str:
        """How many tokens its text and its answer had, for the leader to learn from; "" where neither is known."""
        if usage is None:
            return ""
        prompt = self.prompt
        text_bytes, limit, began_s = prompt.text_bytes or 0, prompt.output_limit or 0, self._first_token_s
        answer_ms = 0 if began_s is None else round((self.age_s - began_s) * 1000)
        tokens, answer_tokens = usage.prompt_tokens or 0, usage.output_tokens or 0
        return finished_note(text_bytes, tokens, answer_tokens, limit, answer_ms, prompt.images)

    def _count_end(self, outcome: Outcome, usage: Usage | None) -> None:
        metrics = self.pool.metrics
        metrics.in_flight.dec()
        metrics.outcomes[outcome].inc()
        self._outcome, self._ended_s = outcome, self.age_s
        if self.disputes is not None:
            answered = outcome is Outcome.COMPLETED
            self.disputes.settle(self.pool, self._context.clock.monotonic_s(), answered=answered)
        if self._dispatched and not self._judged:
            self.pool.breakers.record(self.answering_id, outcome, self._context.clock.monotonic_s())
        if outcome is Outcome.COMPLETED:
            self.pool.quarantine.answered(self.answering_id)
            metrics.count_answer(self._ended_s, self._first_token_s, None if usage is None else usage.output_tokens)
            metrics.prompt_tokens_expected.inc(self.prompt.tokens)
            metrics.hit_tokens_expected.inc(self.expected_cached_tokens)
            if self.leg is Leg.WHOLE:
                self.pool.recent_answers.ended(self.instance_id, self.chain, usage or Usage())
            self._record(usage or Usage())
            self.pool.stored_responses.answered(self, usage or Usage())
        if usage is not None and usage.prompt_tokens is not None:
            self.count_reported(usage, usage.prompt_tokens)

    def _record(self, usage: Usage) -> None:
        """Expected counts replace those that the instance did not report."""
        recorder = self._context.recorder
        if recorder is not None:
            prompt_tokens = usage.prompt_tokens or self.chain.prompt_tokens
            output_tokens = usage.output_tokens or self.prompt.expected_output_tokens
            slo_s = self.inference_request.slo_s
            recorder.record(self._received_unix_s, self.chain, prompt_tokens, output_tokens, slo_s)

    def _leave_instance(self) -> None:
        self.pool.contexts_ahead.over(self.instance_id, self.request_id)
        if self._release is not None:
            self._release.cancel()
            self._release = None

    # its records ------------------------------------------------------------------------------------------------
    def records(self, now_ms: int) -> Sequence[Request]:
        """What the store should know of it: one for each leg that is reserved."""
        if self._done:
            return ()
        own, decode = self._record_of(now_ms), self.decode
        other = None if decode is None else decode.record(now_ms)
        return tuple([record for record in (own, other) if record is not None])

    def _record_of(self, now_ms: int) -> Request | None:
        placed, state = self._placed, RequestState.HELD
        if placed is None or self._staged_kv_gone:
            return None
        if self._dispatched:
            state = RequestState.PREFILLED if self._prefilled else RequestState.DISPATCHED
        return stored_record(self, placed, state, self._context.replica_id, self._uncached_tokens, now_ms)
