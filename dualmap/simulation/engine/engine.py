"""A vLLM V1 instance in virtual time.

The engine runs steps back to back while it has work. ``engine_scheduler`` decides what a step computes, ``step_time``
how long it takes. A request that arrives during a step waits for its end.

Steps with nothing but decoding are planned as one *run*: their number is known in advance (until a sequence ends or
memory runs out) and their times follow a closed form, so a run costs the same for one step and for a thousand. All
times within a run are computed from its start: asking more often never changes an answer.

With prefill and decode apart, a request is two: a prefill leg here and a decode leg in another engine. The engine says
when a decode leg has its blocks (PULLING); the mover of the KV says when it is there (``receive``), or that it never
comes (``lose_kv``), and notifies the other engine (``release_staged``). An engine whose memory staged or expected KV
fills does nothing until some of it goes. A request that pulls from another engine's cache is moved in the same way, as
far as that cache has its prompt (``wanted_blocks``, ``serve``); nothing is staged for it.

The engine is a pure function of the calls made to it. Simplifications against the real thing: two running requests that
compute the same block share it from then on; blocks of generated tokens do not enter the prefix cache; an aborted
sequence frees its blocks at once, and the step under way still takes the time it was planned with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.simulation.engine.engine_scheduler import EngineScheduler
from dualmap.simulation.engine.engine_types import (
    EngineConfig,
    EngineRequest,
    EngineStatistics,
    Event,
    RequestRefusedError,
)
from dualmap.simulation.engine.hybrid_kv_pool import HybridKvPool
from dualmap.simulation.engine.kv_pool import Journal, KvPool
from dualmap.simulation.engine.kv_tiers import TierCache
from dualmap.simulation.engine.step_run import Run
from dualmap.simulation.engine.tiered_kv_pool import TieredKvPool

_UNLIMITED_STEPS = 1 << 40
NO_JOURNALS: Mapping[Tier, Journal] = MappingProxyType({})


def pool_of(
    config: EngineConfig,
    journal: Journal | None = None,
    of_tiers: Mapping[Tier, Journal] = NO_JOURNALS,
    *,
    shared: TierCache | None = None,
) -> KvPool:
    """The KV memory of an engine. Every change of its prefix cache is appended to the journal, if any, and of each tier
    to that one's own. ``shared`` is the store that its pool is a part of; None: its pool is its own."""
    if config.cache_groups:
        return HybridKvPool(config.kv_blocks, config.block_tokens, config.cache_groups, journal)
    if not config.kept_tiers:
        return KvPool(config.kv_blocks, journal)
    tiers = [
        shared
        if shared is not None and each.tier is Tier.POOL
        else TierCache(each.tokens // config.block_tokens, of_tiers.get(each.tier), tells_removals=each.tells_removals)
        for each in config.kept_tiers
    ]
    return TieredKvPool(config.kv_blocks, tiers, journal)


class Engine:
    """One emulated instance. Times are seconds on one clock of the caller's and must not go back.

    Args:
        config: limits, memory and step costs.
        pool: its KV memory; None: what the configuration says.
        max_run_steps: longest run of decode steps planned at once; only tests have a reason to lower it.
    """

    def __init__(
        self, config: EngineConfig, pool: KvPool | None = None, *, max_run_steps: int = _UNLIMITED_STEPS
    ) -> None:
        self.config = config
        self._max_run_steps = max_run_steps
        self._events: list[Event] = []
        self._scheduler = EngineScheduler(config, self._events, pool_of(config) if pool is None else pool)
        self._run: Run | None = None
        self._boundary_s = 0.0
        """End of the last step, or when work came to an idle engine: the next step starts here."""
        self._reached_s = -math.inf
        """Steps that start at or before this time have started."""
        self._blocked = False
        """Whether there is work and nothing fits: no step begins before something changes."""

    # calls --------------------------------------------------------------------------------------------------
    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request. Several submissions to an idle engine at one time share its first step.

        Raises:
            RequestRefusedError: it can never be served, or its id is waiting or running. Nothing has changed.
        """
        self._run_until(now_s, start_now=False)
        self._refuse_unservable(request)
        self._scheduler.enqueue(request)
        self._replan(now_s)

    def receive(self, request_id: str, now_s: float) -> bool:
        """The KV of a decode leg is there; False if nothing waits for it (any more)."""
        return self._apply(self._scheduler.receive, request_id, now_s)

    def wanted_blocks(self, request_id: str) -> tuple[int, ...]:
        """The blocks that a request which pulls has not here, of what a pull may bring; none if it does not pull (any
        more)."""
        return self._scheduler.wanted_blocks(request_id)

    def serve(self, hashes: Sequence[int]) -> int:
        """How many leading ones of these blocks can be pulled from here. They count as used now."""
        return self._scheduler.pool.served_blocks(hashes)

    def receive_pulled(self, request_id: str, blocks: int, busy_s: float, now_s: float) -> bool:
        """So many of the wanted blocks are there, none where the pull failed, after the links were busy with them for
        so long: the rest is computed here. False if nothing waits for it (any more)."""
        receive = partial(self._scheduler.receive_pulled, blocks=blocks, busy_s=busy_s, now_s=now_s)
        return self._apply(receive, request_id, now_s)

    def lose_kv(self, request_id: str, now_s: float) -> bool:
        """The KV of a decode leg will not come: it is prefilled here; False if nothing waits for it (any more)."""
        return self._apply(self._scheduler.lose_kv, request_id, now_s)

    def release_staged(self, request_id: str, now_s: float) -> bool:
        """Free the staged KV of a prefill leg, which was pulled or is not wanted; False if there is none (any more)."""
        return self._apply(self._scheduler.release_staged, request_id, now_s)

    def _apply(self, change: Callable[[str], bool], request_id: str, now_s: float) -> bool:
        """Something that happened elsewhere to KV of this request; False if it changes nothing."""
        self._run_until(now_s, start_now=False)
        changed = change(request_id)
        if changed:
            self._replan(now_s)
        return changed

    def has_staged(self, request_id: str) -> bool:
        """Whether the KV of a prefill leg waits to be pulled, when time was last told."""
        return request_id in self._scheduler.staged

    def advance(self, until_s: float) -> list[Event]:
        """Everything that happened since the last call, up to and including ``until_s``, in order of time.

        A step that can start at ``until_s`` has started after the call: later submissions wait for its end.
        """
        self._run_until(until_s, start_now=True)
        if self._run is not None:
            self._settle(self._run, self._run.steps_by(until_s))
        events = self._events.copy()
        self._events.clear()
        return events

    def next_event_s(self) -> float | None:
        """When to call ``advance`` next: nothing visible happens before; None while there is no work.

        The end of the planned run of steps, or, if the next step has not started, its start.
        """
        if self._events:
            return self._events[0].time_s
        if self._run is not None:
            return self._run.end_s(self._run.steps)
        if self._startable:
            return self._boundary_s
        return self._scheduler.next_due_s()

    def next_step_end_s(self) -> float | None:
        """The next event as in ``next_event_s``, but no later than the end of the step under way: for streaming token
        by token."""
        if self._run is not None and not self._events:
            return self._run.end_s(min(self._run.done + 1, self._run.steps))
        return self.next_event_s()

    def start_with_adapters(self, adapters: Iterable[str]) -> None:
        """Have these adapters from the start, as far as there is room. For an engine that has done nothing yet."""
        self._scheduler.adapters.start_with(adapters)

    def load_adapter(self, adapter: str, now_s: float, *, replaces: bool = False) -> float:
        """Load an adapter that no request needs yet, or its new weights; returns the time that this takes, in seconds.
        An engine at work computes nothing meanwhile."""
        self._run_until(now_s, start_now=False)
        return self._scheduler.load_adapter(adapter, replaces=replaces)

    def abort(self, request_id: str, now_s: float) -> bool:
        """Drop a waiting or running request and free its blocks at once; False if it is not here (any more).

        Its staged KV stays: that it is not wanted says ``release_staged``.
        """
        self._run_until(now_s, start_now=False)
        scheduler = self._scheduler
        if request_id in scheduler.staged or not scheduler.knows(request_id):
            return False
        self._replan(now_s)  # which may complete a step, and with it the request
        if scheduler.waiting.pop(request_id, None) is not None:
            return True
        sequence = (
            scheduler.running.get(request_id)
            or scheduler.pulling.get(request_id)
            or scheduler.loading.get(request_id)
            or scheduler.arrived.get(request_id)
        )
        if sequence is None:
            return False
        scheduler.release(sequence)
        if self._run is not None:
            self._run.prefilled = tuple(one for one in self._run.prefilled if one is not sequence)
        return True

    def generated_tokens(self, request_id: str) -> int:
        """Tokens a request had generated when ``advance`` was last called; 0 if it is unknown."""
        scheduler = self._scheduler
        sequence = scheduler.running.get(request_id) or scheduler.waiting.get(request_id)
        return scheduler.batch.generated_tokens(sequence) if sequence is not None else 0

    def clear_cache(self) -> int:
        """Forget every cached block that no running request holds; returns how many."""
        return self._scheduler.pool.clear_idle()

    @property
    def kv_used_tokens(self) -> int:
        """KV memory that running requests hold, shared blocks once: what vLLM's gauge of KV use shows, in tokens."""
        return self._scheduler.pool.used_blocks * self.config.block_tokens

    def statistics(self) -> EngineStatistics:
        """The state when ``advance``, ``submit`` or ``abort`` was last called."""
        return self._scheduler.statistics()

    # time ---------------------------------------------------------------------------------------------------
    def _run_until(self, until_s: float, *, start_now: bool) -> None:
        """Complete every run that ends by ``until_s`` and start those that start before it (or at it)."""
        if until_s < self._reached_s:
            raise ValueError(f"time went back from {self._reached_s} to {until_s}")
        while True:
            if self._run is None:
                self._settle_due(until_s)
                if not self._startable:
                    break
                if self._boundary_s > until_s or (self._boundary_s == until_s and not start_now):
                    break
                self._run = self._plan(self._boundary_s)
                if self._run is None:
                    continue
            if self._run.end_s(self._run.steps) > until_s:
                break
            self._complete(self._run)
        if start_now:
            self._reached_s = until_s

    @property
    def _startable(self) -> bool:
        """Whether a step begins at the boundary if nothing changes."""
        return self._scheduler.busy and not self._blocked

    def _settle_due(self, until_s: float) -> None:
        """Take note of what is due between steps: loads that end, and staged KV that times out. What is due in a step
        is noted at its end."""
        while (due_s := self._scheduler.next_due_s()) is not None and due_s <= until_s:
            if self._startable and due_s > self._boundary_s:
                break
            self._wake(due_s)
            self._scheduler.settle_due(self._boundary_s)

    def _wake(self, now_s: float) -> None:
        """Something has changed between steps: the next one begins now at the earliest."""
        self._blocked = False
        self._boundary_s = max(self._boundary_s, now_s)

    def _replan(self, now_s: float) -> None:
        """Something has changed at ``now_s``: the next plan has to see it."""
        if self._run is None:
            self._wake(now_s)
        else:
            self._cut_run(now_s)

    def _plan(self, start_s: float) -> Run | None:
        """Plan the step at ``start_s``, and how often it can be repeated; None if nothing fits."""
        step = self._scheduler.plan_step(start_s)
        batch, costs = self._scheduler.batch, self.config.costs
        if not step.prefill_tokens and not batch.size:
            self._blocked = True
            return None
        sequences = batch.size if step.decodes else 0
        # Every decoding sequence attends to its newest token too.
        context_tokens = batch.context_tokens + sequences if step.decodes else 0
        run = Run(
            start_s=start_s,
            steps=1 if step.prefill_tokens or step.may_admit_next else self._repeatable_steps(),
            first_s=step.adapters_s
            + costs.step_s(step.prefill_tokens, step.prefill_pairs, sequences, context_tokens, len(step.prefilled)),
            growth_s=costs.context_token_s * sequences,
            first_step=batch.steps,
            prefilled=step.prefilled,
            decodes=step.decodes,
        )
        due_s = self._scheduler.next_due_s()
        if due_s is not None and run.steps > 1:
            run.steps = min(run.steps, run.steps_by(due_s) + 1)
        return run

    def _repeatable_steps(self) -> int:
        """Decode steps until a sequence ends or memory runs out."""
        batch, pool = self._scheduler.batch, self._scheduler.pool
        limit = min(batch.steps_to_next_end(), self._max_run_steps)
        return 1 + batch.steps_within(pool.available_blocks, limit - 1)

    def _cut_run(self, now_s: float) -> None:
        """End the run with the step under way at ``now_s``, so that the next plan sees what has changed."""
        run = self._run
        if run is None or run.steps == 1:
            return
        ended = run.steps_by(now_s)
        at_boundary = ended > 0 and run.end_s(ended) == now_s and self._reached_s < now_s
        run.steps = min(run.steps, ended if at_boundary else ended + 1)
        self._settle(run, ended)
        if run.done == run.steps:
            self._complete(run)

    def _settle(self, run: Run, steps: int) -> None:
        """Account for the first ``steps`` steps of the run, and for the blocks of the one after."""
        if not run.decodes:
            run.done = steps
            return
        if steps > run.done:
            self._scheduler.advance_decode(steps - run.done)
            run.done = steps
        self._scheduler.allocate_decode(run.first_step + min(run.done + 1, run.steps))

    def _complete(self, run: Run) -> None:
        """All steps of the run have ended; the next one starts where they did."""
        self._settle(run, run.steps)
        self._boundary_s = run.end_s(run.steps)
        self._run = None
        self._scheduler.end_step(run.prefilled, self._boundary_s)

    def _refuse_unservable(self, request: EngineRequest) -> None:
        config, scheduler = self.config, self._scheduler
        if scheduler.knows(request.request_id):
            raise RequestRefusedError(f"request id {request.request_id!r} is already in this engine")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise RequestRefusedError("a request needs at least one prompt token and one output token")
        if request.stages_kv and (request.output_tokens > 1 or request.awaits_kv):
            raise RequestRefusedError("a prefill leg ends with its first token, and computes its own KV")
        total = request.prompt_tokens + request.output_tokens
        limit = config.max_request_tokens
        if total > limit:
            raise RequestRefusedError(
                f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens exceed the limit of {limit}"
            )
        if len(request.block_hashes) > request.prompt_tokens // config.block_tokens:
            raise RequestRefusedError("more block hashes than the prompt has full blocks")
