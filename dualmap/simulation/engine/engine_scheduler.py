"""The work of a step of the engine: queue, running set, KV blocks. Durations are in ``engine``.

The rules are vLLM V1's (first come, first served; chunked prefill; prefix caching). A step takes every decoding
sequence (one token each), then the prompt under prefill, then waiting prompts in order of arrival, until the token
budget is spent; so at most one prompt, the latest, is ever half done. A prompt is admitted when all its blocks would
fit. One whose prompt tiers have more of is given its blocks and does not hold up those behind it while they are loaded;
then it goes ahead of the queue, and the rest of its prompt is computed. So does one that pulls from another engine's
cache, and a decode leg while its KV is being transferred, of which the last prompt token is computed, to sample from.
When decoding sequences need blocks that are not there, the latest admitted sequence is preempted: it loses its blocks,
returns to the head of the queue and is recomputed. With ``prefill_first`` a step is either prefill, whenever a prompt
fits, or decoding.

With ``by_priority`` the queue is in the order of priorities and arrivals, and the last in that order of those that run
is preempted. A prompt that waits preempts nothing, whatever its priority, and the prompt under prefill continues: as in
vLLM, what has begun is only stopped where memory is short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from heapq import heappop, heappush

from dualmap.scheduling.values import value
from dualmap.simulation.engine.adapter_slots import AdapterSlots
from dualmap.simulation.engine.decode_batch import DecodeBatch
from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, EngineStatistics, Event, EventKind
from dualmap.simulation.engine.kv_pool import KvPool
from dualmap.simulation.engine.kv_tiers import LoadCounts, TierLink
from dualmap.simulation.engine.sequence import EngineSequence
from dualmap.simulation.engine.staged_kv import HeldKv, StagedKv
from dualmap.simulation.engine.step_time import attention_pairs


@value
class StepPlan:
    """One step's work. The decoding sequences are those in the batch."""

    prefill_tokens: int
    prefill_pairs: int
    """Pairs of a prefilled token and one that it attends to."""
    prefilled: tuple[EngineSequence, ...]
    """Sequences whose prompt the step completes."""
    decodes: bool = True
    """Whether the batch generates a token; if not, decoding waits for the prompts."""
    adapters_s: float = 0.0
    """Time that loads of adapters take before the step."""
    may_admit_next: bool = False
    """Whether the next step may admit what this one did not, though nothing changes until then."""


class EngineScheduler:
    """Waiting and running sequences of one engine and the memory they share. Appends to ``events`` what happens."""

    def __init__(self, config: EngineConfig, events: list[Event], pool: KvPool) -> None:
        self.pool = pool
        self.batch = DecodeBatch(config.block_tokens)
        self.waiting: OrderedDict[str, EngineSequence] = OrderedDict()
        self.running: OrderedDict[str, EngineSequence] = OrderedDict()
        """Running sequences, in order of admission."""
        self.pulling: dict[str, EngineSequence] = {}
        """Decode legs, and requests that pull, that have their blocks and wait for KV of another engine."""
        self.loading: dict[str, EngineSequence] = {}
        """Requests that have their blocks and wait for what tiers have of their prompt."""
        self.arrived: OrderedDict[str, EngineSequence] = OrderedDict()
        """Requests whose KV came, until a step takes them."""
        self._load_ends: list[tuple[float, int, EngineSequence]] = []
        """The ends of loads, as a heap; with a number that grows, so that sequences are not compared."""
        self._links = [TierLink(each.price(config.transfer.bytes_per_token)) for each in config.kept_tiers]
        self.staged = StagedKv(config.staged_timeout_s)
        self.adapters = AdapterSlots(config.adapters)
        self._adapters_s = 0.0
        """Time of the loads of adapters that the next step waits for."""
        self._config = config
        self._events = events
        self._prefilling: EngineSequence | None = None
        self._arrivals = 0
        self._admissions = 0
        self._prefill_tokens = 0
        self._generated_tokens = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._preemptions = 0
        self._expired = 0
        self._pulls = LoadCounts()

    @property
    def busy(self) -> bool:
        """Whether a step could have work, memory permitting."""
        return bool(self.waiting or self.running or self.arrived)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is here, or its staged KV."""
        return any(
            request_id in place
            for place in (self.waiting, self.running, self.pulling, self.loading, self.arrived, self.staged)
        )

    def enqueue(self, request: EngineRequest) -> None:
        self._arrivals += 1
        sequence = EngineSequence(
            request,
            rank=(request.priority, self._arrivals),
            prefill_tokens=request.prompt_tokens,
            awaits_kv=request.awaits_kv,
            awaits_pull=request.pulls and not self._config.cache_groups,
        )
        self._queue(sequence, self.waiting)

    def _queue(
        self, sequence: EngineSequence, queue: OrderedDict[str, EngineSequence], *, at_head: bool = False
    ) -> None:
        """Put a sequence into a queue: by priority where the engine has such, else at its end, or at its head."""
        request_id = sequence.request.request_id
        queue[request_id] = sequence
        if self._config.by_priority:
            for later in [name for name, each in queue.items() if each.rank > sequence.rank]:
                queue.move_to_end(later)
        elif at_head:
            queue.move_to_end(request_id, last=False)

    # one step -------------------------------------------------------------------------------------------------
    def plan_step(self, start_s: float) -> StepPlan:
        """Choose the work of the step that starts now and take the blocks it needs."""
        no_room, preemptions = self._config.prefill_first and self.batch.size > 0, self._preemptions
        if no_room:
            chunks = self._schedule_prefill(start_s, self._config.max_num_batched_tokens, may_admit=True)
            if chunks:
                return self._step_of(chunks, decodes=False, preempted=self._preemptions > preemptions)
        while self.batch.size and self.batch.blocks_needed(1) > self.pool.available_blocks:
            self._preempt(self._next_preempted(), start_s)
            no_room = True
        self.allocate_decode(self.batch.steps + 1)
        budget = self._config.max_num_batched_tokens - self.batch.size
        chunks = self._schedule_prefill(start_s, budget, may_admit=not no_room)
        return self._step_of(chunks, decodes=True, preempted=self._preemptions > preemptions)

    def load_adapter(self, adapter: str, *, replaces: bool) -> float:
        """Load an adapter; returns the time that this takes, by which the next step of what runs comes later."""
        taken_s = self.adapters.load(adapter, replaces=replaces)
        if self.running:
            self._adapters_s += taken_s
        return taken_s

    def _step_of(self, chunks: list[tuple[EngineSequence, int, int]], *, decodes: bool, preempted: bool) -> StepPlan:
        adapters_s, self._adapters_s = self._adapters_s, 0.0
        tokens = pairs = 0
        prefilled: tuple[EngineSequence, ...] = ()
        for sequence, start, chunk in chunks:
            tokens += chunk
            pairs += attention_pairs(start, chunk)
            if sequence.computed_tokens == sequence.prefill_tokens:
                prefilled += (sequence,)
        self._prefill_tokens += tokens
        return StepPlan(
            prefill_tokens=tokens,
            prefill_pairs=pairs,
            prefilled=prefilled,
            decodes=decodes,
            adapters_s=adapters_s,
            # The preempted one is too long for what is left; what waits before it by its priority may not be.
            may_admit_next=self._config.by_priority and preempted and bool(self.waiting),
        )

    def allocate_decode(self, through_step: int) -> None:
        """Take the blocks that decoding needs up to and including a step of the batch; they must be there."""
        steps = through_step - self.batch.allocated_steps
        if steps > 0:
            self.pool.take_private(self.batch.blocks_needed(steps))
            self.batch.allocated_steps = through_step

    def advance_decode(self, steps: int) -> None:
        """Note that a number of steps has ended: every decoding sequence has as many tokens more."""
        self.batch.advance(steps)
        self._generated_tokens += steps * self.batch.size

    def end_step(self, prefilled: tuple[EngineSequence, ...], end_s: float) -> None:
        """The last of the steps so far has ended at ``end_s``: ends and first tokens."""
        for sequence in self.batch.take_ended():
            self._finish(sequence, end_s)
        for sequence in prefilled:
            sequence.generated_tokens += 1
            self._generated_tokens += 1
            self.batch.join(sequence)
            if not sequence.started:
                sequence.started = True
                cached = sequence.cached_tokens or 0
                self._events.append(Event(EventKind.FIRST_TOKEN, end_s, sequence.request.request_id, cached))
            if sequence.generated_tokens == sequence.request.output_tokens:
                self._finish(sequence, end_s)

    # prefill --------------------------------------------------------------------------------------------------
    def _schedule_prefill(
        self, start_s: float, budget: int, *, may_admit: bool
    ) -> list[tuple[EngineSequence, int, int]]:
        """Spend ``budget`` tokens on prompts: (sequence, tokens computed before, tokens now)."""
        chunks: list[tuple[EngineSequence, int, int]] = []
        current = self._prefilling
        if current is not None and budget > 0:
            chunk = min(budget, current.prefill_tokens - current.computed_tokens)
            while not self._fits(current, chunk) and self._prefilling is current:
                self._preempt(self._next_preempted(), start_s)
                may_admit = False
            if self._prefilling is current:
                chunks.append((current, current.computed_tokens, chunk))
                self._compute(current, chunk)
                budget -= chunk
        while budget > 0 and may_admit and len(self.running) < self._config.max_num_seqs:
            sequence = self._next_admitted(start_s)
            if sequence is None:
                break
            chunk = min(budget, sequence.prefill_tokens - sequence.computed_tokens)
            chunks.append((sequence, sequence.computed_tokens, chunk))
            self._compute(sequence, chunk)
            budget -= chunk
        return chunks

    def _next_admitted(self, start_s: float) -> EngineSequence | None:
        """The next one to compute, in the running set; None if there is none, or its blocks do not fit."""
        arrived = self._first_of(self.arrived)
        if arrived is not None:
            del self.arrived[arrived.request.request_id]
            self._run(arrived, start_s)
            return arrived
        while (sequence := self._first_of(self.waiting)) is not None:
            if not self._admit(sequence, start_s):
                return None
            if sequence.request.request_id in self.running:
                return sequence
        return None

    def _first_of(self, place: Mapping[str, EngineSequence]) -> EngineSequence | None:
        """The first one there for whose adapter the next step has a slot; the others are passed over."""
        may_run = self.adapters.may_run
        return next((each for each in place.values() if may_run(each.request.adapter)), None)

    def _admit(self, sequence: EngineSequence, start_s: float) -> bool:
        """Take one of the queue, with its hit, to those that run, load or pull; False if its prompt does not
        fit."""
        block_tokens, request = self._config.block_tokens, sequence.request
        # The last token is always computed, so that there is something to sample from.
        limit = (sequence.prefill_tokens - 1) // block_tokens
        hits, idle_hits = self.pool.match(request.block_hashes, limit)
        needed = -(-sequence.prefill_tokens // block_tokens) - hits
        if needed > self.pool.available_blocks - idle_hits:
            return False
        del self.waiting[request.request_id]
        reach = limit if sequence.awaits_kv else self._reach(request, hits, limit)
        loadable = [] if sequence.awaits_kv else self.pool.loadable(request.block_hashes, hits, reach)
        self.pool.hold_hits(request.block_hashes[:hits])
        sequence.held_blocks = hits
        sequence.computed_tokens = hits * block_tokens
        self._queried_tokens += sequence.prefill_tokens
        self._hit_tokens += sequence.computed_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed_tokens + sum(loadable) * block_tokens
        if sequence.awaits_kv:
            self._pull(sequence, needed, start_s)
        elif sequence.awaits_pull and hits + sum(loadable) < min(reach, len(request.block_hashes)):
            self._pull_cached(sequence, needed, loadable, start_s)
        elif any(loadable):
            self._load(sequence, needed, loadable, start_s)
        else:
            self._run(sequence, start_s)
        return True

    def _run(self, sequence: EngineSequence, start_s: float) -> None:
        request_id = sequence.request.request_id
        self.running[request_id] = sequence
        self._adapters_s += self.adapters.enter(sequence.request.adapter, sequence.request.adapter_share)
        self._admissions += 1
        sequence.order = self._admissions
        self._prefilling = sequence
        self._events.append(Event(EventKind.SCHEDULED, start_s, request_id, sequence.computed_tokens))

    # loads from tiers -----------------------------------------------------------------------------------------
    def _reach(self, request: EngineRequest, first: int, limit: int) -> int:
        """The place up to which the request may load or pull, from the place ``first`` on."""
        if request.max_load_tokens is None or self._config.ignores_load_limits:
            return limit
        return min(limit, first + request.max_load_tokens // self._config.block_tokens)

    def _load(self, sequence: EngineSequence, needed: int, blocks: list[int], start_s: float) -> None:
        """Reserve the request's blocks, and begin its loads; it does not hold up those behind it."""
        self._await_loads(sequence, self._begin_loads(sequence, needed, blocks, start_s))

    def _begin_loads(self, sequence: EngineSequence, needed: int, blocks: list[int], start_s: float) -> float:
        """Reserve the request's blocks, and begin its loads, if any; when they end."""
        self.pool.take_private(needed)
        sequence.private_blocks = needed
        sequence.incoming_blocks = sequence.held_blocks + sum(blocks)
        block_tokens, ends_s = self._config.block_tokens, start_s
        for link, count in zip(self._links, blocks, strict=False):
            if count:
                ends_s = max(ends_s, link.load(count * block_tokens, start_s))
        return ends_s

    def _await_loads(self, sequence: EngineSequence, ends_s: float) -> None:
        self.loading[sequence.request.request_id] = sequence
        self._admissions += 1
        heappush(self._load_ends, (ends_s, self._admissions, sequence))

    def next_due_s(self) -> float | None:
        """When the next load ends, or staged KV expires."""
        expiry_s = self.staged.next_expiry_s()
        if not self._load_ends:
            return expiry_s
        load_s = self._load_ends[0][0]
        return load_s if expiry_s is None else min(expiry_s, load_s)

    def settle_due(self, now_s: float) -> None:
        """Take note of what is due: ends of loads, and staged KV whose time is over."""
        while self._load_ends and self._load_ends[0][0] <= now_s:
            _, _, sequence = heappop(self._load_ends)
            request_id = sequence.request.request_id
            if self.loading.get(request_id) is sequence:  # else it was aborted
                del self.loading[request_id]
                self._arrive(sequence, sequence.incoming_blocks * self._config.block_tokens)
        self.expire(now_s)

    def _arrive(self, sequence: EngineSequence, computed_tokens: int) -> None:
        """The KV of the sequence's incoming blocks is there: they enter the cache."""
        new = sequence.request.block_hashes[sequence.held_blocks : sequence.incoming_blocks]
        self._queue(sequence, self.arrived)
        self.pool.give_private(len(new))
        self.pool.hold(new)
        sequence.private_blocks -= len(new)
        sequence.held_blocks = sequence.incoming_blocks
        sequence.computed_tokens = computed_tokens

    # pulls from other engines' caches -------------------------------------------------------------------------
    def _pull_cached(self, sequence: EngineSequence, needed: int, loadable: list[int], start_s: float) -> None:
        """Begin the request's loads, and have what no tier has pulled meanwhile."""
        sequence.loads_end_s = self._begin_loads(sequence, needed, loadable, start_s)
        request_id = sequence.request.request_id
        self.pulling[request_id] = sequence
        wanted = len(self.wanted_blocks(request_id)) * self._config.block_tokens
        self._events.append(Event(EventKind.PULLING, start_s, request_id, wanted))

    def wanted_blocks(self, request_id: str) -> tuple[int, ...]:
        """Blocks of a request that pulls which are not here, and may come; none if it does not pull (any more)."""
        sequence = self.pulling.get(request_id)
        if sequence is None or not sequence.awaits_pull:
            return ()
        limit = (sequence.prefill_tokens - 1) // self._config.block_tokens
        reach = self._reach(sequence.request, sequence.held_blocks, limit)
        return sequence.request.block_hashes[sequence.incoming_blocks : reach]

    def receive_pulled(self, request_id: str, blocks: int, busy_s: float, now_s: float) -> bool:
        """So many of the wanted blocks are there; False if it does not pull (any more)."""
        sequence = self.pulling.get(request_id)
        if sequence is None or not sequence.awaits_pull:
            return False
        blocks = min(blocks, len(self.wanted_blocks(request_id)))
        del self.pulling[request_id]
        sequence.awaits_pull = False
        sequence.incoming_blocks += blocks
        tokens = blocks * self._config.block_tokens
        if not sequence.started and sequence.cached_tokens is not None:
            sequence.cached_tokens += tokens
        if blocks:
            self._pulls.loads += 1
            self._pulls.tokens += tokens
            self._pulls.busy_s += busy_s
        if sequence.loads_end_s > now_s:
            self._await_loads(sequence, sequence.loads_end_s)
        else:
            self._arrive(sequence, sequence.incoming_blocks * self._config.block_tokens)
        return True

    # transfers ------------------------------------------------------------------------------------------------
    def _pull(self, sequence: EngineSequence, needed: int, start_s: float) -> None:
        """Reserve what the transfer will fill; blocks enter the cache when it is through."""
        request = sequence.request
        self.pool.take_private(needed)
        sequence.private_blocks = needed
        self.pulling[request.request_id] = sequence
        missing = sequence.prefill_tokens - sequence.computed_tokens
        self._events.append(Event(EventKind.PULLING, start_s, request.request_id, missing))

    def receive(self, request_id: str) -> bool:
        """The KV of a pulling request is there; False if it does not pull (any more)."""
        sequence = self.pulling.pop(request_id, None)
        if sequence is None:
            return False
        sequence.incoming_blocks = len(sequence.request.block_hashes)
        self._arrive(sequence, sequence.prefill_tokens - 1)
        sequence.awaits_kv = False
        return True

    def lose_kv(self, request_id: str) -> bool:
        """The transfer has failed: the request goes to the head of the queue, to be prefilled here. False if it does
        not pull (any more)."""
        sequence = self.pulling.pop(request_id, None)
        if sequence is None:
            return False
        self._free(self._withdraw(sequence))
        sequence.awaits_kv = False
        self._queue(sequence, self.waiting, at_head=True)
        return True

    def release_staged(self, request_id: str) -> bool:
        kv = self.staged.take(request_id)
        if kv is not None:
            self._free(kv)
        return kv is not None

    def expire(self, now_s: float) -> None:
        """Free staged KV whose time is over."""
        for request_id, staged in self.staged.take_expired(now_s):
            self._free(staged.kv)
            self._expired += 1
            self._events.append(Event(EventKind.EXPIRED, now_s, request_id, staged.tokens))

    def _fits(self, sequence: EngineSequence, chunk: int) -> bool:
        blocks = -(-(sequence.computed_tokens + chunk) // self._config.block_tokens)
        return blocks - sequence.held_blocks - sequence.private_blocks <= self.pool.available_blocks

    def _compute(self, sequence: EngineSequence, chunk: int) -> None:
        """Take blocks for a chunk; full prompt blocks enter the cache as they are scheduled, as in vLLM."""
        block_tokens, hashes = self._config.block_tokens, sequence.request.block_hashes
        computed = sequence.computed_tokens + chunk
        cacheable = min(computed // block_tokens, len(hashes))
        private = -(-computed // block_tokens) - cacheable
        # A private block that has become full changes places, so that no block is taken for it.
        if private < sequence.private_blocks:
            self.pool.give_private(sequence.private_blocks - private)
        self.pool.hold(hashes[sequence.held_blocks : cacheable])
        if private > sequence.private_blocks:
            self.pool.take_private(private - sequence.private_blocks)
        sequence.held_blocks, sequence.private_blocks = cacheable, private
        sequence.computed_tokens = computed
        if computed == sequence.prefill_tokens:
            self._prefilling = None

    # leaving --------------------------------------------------------------------------------------------------
    def release(self, sequence: EngineSequence) -> None:
        """Leave the running set, the load or the transfer, and give every block back."""
        request_id = sequence.request.request_id
        if all(place.pop(request_id, None) is None for place in (self.pulling, self.loading, self.arrived)):
            del self.running[request_id]
            self.adapters.leave(sequence.request.adapter)
        self._free(self._withdraw(sequence))

    def _withdraw(self, sequence: EngineSequence) -> HeldKv:
        """The sequence holds nothing any more; what it held."""
        if self._prefilling is sequence:
            self._prefilling = None
        private = sequence.private_blocks
        if sequence.decoding:
            private = self.batch.kv_blocks(sequence) - sequence.held_blocks
            self.batch.leave(sequence)
        held = HeldKv(sequence.request.block_hashes[: sequence.held_blocks], private)
        sequence.held_blocks = sequence.private_blocks = sequence.computed_tokens = 0
        return held

    def _free(self, kv: HeldKv) -> None:
        self.pool.give_private(kv.private_blocks)
        self.pool.drop(kv.hashes)

    def _finish(self, sequence: EngineSequence, end_s: float) -> None:
        request = sequence.request
        del self.running[request.request_id]
        self.adapters.leave(request.adapter)
        kv = self._withdraw(sequence)
        self._events.append(Event(EventKind.FINISHED, end_s, request.request_id, sequence.generated_tokens))
        if request.stages_kv:
            self.staged.add(request.request_id, kv, request.prompt_tokens, end_s)
            self._events.append(Event(EventKind.STAGED, end_s, request.request_id, request.prompt_tokens))
        else:
            self._free(kv)

    def _next_preempted(self) -> EngineSequence:
        """The running sequence that is preempted next."""
        if self._config.by_priority:
            return max(self.running.values(), key=lambda each: each.rank)
        return next(reversed(self.running.values()))

    def _preempt(self, sequence: EngineSequence, now_s: float) -> None:
        """Take all blocks from a running sequence and put it back into the queue: at its head, or by its priority."""
        self.release(sequence)
        sequence.prefill_tokens = sequence.request.prompt_tokens + sequence.generated_tokens
        self._queue(sequence, self.waiting, at_head=True)
        self._preemptions += 1
        event = Event(EventKind.PREEMPTED, now_s, sequence.request.request_id, sequence.generated_tokens)
        self._events.append(event)

    def _without_slot(self) -> int:
        """Waiting requests for whose adapter the next step has no slot."""
        return sum(not self.adapters.may_run(each.request.adapter) for each in self.waiting.values())

    # reports --------------------------------------------------------------------------------------------------
    def statistics(self) -> EngineStatistics:
        prefilling = self._prefilling.computed_tokens if self._prefilling is not None else 0
        return EngineStatistics(
            waiting=len(self.waiting) + len(self.pulling) + len(self.loading) + len(self.arrived),
            running=len(self.running),
            deferred=self._without_slot() + len(self.pulling) + len(self.loading) + len(self.arrived),
            used_blocks=self.pool.used_blocks,
            cached_blocks=self.pool.cached_blocks,
            total_blocks=self.pool.total_blocks,
            context_tokens=self.batch.context_tokens + prefilling,
            steps=self.batch.steps,
            prefill_tokens=self._prefill_tokens,
            generated_tokens=self._generated_tokens,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
            pulling=len(self.pulling),
            loading=len(self.loading),
            adapter_loads=replace(self.adapters.counts),
            adapters=self.adapters.running,
            loads={
                each.tier: replace(link.counts) for each, link in zip(self._config.kept_tiers, self._links, strict=True)
            },
            staged=len(self.staged),
            expired=self._expired,
            pulls=replace(self._pulls),
        )
