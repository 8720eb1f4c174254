"""Requests under way in an emulated engine, and their answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
    ends: dict[int, Ended] = field(default_factory=dict)
    cached_tokens: int = 0
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
        return Usage(self.gen_request.prompt_tokens, completion_tokens, self.cached_tokens)


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
