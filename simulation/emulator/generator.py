"""The engine in real time: takes requests, lets the engine run by the clock, and writes answers as tokens appear.

The engine's virtual time is exact; the event loop is not. Whatever the loop's delay, a token appears at the engine's
time for it, and several that are due at once go out in one chunk, as vLLM's front end does when it is late.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from simulation.emulator.clock import EngineClock
from simulation.emulator.connection import Responder
from simulation.emulator.errors import engine_dead, queue_full
from simulation.emulator.metrics import InstanceMetrics
from simulation.emulator.payload import Ask
from simulation.emulator.replies import DONE, AnswerText, Reply, Usage
from simulation.engine import Engine
from simulation.engine_types import EngineRequest, Event, EventKind
from simulation.settings import EmulatorSettings

_MIN_TICK_S = 0.0005


@dataclass(slots=True, eq=False)
class Generation:
    """One request under way."""

    ask: Ask
    reply: Reply
    responder: Responder
    arrived_s: float
    """Engine time, as all times here."""
    started_s: float = math.nan
    last_token_s: float = math.nan
    cached_tokens: int = 0
    sent_tokens: int = field(default=0)

    def usage(self, completion_tokens: int) -> Usage:
        return Usage(self.ask.prompt_tokens, completion_tokens, self.cached_tokens)


class Generator:
    """Runs one engine. Everything happens on one event loop; no call blocks.

    Args:
        crash: what a prompt that kills the engine sets off; it must call ``kill``.
    """

    def __init__(self, settings: EmulatorSettings, crash: Callable[[], None]) -> None:
        self.config = settings.engine_config()
        self.clock = EngineClock(time.monotonic, settings.time_scale)
        self._settings = settings
        self._crash = crash
        self._boot()
        self._text = AnswerText()
        self._ids = count()
        self._generations: dict[str, Generation] = {}
        self._streaming: dict[str, Generation] = {}
        """Those that stream and have their first token."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None
        self._flushed_s = -math.inf
        self._dead = False

    @property
    def active(self) -> int:
        """Requests under way."""
        return len(self._generations)

    @property
    def engine(self) -> Engine:
        """For reading; only the generator drives it."""
        return self._engine

    def start(self, ask: Ask, reply: Reply, responder: Responder) -> None:
        """Take a request; its answer goes to the responder as it comes.

        Raises:
            ApiError: the engine is dead or its queue is full.
        """
        if self._dead:
            raise engine_dead()
        now_s = self.clock.now_s()
        limit = self._settings.max_queued_requests
        if limit is not None and self._engine.statistics().waiting >= limit:
            raise queue_full(limit)
        engine_id = str(next(self._ids))
        request = EngineRequest(engine_id, ask.prompt_tokens, ask.output_tokens, ask.block_hashes)
        self._engine.submit(request, now_s)
        self._generations[engine_id] = Generation(ask, reply, responder, arrived_s=now_s)
        self._idle.clear()
        responder.on_disconnect = lambda: self._abort(engine_id)
        if ask.stream:
            responder.start_stream()
        self._arm()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is under way; False if the time ran out first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
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

    def abort_all(self) -> None:
        """End every answer where it stands, with ``finish_reason`` abort (a server that shuts down)."""
        self._pump()
        for engine_id, generation in list(self._generations.items()):
            done = self._engine.generated_tokens(engine_id)
            self._engine.abort(engine_id, self.clock.now_s())
            self._end(engine_id, generation, done, "abort")
        self._disarm()

    def kill(self) -> None:
        """The engine dies: streams end with an error event under the status they have, others get 500."""
        self._dead = True
        self._disarm()
        error = engine_dead()
        for engine_id, generation in list(self._generations.items()):
            self._engine.abort(engine_id, self.clock.now_s())
            self._forget(engine_id)
            if generation.ask.stream:
                generation.responder.end_stream(b"data: " + error.body() + b"\n\n" + DONE)
            else:
                generation.responder.send(error.status, error.body())

    def restart(self) -> None:
        """A new engine process: nothing cached, every counter at zero."""
        self._boot()
        self._dead = False

    def _boot(self) -> None:
        self._engine = Engine(self.config)
        self.metrics = InstanceMetrics(
            self._settings.served_model, self.config, self._engine.statistics, started_s=time.time()
        )

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
                pause_s = self._flushed_s + self._settings.flush_interval_ms / 1000 - time.monotonic()
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
        for event in self._engine.advance(now_s):
            self._handle(event)
        self._flushed_s = time.monotonic()
        interval = self._settings.stream_interval
        for engine_id, generation in self._streaming.items():
            tokens = self._engine.generated_tokens(engine_id) - generation.sent_tokens
            if tokens >= interval and generation.responder.writable:
                generation.responder.write(generation.reply.delta(self._next_text(generation, tokens)))
                self._count_tokens(generation, tokens, now_s)

    # events -------------------------------------------------------------------------------------------------
    def _handle(self, event: Event) -> None:
        generation = self._generations.get(event.request_id)
        if generation is None:
            return
        if event.kind is EventKind.SCHEDULED and math.isnan(generation.started_s):
            generation.started_s = event.time_s
            self.metrics.queue_time_s.observe(self._wall_s(event.time_s - generation.arrived_s))
            if generation.ask.kills_engine:
                self._crash()
        elif event.kind is EventKind.FIRST_TOKEN:
            self._first_token(event, generation)
        elif event.kind is EventKind.FINISHED:
            self._count_tokens(generation, event.tokens - max(1, generation.sent_tokens), event.time_s)
            self._end(event.request_id, generation, event.tokens, generation.ask.finish_reason)
            self.metrics.request_latency_s.observe(self._wall_s(event.time_s - generation.arrived_s))

    def _first_token(self, event: Event, generation: Generation) -> None:
        generation.cached_tokens = event.tokens
        generation.last_token_s = event.time_s
        self.metrics.prompt_tokens += generation.ask.prompt_tokens
        self.metrics.time_to_first_token_s.observe(self._wall_s(event.time_s - generation.arrived_s))
        if generation.ask.stream:
            self._streaming[event.request_id] = generation
            opening = generation.reply.opening()
            if generation.ask.output_tokens > 1:
                generation.responder.write(opening + generation.reply.delta(self._next_text(generation, 1)))
            elif opening:
                generation.responder.write(opening)

    def _end(self, engine_id: str, generation: Generation, tokens: int, finish_reason: str) -> None:
        """Complete an answer with ``tokens`` tokens in all."""
        self._forget(engine_id)
        self.metrics.finished[finish_reason] += 1
        usage, reply, responder = generation.usage(tokens), generation.reply, generation.responder
        text = self._next_text(generation, tokens - generation.sent_tokens)
        if generation.ask.stream:
            responder.end_stream(reply.closing(text, finish_reason, usage if generation.ask.include_usage else None))
        else:
            responder.send(200, reply.whole(text, finish_reason, usage))

    def _abort(self, engine_id: str) -> None:
        """The client has left."""
        if engine_id in self._generations:
            self._forget(engine_id)
            self._engine.abort(engine_id, self.clock.now_s())
            self.metrics.finished["abort"] += 1
            self._arm()

    def _forget(self, engine_id: str) -> None:
        del self._generations[engine_id]
        self._streaming.pop(engine_id, None)
        if not self._generations:
            self._idle.set()

    def _next_text(self, generation: Generation, tokens: int) -> bytes:
        text = self._text.tokens(generation.ask.text_seed, generation.sent_tokens, tokens)
        generation.sent_tokens += tokens
        return text

    def _count_tokens(self, generation: Generation, tokens: int, now_s: float) -> None:
        if tokens > 0 and not math.isnan(generation.last_token_s):
            mean_s = self._wall_s(now_s - generation.last_token_s) / tokens
            self.metrics.inter_token_s.observe(mean_s, tokens)
            generation.last_token_s = now_s

    def _wall_s(self, engine_s: float) -> float:
        return max(0.0, engine_s) / self.clock.time_scale
