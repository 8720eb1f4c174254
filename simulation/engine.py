"""A vLLM V1 instance in virtual time.

One engine runs steps back to back while it has work. A step takes every decoding sequence (one token each), then
the prompt under prefill, then waiting prompts in order of arrival, until the token budget is spent; so at most one
prompt, the latest, is ever half done. A prompt is admitted when all its blocks would fit. When decoding sequences
need blocks that are not there, the latest admitted sequence is preempted: it loses its blocks, returns to the head
of the queue and is recomputed. Source: vLLM V1 scheduler (first come, first served, chunked prefill, prefix caching).

Steps with nothing but decoding are planned as one *run*: their number is known in advance (until a sequence ends
or memory runs out) and their times follow a closed form, so a run costs the same for one step and for a thousand.
All times within a run are computed from its start: asking more often never changes an answer.

What arrives while a step is under way waits for its end. The model is a pure function of the calls made to it.

Simplifications against the real thing: two running requests that compute the same block share it from then on;
blocks of generated tokens do not enter the prefix cache; an aborted sequence frees its blocks at once, and the step
under way still takes the time it was planned with.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from simulation.decode_batch import DecodeBatch
from simulation.engine_types import (
    EngineConfig,
    EngineRequest,
    EngineStatistics,
    Event,
    EventKind,
    RequestRefusedError,
)
from simulation.kv_pool import KvPool
from simulation.run import Run
from simulation.sequence import EngineSequence
from simulation.step_time import attention_pairs

_UNLIMITED_STEPS = 1 << 40


class Engine:
    """One emulated instance. Times are seconds on one clock of the caller's and must not go back.

    Args:
        config: limits, memory and step costs.
        record_steps: report a ``STEP`` event for every step (slow, for tests and close looks).
        record_cache: report ``STORED`` and ``EVICTED`` events.
        max_run_steps: longest run of decode steps planned at once; only tests have a reason to lower it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        record_steps: bool = False,
        record_cache: bool = False,
        max_run_steps: int = _UNLIMITED_STEPS,
    ) -> None:
        self.config = config
        self._record_steps = record_steps
        self._record_cache = record_cache
        self._max_run_steps = max_run_steps
        self._pool = KvPool(config.kv_blocks, record=record_cache)
        self._batch = DecodeBatch(config.block_tokens)
        self._waiting: OrderedDict[str, EngineSequence] = OrderedDict()
        self._running: OrderedDict[str, EngineSequence] = OrderedDict()
        self._prefilling: EngineSequence | None = None
        self._run: Run | None = None
        self._boundary_s = 0.0
        """End of the last step, or when work came to an idle engine: the next step starts here."""
        self._reached_s = -math.inf
        """Steps that start at or before this time have started."""
        self._events: list[Event] = []
        self._admissions = 0
        self._prefill_tokens = 0
        self._generated_tokens = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._preemptions = 0

    # calls --------------------------------------------------------------------------------------------------
    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request. Several submissions to an idle engine at one time share its first step.

        Raises:
            RequestRefusedError: it can never be served, or its id is waiting or running. Nothing has changed.
        """
        self._refuse_unservable(request)
        self._run_until(now_s, start_now=False)
        if not self._waiting and not self._running:
            self._boundary_s = max(self._boundary_s, now_s)
        self._waiting[request.request_id] = EngineSequence(request, prefill_tokens=request.prompt_tokens)
        self._cut_run(now_s)

    def advance(self, until_s: float) -> list[Event]:
        """Everything that happened since the last call, up to and including ``until_s``, in order of time.

        A step that can start at ``until_s`` has started after the call: later submissions wait for its end.
        """
        self._run_until(until_s, start_now=True)
        if self._run is not None:
            self._settle(self._run, self._run.steps_by(until_s))
        events, self._events = self._events, []
        return events

    def next_event_s(self) -> float | None:
        """When to call ``advance`` next: nothing visible happens before; None while there is no work.

        The end of the planned run of steps, or, if the next step has not started, its start.
        """
        if self._events:
            return self._events[0].time_s
        if self._run is not None:
            return self._run.end_s(self._run.steps)
        return self._boundary_s if self._waiting or self._running else None

    def next_step_end_s(self) -> float | None:
        """Like ``next_event_s``, but no later than the end of the step under way: for streaming token by token."""
        if self._run is not None and not self._events:
            return self._run.end_s(min(self._run.done + 1, self._run.steps))
        return self.next_event_s()

    def abort(self, request_id: str, now_s: float) -> bool:
        """Drop a waiting or running request and free its blocks at once; False if it is not here (any more)."""
        self._run_until(now_s, start_now=False)
        if self._waiting.pop(request_id, None) is not None:
            self._cut_run(now_s)
            return True
        sequence = self._running.get(request_id)
        if sequence is None:
            return False
        self._cut_run(now_s)
        if request_id not in self._running:  # it ended in the step that the cut completed
            return False
        self._release(sequence)
        if self._run is not None:
            self._run.prefilled = tuple(one for one in self._run.prefilled if one is not sequence)
        return True

    def generated_tokens(self, request_id: str) -> int:
        """Tokens a request had generated when ``advance`` was last called; 0 while it waits or is unknown."""
        sequence = self._running.get(request_id) or self._waiting.get(request_id)
        return self._batch.generated_tokens(sequence) if sequence is not None else 0

    def clear_cache(self) -> int:
        """Forget every cached block that no running request holds; returns how many."""
        return self._pool.clear_idle()

    def statistics(self) -> EngineStatistics:
        """The state when ``advance``, ``submit`` or ``abort`` was last called."""
        return EngineStatistics(
            waiting=len(self._waiting),
            running=len(self._running),
            used_blocks=self._pool.used_blocks,
            cached_blocks=self._pool.cached_blocks,
            total_blocks=self._pool.total_blocks,
            context_tokens=self._batch.context_tokens
            + (self._prefilling.computed_tokens if self._prefilling is not None else 0),
            steps=self._batch.steps,
            prefill_tokens=self._prefill_tokens,
            generated_tokens=self._generated_tokens,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
        )

    # time ---------------------------------------------------------------------------------------------------
    def _run_until(self, until_s: float, *, start_now: bool) -> None:
        """Complete every run that ends by ``until_s`` and start those that start before it (or at it)."""
        if until_s < self._reached_s:
            raise ValueError(f"time went back from {self._reached_s} to {until_s}")
        while True:
            if self._run is None:
                if not self._waiting and not self._running:
                    break
                if self._boundary_s > until_s or (self._boundary_s == until_s and not start_now):
                    break
                self._run = self._plan(self._boundary_s)
            if self._run.end_s(self._run.steps) > until_s:
                break
            self._complete(self._run)
        if start_now:
            self._reached_s = until_s

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
        batch = self._batch
        if steps > run.done:
            if self._record_steps:
                self._events += [
                    Event(EventKind.STEP, run.end_s(step), tokens=batch.size + run.prefill_tokens)
                    for step in range(run.done + 1, steps + 1)
                ]
            batch.advance(steps - run.done)
            self._generated_tokens += (steps - run.done) * batch.size
            run.done = steps
        self._allocate(run.first_step + min(run.done + 1, run.steps))

    def _allocate(self, through_step: int) -> None:
        steps = through_step - self._batch.allocated_steps
        if steps > 0:
            self._pool.take_private(self._batch.blocks_needed(steps))
            self._batch.allocated_steps = through_step

    def _complete(self, run: Run) -> None:
        """All steps of the run have ended: first tokens, ends, and the next boundary."""
        self._settle(run, run.steps)
        end_s = self._boundary_s = run.end_s(run.steps)
        self._run = None
        for sequence in self._batch.take_ended():
            self._finish(sequence, end_s)
        for sequence in run.prefilled:
            sequence.generated_tokens += 1
            self._generated_tokens += 1
            if self._prefilling is sequence:
                self._prefilling = None
            self._batch.join(sequence)
            if not sequence.started:
                sequence.started = True
                cached_tokens = sequence.cached_tokens or 0
                self._events.append(Event(EventKind.FIRST_TOKEN, end_s, sequence.request.request_id, cached_tokens))
            if sequence.generated_tokens == sequence.request.output_tokens:
                self._finish(sequence, end_s)

    def _finish(self, sequence: EngineSequence, end_s: float) -> None:
        self._release(sequence)
        self._events.append(Event(EventKind.FINISHED, end_s, sequence.request.request_id, sequence.generated_tokens))

    # planning -----------------------------------------------------------------------------------------------
    def _plan(self, start_s: float) -> Run:
        """Choose what the step at ``start_s`` computes, take its blocks, and see how often it can be repeated."""
        batch, costs = self._batch, self.config.costs
        preempted = False
        while batch.size and batch.blocks_needed(1) > self._pool.available_blocks:
            self._preempt(next(reversed(self._running.values())), start_s)
            preempted = True
        size, context = batch.size, batch.context_tokens
        self._allocate(batch.steps + 1)
        chunks = self._schedule_prefill(start_s, self.config.max_num_batched_tokens - size, not preempted)
        tokens = pairs = 0
        for _sequence, chunk_start, chunk in chunks:
            tokens += chunk
            pairs += attention_pairs(chunk_start, chunk)
        self._prefill_tokens += tokens
        # Each decoding sequence attends to its own newest token too, hence context + size.
        first_s = costs.step_s(tokens, pairs, size, context + size)
        self._report_cache(start_s)
        return Run(
            start_s=start_s,
            steps=1 if chunks else self._repeatable_steps(),
            first_s=first_s,
            growth_s=costs.context_token_s * size,
            first_step=batch.steps,
            prefill_tokens=tokens,
            prefilled=tuple(
                sequence for sequence, _start, _chunk in chunks if sequence.computed_tokens == sequence.prefill_tokens
            ),
        )

    def _repeatable_steps(self) -> int:
        """Decode steps until a sequence ends or memory runs out (or, when that is recorded, something is evicted)."""
        blocks = self._pool.empty_blocks if self._record_cache else self._pool.available_blocks
        limit = min(self._batch.steps_to_next_end(), self._max_run_steps)
        return 1 + self._batch.steps_within(blocks, limit - 1)

    def _schedule_prefill(self, start_s: float, budget: int, may_admit: bool) -> list[tuple[EngineSequence, int, int]]:
        """Spend ``budget`` tokens on prompts: (sequence, tokens computed before, tokens now)."""
        chunks: list[tuple[EngineSequence, int, int]] = []
        current = self._prefilling
        if current is not None and budget > 0:
            chunk = min(budget, current.prefill_tokens - current.computed_tokens)
            if self._fits(current, chunk):
                chunks.append((current, current.computed_tokens, chunk))
                self._compute(current, chunk)
                budget -= chunk
            else:
                self._preempt(current, start_s)
                may_admit = False
        while budget > 0 and may_admit and self._waiting and len(self._running) < self.config.max_num_seqs:
            sequence = next(iter(self._waiting.values()))
            if not self._admit(sequence, start_s):
                break
            chunk = min(budget, sequence.prefill_tokens - sequence.computed_tokens)
            chunks.append((sequence, sequence.computed_tokens, chunk))
            self._compute(sequence, chunk)
            budget -= chunk
        return chunks

    def _admit(self, sequence: EngineSequence, start_s: float) -> bool:
        """Move the head of the queue to the running set, with its hit; False if its prompt does not fit."""
        block_tokens, request = self.config.block_tokens, sequence.request
        hits, idle_hits = self._pool.match(request.block_hashes, (sequence.prefill_tokens - 1) // block_tokens)
        needed = -(-sequence.prefill_tokens // block_tokens) - hits
        if needed > self._pool.available_blocks - idle_hits:
            return False
        del self._waiting[request.request_id]
        self._running[request.request_id] = sequence
        self._admissions += 1
        sequence.order = self._admissions
        self._pool.hold(request.block_hashes[:hits])
        sequence.held_blocks = hits
        sequence.computed_tokens = hits * block_tokens
        self._queried_tokens += sequence.prefill_tokens
        self._hit_tokens += sequence.computed_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed_tokens
        self._prefilling = sequence
        self._events.append(Event(EventKind.SCHEDULED, start_s, request.request_id, sequence.computed_tokens))
        return True

    def _fits(self, sequence: EngineSequence, chunk: int) -> bool:
        blocks = -(-(sequence.computed_tokens + chunk) // self.config.block_tokens)
        return blocks - sequence.held_blocks - sequence.private_blocks <= self._pool.available_blocks

    def _compute(self, sequence: EngineSequence, chunk: int) -> None:
        """Take blocks for a chunk; full prompt blocks enter the cache as they are scheduled, as in vLLM."""
        block_tokens, hashes = self.config.block_tokens, sequence.request.block_hashes
        computed = sequence.computed_tokens + chunk
        cacheable = min(computed // block_tokens, len(hashes))
        private = -(-computed // block_tokens) - cacheable
        # A private block that has become full changes places, so that no block is taken for it.
        if private < sequence.private_blocks:
            self._pool.give_private(sequence.private_blocks - private)
        self._pool.hold(hashes[sequence.held_blocks : cacheable])
        if private > sequence.private_blocks:
            self._pool.take_private(private - sequence.private_blocks)
        sequence.held_blocks, sequence.private_blocks = cacheable, private
        sequence.computed_tokens = computed
        if computed == sequence.prefill_tokens and self._prefilling is sequence:
            self._prefilling = None

    # leaving ------------------------------------------------------------------------------------------------
    def _preempt(self, sequence: EngineSequence, now_s: float) -> None:
        """Take all blocks from a running sequence and put it at the head of the queue."""
        self._release(sequence)
        sequence.prefill_tokens = sequence.request.prompt_tokens + sequence.generated_tokens
        request_id = sequence.request.request_id
        self._waiting[request_id] = sequence
        self._waiting.move_to_end(request_id, last=False)
        self._preemptions += 1
        self._events.append(Event(EventKind.PREEMPTED, now_s, request_id, sequence.generated_tokens))

    def _release(self, sequence: EngineSequence) -> None:
        """Leave the running set and give every block back: the one way out for every ending."""
        del self._running[sequence.request.request_id]
        if self._prefilling is sequence:
            self._prefilling = None
        private = sequence.private_blocks
        if sequence.decoding:
            private = self._batch.kv_blocks(sequence) - sequence.held_blocks
            self._batch.leave(sequence)
        self._pool.give_private(private)
        self._pool.drop(sequence.request.block_hashes[: sequence.held_blocks])
        sequence.held_blocks = sequence.private_blocks = sequence.computed_tokens = 0

    def _report_cache(self, now_s: float) -> None:
        pool = self._pool
        if pool.evicted:
            self._events.append(Event(EventKind.EVICTED, now_s, blocks=tuple(pool.evicted)))
            pool.evicted.clear()
        if pool.stored:
            self._events.append(Event(EventKind.STORED, now_s, blocks=tuple(pool.stored)))
            pool.stored.clear()

    def _refuse_unservable(self, request: EngineRequest) -> None:
        config = self.config
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestRefusedError(f"request id {request.request_id!r} is already in this engine")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise RequestRefusedError("a request needs at least one prompt token and one output token")
        total = request.prompt_tokens + request.output_tokens
        limit = min(config.max_model_len, config.kv_blocks * config.block_tokens)
        if total > limit:
            raise RequestRefusedError(
                f"{request.prompt_tokens} prompt and {request.output_tokens} output tokens exceed the limit of {limit}"
            )
        if len(request.block_hashes) > request.prompt_tokens // config.block_tokens:
            raise RequestRefusedError("more block hashes than the prompt has full blocks")
