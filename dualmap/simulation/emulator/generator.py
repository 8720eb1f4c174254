"""The engine in real time: takes requests, lets the engine run by the clock, and writes answers as tokens appear.

The engine's virtual time is exact; the event loop is not. A token always has the engine's time, even if the loop is
late; several that are due at once are sent in one chunk, as vLLM's front end does when it is late.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count

from dualmap.simulation.emulator.calls import Call, Generation
from dualmap.simulation.emulator.clock import EngineClock
from dualmap.simulation.emulator.connection import Responder
from dualmap.simulation.emulator.errors import ApiError, engine_dead, kv_load_failed, queue_full
from dualmap.simulation.emulator.generation_request import GenerationRequest
from dualmap.simulation.emulator.kv_events import KvEventLog
from dualmap.simulation.emulator.kv_legs import KvLegs
from dualmap.simulation.emulator.metrics import InstanceMetrics
from dualmap.simulation.emulator.peer_pulls import PeerPulls
from dualmap.simulation.emulator.replies import Ended, Reply, StreamReply
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.engine.engine import Engine, pool_of
from dualmap.simulation.engine.engine_types import EngineRequest, EngineStatistics, Event, EventKind

_MIN_TICK_S = 0.0005
FLUSH_INTERVAL_S = 0.005
"""Chunks are written at most this often."""


class Generator:
    """Runs one engine. Everything happens on one event loop; no call blocks.

    Args:
        rank: of data parallelism.
        crash: called when a prompt kills the engine; it must call ``kill``.
    """

    def __init__(self, settings: EmulatorSettings, crash: Callable[[], None], *, rank: int = 0) -> None:
        self._rank = rank
        self.config = settings.engine_config()
        self.kv_events: KvEventLog | None = None
        """Log for the changes of the cache; set it before the engine has work."""
        self.clock = EngineClock(time.monotonic, settings.time_scale)
        self._settings = settings
        self._crash = crash
        self.kv_legs = KvLegs(self, self.config.transfer, self._wall_s)
        self.peer_pulls = PeerPulls(self, self.config, self._wall_s) if settings.peer_pulls else None
        self._boot()
        self._ids = count()
        self._calls: dict[Call, list[str]] = {}
        """Requests under way, and their answers' ids in the engine."""
        self._generations: dict[str, Generation] = {}
        self._streaming: dict[str, Generation] = {}
        """Generations that stream and have their first token."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None
        self._flushed_s = -math.inf
        self._dead = False
        self._holds_back = False

    @property
    def active(self) -> int:
        """Requests under way."""
        return len(self._calls)

    @property
    def engine(self) -> Engine:
        """The engine, for reading; only the generator drives it."""
        return self._engine

    def start(
        self,
        gen_request: GenerationRequest,
        reply: Reply,
        responder: Responder,
        stream: StreamReply | None = None,
        *,
        known_as: Callable[[int], str] | None = None,
    ) -> None:
        """Take a request; its answer goes to the responder, with ``stream`` piece by piece as it comes. ``known_as``:
        see ``Call``.

        Raises:
            ApiError: the engine is dead or its queue is full.
        """
        if self._dead:
            raise engine_dead()
        now_s = self.clock.now_s()
        limit = self._settings.max_queued_requests
        if limit is not None and self._engine.statistics().waiting >= limit:
            raise queue_full(limit)
        call = Call(gen_request, reply, stream, responder, arrived_s=now_s, known_as=known_as)
        self._calls[call] = [str(next(self._ids)) for _ in gen_request.choices]
        for number, (engine_id, choice) in enumerate(zip(self._calls[call], gen_request.choices, strict=True)):
            prompt, kv = choice.prompt, gen_request.kv
            stages = kv is not None and kv.stages and kv.source is None and gen_request.ends_at_once
            awaits = kv is not None and kv.awaits
            self._engine.submit(
                EngineRequest(
                    engine_id,
                    prompt.tokens,
                    choice.script.tokens,
                    prompt.block_hashes,
                    stages_kv=stages,
                    awaits_kv=awaits,
                    max_load_tokens=gen_request.max_load_tokens,
                    pulls=gen_request.peer is not None and self.peer_pulls is not None,
                    adapter="" if prompt.scope.adapter is None else prompt.scope.adapter.name,
                    priority=gen_request.priority,
                ),
                now_s,
            )
            if kv is not None and awaits:
                self.kv_legs.enter(engine_id, kv)
            self._generations[engine_id] = Generation(call, number)
            if self.kv_events is not None:
                self.kv_events.enter(engine_id, prompt)
        self._idle.clear()
        responder.on_disconnect = lambda: self._abort(call)
        if stream is not None:
            responder.start_stream()
            call.write(stream.opening())
        self._arm()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is under way; False if the time ran out first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def pause(self) -> None:
        """Stop making progress, as a stopped process or a hung device does; requests are still taken."""
        self._pump()
        self.clock.pause()
        self._disarm()

    def resume(self) -> None:
        self.clock.resume()
        self._arm()

    @property
    def holds_back(self) -> bool:
        """Whether the scheduler is paused: requests wait in the queue."""
        return self._holds_back

    def hold_back(self, *, aborts: bool, clears_cache: bool) -> None:
        """Pause the scheduler, after what runs was ended or with it frozen."""
        if aborts:
            self.abort_all()
        if clears_cache:
            self._engine.clear_cache()
        self._holds_back = True
        self.pause()

    def go_on(self) -> None:
        """End the pause of the scheduler."""
        self._holds_back = False
        self.resume()

    def abort_all(self) -> int:
        """End every answer where it stands, with ``finish_reason`` abort (a server that shuts down). Returns their
        number."""
        self._pump()
        ended = list(self._generations.items())
        self._abort_answers(ended)
        self._disarm()
        return len(ended)

    def abort_named(self, ids: Collection[str]) -> None:
        """End the answers with these ids of the engine where they stand. Unknown ids are nobody's."""
        self._pump()
        of = {call: call.ids() for call in self._calls}
        self._abort_answers(
            [
                (engine_id, generation)
                for engine_id, generation in self._generations.items()
                if (own := of[generation.call]) and own[generation.number] in ids
            ]
        )
        self._arm()

    def _abort_answers(self, answers: Iterable[tuple[str, Generation]]) -> None:
        for engine_id, generation in answers:
            done = self._engine.generated_tokens(engine_id)
            self._engine.abort(engine_id, self.clock.now_s())
            self._end(engine_id, generation, Ended(done, "abort"))

    def kill(self) -> None:
        """The engine dies: streams end with an error event under the status they have, others get 500."""
        self._dead = True
        self._disarm()
        self._reboot_moves()  # a dead process frees nothing elsewhere
        error = engine_dead()
        for call in list(self._calls):
            self._drop(call)
            if call.stream is None:
                call.responder.send(error.status, call.reply.refusal(error))
            elif last_words := call.stream.broken(error):
                call.responder.end_stream(last_words)
            else:
                call.responder.cut()

    def restart(self) -> None:
        """A new engine process: nothing cached, every counter at zero, and no pause of the former one."""
        self._boot()
        self.clock.resume()
        self._dead = self._holds_back = False

    def publish_cache(self, log: KvEventLog | None) -> None:
        """Write changes of the engine's cache to this log from now on. For an engine that has done nothing yet."""
        self.kv_events = log
        self._boot()

    def _reboot_moves(self) -> None:
        self.kv_legs.reboot()
        if self.peer_pulls is not None:
            self.peer_pulls.reboot()

    def _boot(self) -> None:
        self._reboot_moves()
        log = self.kv_events
        pool = pool_of(self.config) if log is None else pool_of(self.config, log.journal, log.of_tiers)
        self._engine = Engine(self.config, pool)
        self._engine.start_with_adapters(self._settings.loras)
        model, ranks, statistics = (
            self._settings.served_model,
            self._settings.data_parallel_size,
            self._statistics,
        )
        started_s = time.time()
        self.metrics = InstanceMetrics(
            model,
            self.config,
            statistics,
            started_s=started_s,
            wall_s=self._wall_s,
            rank=self._rank,
            ranks=ranks,
            pulls=self.peer_pulls is not None,
        )

    def _statistics(self) -> EngineStatistics:
        """The engine's figures of this moment: it may decode for minutes between two visible events."""
        if not self._dead:
            self._pump()
            self._arm()
        return self._engine.statistics()

    # the clock ----------------------------------------------------------------------------------------------
    def _arm(self) -> None:
        """Wake for the next visible event, or earlier for tokens to stream, but not more often than wanted."""
        self._disarm()
        if self.clock.paused or self._dead:
            return
        event_s = self._engine.next_event_s()
        if event_s is None:
            return
        delay_s = self.clock.wall_delay_s(event_s)
        if self._streaming:
            step_s = self._engine.next_step_end_s()
            if step_s is not None and step_s < event_s:
                pause_s = self._flushed_s + FLUSH_INTERVAL_S - time.monotonic()
                delay_s = min(delay_s, max(self.clock.wall_delay_s(step_s), pause_s))
        self._timer = asyncio.get_running_loop().call_later(max(delay_s, _MIN_TICK_S), self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._pump()
        self._arm()

    def _pump(self) -> None:
        """Bring the engine to the present and write what it has generated."""
        now_s = self.clock.now_s()
        events = self._engine.advance(now_s)
        if self.kv_events is not None:
            self.kv_events.publish(time.time())
        for event in events:
            self._handle(event)
        self._flushed_s = time.monotonic()
        interval = self._settings.stream_interval
        for engine_id, generation in self._streaming.items():
            tokens = self._engine.generated_tokens(engine_id) - generation.sent_tokens
            if tokens >= interval and generation.call.responder.writable:
                self._write_tokens(generation, tokens)
                self._count_tokens(generation, tokens, now_s)

    # events -------------------------------------------------------------------------------------------------
    def _handle(self, event: Event) -> None:
        generation = self._generations.get(event.request_id)
        if generation is None:
            return
        if event.kind is EventKind.SCHEDULED and math.isnan(generation.started_s):
            generation.started_s = event.time_s
            self.metrics.queue_time_s.observe(self._wall_s(event.time_s - generation.call.arrived_s))
            if generation.choice.prompt.kills_engine:
                self._crash()
        elif event.kind is EventKind.FIRST_TOKEN:
            self._first_token(event, generation)
        elif event.kind is EventKind.PULLING:
            self._pull(event, generation.call.gen_request)
        elif event.kind is EventKind.FINISHED:
            self._count_tokens(generation, event.tokens - max(1, generation.sent_tokens), event.time_s)
            if generation.choice.script.is_given_back:  # its end has no token
                self._write_tokens(generation, event.tokens - generation.sent_tokens)
            self._stage(event.request_id, generation)
            self._end(event.request_id, generation, Ended(event.tokens, generation.choice.script.finish_reason))
            self.metrics.request_latency_s.observe(self._wall_s(event.time_s - generation.call.arrived_s))

    def _pull(self, event: Event, gen_request: GenerationRequest) -> None:
        if gen_request.kv is not None and gen_request.kv.awaits:
            self.kv_legs.pull(event.request_id, gen_request.kv, event.tokens)
        elif self.peer_pulls is not None and gen_request.peer is not None:
            self.peer_pulls.pull(event.request_id, gen_request.peer)

    def _first_token(self, event: Event, generation: Generation) -> None:
        call, choice = generation.call, generation.choice
        generation.last_token_s = event.time_s
        if choice.first_of_prompt:
            call.cached_tokens[generation.number] = event.tokens
            self.metrics.prompt_tokens += choice.prompt.tokens
        self.metrics.time_to_first_token_s.observe(self._wall_s(event.time_s - call.arrived_s))
        if call.stream is None:
            return
        self._streaming[event.request_id] = generation
        self._begin(call, call.stream)
        if choice.script.tokens > 1:
            self._write_tokens(generation, 1)

    def _stage(self, engine_id: str, generation: Generation) -> None:
        """The answer of a prefill leg says where its KV is."""
        gen_request, tokens = generation.call.gen_request, generation.choice.prompt.tokens
        if gen_request.kv is None or not gen_request.kv.stages or not gen_request.ends_at_once:
            return
        if gen_request.kv.source is not None:
            self.kv_legs.send(gen_request.kv.source, tokens)
        else:
            gen_request.kv.returned = self.kv_legs.staged(engine_id, tokens, self.config.block_tokens)

    # KV of other servers ------------------------------------------------------------------------------------
    def has_staged(self, engine_id: str) -> bool:
        self._pump()
        return self._engine.has_staged(engine_id)

    def release_staged(self, engine_id: str) -> None:
        self._engine.release_staged(engine_id, self.clock.now_s())
        self._arm()

    def receive(self, engine_id: str) -> None:
        self._pump()
        self._engine.receive(engine_id, self.clock.now_s())
        self._arm()

    def wanted_blocks(self, engine_id: str) -> tuple[int, ...]:
        return self._engine.wanted_blocks(engine_id)

    def serve(self, hashes: Sequence[int]) -> int:
        self._pump()
        self._arm()
        return self._engine.serve(hashes)

    def receive_pulled(self, engine_id: str, blocks: int, busy_s: float) -> None:
        self._pump()
        self._engine.receive_pulled(engine_id, blocks, busy_s, self.clock.now_s())
        self._arm()

    def lose(self, engine_id: str, why: str) -> None:
        """KV of another server will not come. The request fails, or its prompt is computed here."""
        self._pump()
        if self._settings.kv_load_failure_policy == "recompute":
            now_s = self.clock.now_s()
            if not self._engine.receive_pulled(engine_id, 0, 0.0, now_s):
                self._engine.lose_kv(engine_id, now_s)
        elif (generation := self._generations.get(engine_id)) is not None:
            call, error = generation.call, kv_load_failed(why)
            self._drop(call)
            if call.stream is None:
                call.responder.send(error.status, call.reply.refusal(error))
            else:
                call.responder.end_stream(call.stream.broken(error))
        self._arm()

    def _end(self, engine_id: str, generation: Generation, ended: Ended) -> None:
        """Complete an answer, and with the last one the request."""
        call = generation.call
        self._forget(engine_id)
        self.metrics.finished[ended.finish_reason] += 1
        call.ends[generation.number] = ended
        last = len(call.ends) == len(call.gen_request.choices)
        if last:
            self._remove(call)
        if call.stream is not None:
            self._begin(call, call.stream)
            data = call.stream.end(generation.number, generation.sent_tokens, ended)
            if last:
                call.responder.end_stream(data + call.stream.closing(call.all_ends(), call.usage()))
            else:
                call.write(data)
        elif last:
            try:
                status, answer = 200, call.reply.whole(call.all_ends(), call.usage())
            except ApiError as error:
                status, answer = error.status, call.reply.refusal(error)
            call.responder.send(status, answer)

    def _begin(self, call: Call, stream: StreamReply) -> None:
        if not call.begun:
            call.begun = True
            call.write(stream.begin())

    def _abort(self, call: Call) -> None:
        """The client has left."""
        if call in self._calls:
            self.metrics.finished["abort"] += len(call.gen_request.choices) - len(call.ends)
            self._drop(call)
            self._arm()

    def _drop(self, call: Call) -> None:
        """Take what is left of a request out of the engine."""
        for engine_id in self._calls[call]:
            if engine_id in self._generations:
                self._forget(engine_id)
                self._engine.abort(engine_id, self.clock.now_s())
        self._remove(call)

    def _forget(self, engine_id: str) -> None:
        del self._generations[engine_id]
        self.kv_legs.leave(engine_id)
        if self.peer_pulls is not None:
            self.peer_pulls.leave(engine_id)
        if self.kv_events is not None:
            self.kv_events.publish(time.time())
            self.kv_events.leave(engine_id)
        self._streaming.pop(engine_id, None)

    def _remove(self, call: Call) -> None:
        del self._calls[call]
        if not self._calls:
            self._idle.set()

    def _write_tokens(self, generation: Generation, tokens: int) -> None:
        call = generation.call
        if call.stream is not None:
            call.write(call.stream.delta(generation.number, generation.sent_tokens, tokens))
            generation.sent_tokens += tokens

    def _count_tokens(self, generation: Generation, tokens: int, now_s: float) -> None:
        if tokens > 0 and not math.isnan(generation.last_token_s):
            mean_s = self._wall_s(now_s - generation.last_token_s) / tokens
            self.metrics.inter_token_s.observe(mean_s, tokens)
            generation.last_token_s = now_s

    def load_adapter(self, name: str, *, replaces: bool) -> float:
        """Have the engine load an adapter, or its new weights; returns the time that this takes, in seconds."""
        return self._wall_s(self._engine.load_adapter(name, self.clock.now_s(), replaces=replaces))

    def _wall_s(self, engine_s: float) -> float:
        return max(0.0, engine_s) / self.clock.time_scale
