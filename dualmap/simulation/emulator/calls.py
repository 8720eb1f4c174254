"""Requests under way in an emulated engine, and their answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate

from dualmap.simulation.emulator.connection import Responder
from dualmap.simulation.emulator.generation_request import Choice, GenerationRequest
from dualmap.simulation.emulator.replies import Ended, Reply, StreamReply, Usage


@dataclass(slots=True, eq=False)
class Call:
    """One request under way: one or more answers, one response."""

    gen_request: GenerationRequest
    reply: Reply
    stream: StreamReply | None
    """The reply as a stream, where its pieces are sent as they come."""
    responder: Responder
    arrived_s: float
    """Engine time, as all times here."""
    _: KW_ONLY
    ends: dict[int, Ended] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    """By choice, those of the first answer to each prompt, in the order in which they began."""
    known_as: Callable[[int], str] | None = None
    """The engine's own id of the answers to the prompt of a number; None: they have none that a client knows."""
    begun: bool = False

    def write(self, data: bytes) -> None:
        """A piece of the stream, unless it is empty."""
        if data:
            self.responder.write(data)

    def all_ends(self) -> list[Ended]:
        """The ends of a complete request, in the order of its choices."""
        return [self.ends[number] for number in range(len(self.gen_request.choices))]

    def usage(self) -> Usage:
        completion_tokens = sum(ended.tokens for ended in self.ends.values())
        return Usage(self.gen_request.prompt_tokens, completion_tokens, self._reported_cached_tokens())

    def _reported_cached_tokens(self) -> int:
        """Cached tokens of one prompt, also where there are several, as in vLLM: of the last one; in a stream of
        the one that began first."""
        cached = self.cached_tokens
        if not cached:
            return 0
        return next(iter(cached.values())) if self.stream is not None else cached[max(cached)]

    def ids(self) -> list[str]:
        """The engine's own id of each choice."""
        if self.known_as is None:
            return []
        prompts = accumulate(int(choice.first_of_prompt) for choice in self.gen_request.choices)
        return [self.known_as(prompt - 1) for prompt in prompts]


@dataclass(slots=True, eq=False)
class Generation:
    """One answer under way."""

    call: Call
    number: int
    """Index among the choices of the request."""
    started_s: float = math.nan
    last_token_s: float = math.nan
    sent_tokens: int = 0

    @property
    def choice(self) -> Choice:
        return self.call.gen_request.choices[self.number]
