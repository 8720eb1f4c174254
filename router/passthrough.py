"""Requests that are not scheduled by prefix: passed to any suitable instance, without a reservation.

Where prefill and decode are apart, an instance that decodes answers whole requests, as those are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus

from dualmap.router.context import ReplicaContext
from dualmap.router.errors import UnavailableError, nobody_ready
from dualmap.router.explain import Explanation
from dualmap.router.failures import Disputes, end_trial, nobody_left, note_loss, outcome_after, spend_retry
from dualmap.router.instance_loss import InstanceLossNotifier
from dualmap.router.outcome import InstanceFailure, Outcome, Usage
from dualmap.router.quarantine import Trial
from dualmap.router.served_pool import ServedPool
from dualmap.router.trace_context import TraceContext
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import Request

# The golden ratio as a stride: with the turn itself it picks two instances, in ever different pairs.
_STRIDE = 0.6180339887498949


class PassthroughBalancer:
    """Requests passed through per instance, of this replica alone; the less loaded of two takes the next one."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._turn = 0

    def pick(self, ready: tuple[str, ...], avoided: frozenset[str] | set[str]) -> str | None:
        """An instance outside of ``avoided``, in constant time while few are avoided; None if there is none."""
        self._turn += 1
        count = len(ready)
        if count == 0:
            return None
        pair = (ready[self._turn % count], ready[int(self._turn * _STRIDE * count) % count])
        fit = [instance_id for instance_id in pair if instance_id not in avoided]
        if not fit:
            fit = [instance_id for instance_id in ready if instance_id not in avoided]
        return min(fit, key=self._in_flight.__getitem__, default=None)

    def enter(self, instance_id: str) -> None:
        self._in_flight[instance_id] += 1

    def leave(self, instance_id: str) -> None:
        self._in_flight[instance_id] -= 1
        if self._in_flight[instance_id] <= 0:
            del self._in_flight[instance_id]


class PassthroughRequest:
    """A request that is passed through. It reserves no prefill: only its end and its retries matter."""

    expected_cached_tokens = 0
    expected_ttft_s = None

    def __init__(
        self, request_id: str, *, model: str, prompt_hash: int, pool: ServedPool, balancer: PassthroughBalancer,
        context: ReplicaContext, trace: TraceContext | None = None, pinned_to: str | None = None,
    ) -> None:  # fmt: skip
        """``pinned_to``: the only instance that can answer."""
        self.request_id = request_id
        self.model = model
        self.prompt_hash = prompt_hash
        self.trial: Trial | None = None
        self.pool = pool
        self.instance_id = ""
        self.instance_url = ""
        self.data_parallel_rank: int | None = None
        self.attempts = 0
        self.sent_s = 0.0
        self.leg = Leg.WHOLE
        self._balancer = balancer
        self._context = context
        self._trace = trace
        self._pinned_to = pinned_to
        self._started_s = context.clock.monotonic_s()
        self._failures: tuple[tuple[str, float], ...] = ()
        self._failed: set[str] = set()
        self._disputes = Disputes()
        self._judged = False
        """What its instance did with its present try was recorded."""
        self._entered = False
        self._done = False

    @property
    def pool_name(self) -> str:
        return self.pool.settings.name

    @property
    def loss_notifier(self) -> InstanceLossNotifier:
        return self.pool.loss_notifier

    @property
    def answering_id(self) -> str:
        return self.instance_id

    def records(self, now_ms: int) -> Sequence[Request]:
        return ()

    def explain(self) -> None:
        return None

    def pick_instance(self) -> None:
        """Choose an instance.

        Raises:
            UnavailableError: none is ready that has not failed.
        """
        view = self.pool.view.view
        instance_id = self._pinned_to or self._pick(view.serving(self.model).of(Leg.DECODE).ready)
        if instance_id is None or instance_id in self._failed or instance_id not in view.instances:
            raise nobody_ready(self.pool_name, "" if self._pinned_to else view.asked_name(self.model))
        spec = view.instances[instance_id]
        self.instance_id, self.instance_url, self.data_parallel_rank = instance_id, spec.url, spec.data_parallel_rank
        self.attempts += 1
        self.sent_s = self._context.clock.monotonic_s()
        self.pool.breakers.sending(instance_id, self.sent_s)
        self._balancer.enter(instance_id)
        self._entered = True

    def _pick(self, ready: tuple[str, ...]) -> str | None:
        blocked = self.pool.breakers.blocked(self._context.clock.monotonic_s())
        instance_id = self._balancer.pick(ready, self._failed | blocked)
        return self._balancer.pick(ready, self._failed) if instance_id is None else instance_id

    def _leave_instance(self) -> None:
        if self._entered:
            self._entered = False
            self._balancer.leave(self.instance_id)

    def sent(self) -> None:
        """Nothing was put off."""

    def first_token(self) -> None:
        if self.trial is not None:
            self.trial.passed.set()
        self.pool.quarantine.answered(self.instance_id)
        self.pool.breakers.began(self.instance_id, self._context.clock.monotonic_s())

    async def reroute(self, failure: InstanceFailure) -> None:
        now_s = self._context.clock.monotonic_s()
        self._leave_instance()
        self._failed.add(self.instance_id)
        if failure.status == HTTPStatus.NOT_FOUND:
            self.pool.model_lists.doubt(self.instance_id)
        self._failures += ((f"{self.instance_id}: {failure}", now_s - self._started_s),)
        self._disputes.judge(self.pool, self.instance_id, failure, now_s)
        try:
            await spend_retry(failure, self, self._context, failed_id=self.instance_id, attempts=self.attempts)
            self.pool.metrics.retries[failure.kind].inc()
            self._pick_another_instance(failure)
        except Exception as error:
            self.finish(outcome_after(failure, error))
            raise

    def _pick_another_instance(self, failure: InstanceFailure) -> None:
        try:
            self.pick_instance()
        except UnavailableError as error:
            raise nobody_left(failure, self.attempts) from error

    def instance_failed(self, failure: InstanceFailure) -> None:
        if self._done or not self._entered:
            return
        self._disputes.judge(self.pool, self.instance_id, failure, self._context.clock.monotonic_s())
        self._judged = True
        note_loss(failure, self, self.instance_id)

    def finish(self, outcome: Outcome, usage: Usage | None = None) -> None:
        if self._done:
            return
        self._done = True
        end_trial(self, completed=outcome is Outcome.COMPLETED)
        now_s = self._context.clock.monotonic_s()
        if outcome is Outcome.COMPLETED:
            self.pool.quarantine.answered(self.instance_id)
        self._disputes.settle(self.pool, now_s, answered=outcome is Outcome.COMPLETED)
        if self._entered and not self._judged:
            self.pool.breakers.record(self.instance_id, outcome, now_s)
        self._leave_instance()
        self._context.live.leave(self)
        self.pool.metrics.in_flight.dec()
        self.pool.metrics.outcomes[outcome].inc()
        if self._context.ended is not None:
            self._context.ended(self._story(outcome, usage or Usage()), self._trace)

    def _story(self, outcome: Outcome, usage: Usage) -> Explanation:
        """What there is to tell: it was not placed by its prefix, and its tokens are known by report alone."""
        age_s = self._context.clock.monotonic_s() - self._started_s
        return Explanation(
            request_id=self.request_id,
            model=self.model,
            pool=self.pool_name,
            policy="passed_on",
            slo_s=self.pool.scheduling.slo_ttft_s,
            prompt_tokens=usage.prompt_tokens or 0,
            chain_blocks=0,
            key_blocks=0,
            hash_key=0,
            tree_version=0,
            epoch=0,
            received_unix_s=time.time() - age_s,
            failures=tuple(failure for failure, _ in self._failures),
            failed_after_s=tuple(failed_s for _, failed_s in self._failures),
            instance_id=self.instance_id or None,
            placed_s=0.0,
            done_s=age_s,
            outcome=outcome,
            reported_cached_tokens=usage.cached_tokens,
            reported_prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
        )
