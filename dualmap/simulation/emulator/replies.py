"""How the generator speaks to clients: one reply for each request, of its API's family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from dualmap.simulation.emulator.errors import ApiError

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Stamp:
    """The identity of one server in its answers."""

    request_id: str
    """Unique; what the client or the router sent, else minted."""
    model: str
    created: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def created_tokens(self, block_tokens: int) -> int:
        """The prompt's tokens that were put into the cache, in whole blocks."""
        return max(0, self.prompt_tokens // block_tokens * block_tokens - self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Ended:
    """One answer of a request is complete."""

    tokens: int
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""


class Reply(Protocol):
    """Formats the answers to one request, by their number among its choices. It writes nothing itself."""

    def whole(self, ends: Sequence[Ended], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""

    def refusal(self, error: ApiError) -> bytes:
        """The body of an error instead of an answer."""


class StreamReply(Reply, Protocol):
    """A reply that can come piece by piece. Every piece but ``closing`` may be empty."""

    def engine_id(self, prompt: int) -> str:
        """The engine's own id of the answers to a prompt, by which they can be aborted."""

    def opening(self) -> bytes:
        """The bytes that a stream sends with its head, before anything is computed."""

    def begin(self) -> bytes:
        """The bytes before the first token of all."""

    def delta(self, choice: int, start: int, count: int) -> bytes:
        """Tokens ``start`` to before ``start + count``; the hot path of every stream."""

    def end(self, choice: int, start: int, ended: Ended) -> bytes:
        """The tokens from ``start`` on, and why the answer ended."""

    def closing(self, ends: Sequence[Ended], usage: Usage) -> bytes:
        """The end of the stream, after the end of every choice."""

    def broken(self, error: ApiError) -> bytes:
        """The end of a stream whose engine dies; nothing: the connection is cut."""


def event(payload: dict[str, Any]) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """A server-sent event that is named by its type."""
    return f"event: {payload['type']}\n".encode() + event(payload)
