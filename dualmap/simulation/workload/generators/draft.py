"""Building blocks of generated traces: prompts made of block ids, and requests gathered from a start time on."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

from dualmap.simulation.workload.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as block ids; the last block is partial unless the tokens fill it."""

    tokens: int
    ids: tuple[int, ...]

    def full_ids(self, block_tokens: int) -> tuple[int, ...]:
        return self.ids[: self.tokens // block_tokens]


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a request in its session, see ``TraceRequest``."""

    session: str
    think_s: float | None = None
    """None: the first turn."""
    after: tuple[str, ...] = ()


@dataclass(slots=True)
class Draft:
    """A trace in the making: mints block ids, keeps requests in order of arrival."""

    block_tokens: int
    _next_id: int = 0
    _requests: list[tuple[float, int, TraceRequest]] = field(default_factory=list)
    _added: count[int] = field(default_factory=count)
    _next_session: count[int] = field(default_factory=count)

    def extended(self, prefix: tuple[int, ...], tokens: int) -> Prompt:
        """A prompt of ``tokens`` that starts with the full blocks ``prefix`` and goes on with new ones."""
        blocks = -(-tokens // self.block_tokens)
        kept = prefix[:blocks]
        return Prompt(tokens, kept + self.shared_prefix(blocks - len(kept)))

    def shared_prefix(self, blocks: int) -> tuple[int, ...]:
        """New full blocks that several prompts will start with."""
        first = self._next_id
        self._next_id += blocks
        return tuple(range(first, self._next_id))

    def new_session(self) -> str:
        return str(next(self._next_session))

    def add(
        self,
        arrival_s: float,
        prompt: Prompt,
        output_tokens: int,
        turn: Turn | None = None,
        *,
        adapter: str = "",
        adapter_rank: int = 0,
    ) -> None:
        request = TraceRequest(
            arrival_s, prompt.tokens, max(1, output_tokens), prompt.ids, adapter=adapter, adapter_rank=adapter_rank
        )
        if turn is not None:
            request = replace(request, session=turn.session, think_s=turn.think_s, after=turn.after)
        insort(self._requests, (arrival_s, next(self._added), request))

    def finish(self, name: str, requests: int) -> Trace:
        """The first ``requests`` that arrive at 0 or later, with ids renumbered in order of appearance."""
        chosen = [request for arrival_s, _, request in self._requests if arrival_s >= 0][:requests]
        if len(chosen) < requests:
            raise ValueError(f"only {len(chosen)} of {requests} requests were drafted")
        return Trace(name, self.block_tokens, tuple(_renumbered(chosen)))


def _renumbered(requests: Iterable[TraceRequest]) -> Iterable[TraceRequest]:
    numbers: dict[int, int] = {}
    for request in requests:
        ids = tuple(numbers.setdefault(block, len(numbers)) for block in request.hash_ids)
        yield replace(request, hash_ids=ids)
