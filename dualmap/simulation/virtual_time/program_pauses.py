"""ThunderAgent's pause and resume of whole programs, as another project's router does it.

Source (its code, 2026): each program belongs to one instance. Every 5 s, where the programs of an instance need more
than its KV memory, those that are at a tool are paused, the smallest first, then those at work, which pause when their
turn ends. Programs that wait go where there is most room, as many as fit: first those that were paused and whose next
turn has come, then new ones, then those still at a tool, and the smallest first. A new program goes at once where
nothing waits and an instance has room for it. The memory of a program is its last prompt and answer and 256 tokens,
less the prefix that programs begin with. A program that has waited for 30 minutes goes in any case.

A program that ended is reported to it, by its clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

INTERVAL_S = 5.0
BUFFER_TOKENS = 256
FORCED_AFTER_S = 1800.0


@dataclass(slots=True)
class _Program:
    tokens: int
    instance_id: str | None = None
    """The instance that it belongs to; None: it waits for one."""
    at_work: bool = False
    pauses: bool = False
    """It pauses when its turn ends."""
    began: bool = False
    """A turn of it has gone."""
    turn: int | None = None
    """Its turn that waits."""
    since_s: float = 0.0


class ProgramPauses:
    """The programs, by name."""

    def __init__(self, capacity_tokens: Mapping[str, int], shared_tokens: int = 0) -> None:
        self._capacity_tokens = dict(capacity_tokens)
        self._shared_tokens = shared_tokens
        self._programs: dict[str, _Program] = {}

    def arrives(self, name: str, number: int, tokens: int, now_s: float) -> str | None:
        """A turn has come; returns its instance, or None where it waits."""
        is_new = name not in self._programs
        program = self._programs.setdefault(name, _Program(tokens))
        program.tokens, program.at_work = tokens, True
        if is_new and not any(other.turn is not None for other in self._programs.values()):
            rooms = {each: self._room(each) for each in self._capacity_tokens}
            best = max(rooms, key=lambda each: rooms[each])
            if rooms[best] >= tokens + BUFFER_TOKENS:
                program.instance_id = best
        if program.instance_id is None:
            program.turn, program.since_s = number, now_s
            return None
        program.began = True
        return program.instance_id

    def ended(self, name: str, tokens: int, *, is_last: bool) -> None:
        """A turn is over; ``tokens`` are those of its prompt and answer."""
        program = self._programs.get(name)
        if program is None:
            return
        program.tokens, program.at_work = tokens, False
        if is_last:
            del self._programs[name]
        elif program.pauses:
            program.pauses, program.instance_id = False, None

    def tick(self, now_s: float) -> list[tuple[int, str]]:
        """The turns that go now, each with its instance."""
        goes = self._resume(now_s)
        for instance_id in self._capacity_tokens:
            self._pause(instance_id)
        return goes

    def _room(self, instance_id: str) -> float:
        own = [each for each in self._programs.values() if each.instance_id == instance_id]
        needed = sum(each.tokens + BUFFER_TOKENS for each in own if not each.pauses)
        return self._capacity_tokens[instance_id] - needed + max(0, len(own) - 1) * self._shared_tokens

    def _resume(self, now_s: float) -> list[tuple[int, str]]:
        rooms = {each: room for each in self._capacity_tokens if (room := self._room(each)) > BUFFER_TOKENS}
        left, chosen = sum(rooms.values()), []
        paused = [each for each in self._programs.values() if each.instance_id is None]
        for each in sorted(paused, key=lambda each: (_rank(each), each.tokens)):
            if each.tokens + BUFFER_TOKENS <= left:
                left -= each.tokens + BUFFER_TOKENS
                chosen.append(each)
        for each in sorted(chosen, key=lambda each: -each.tokens):
            best = max(rooms, key=lambda name: rooms[name])
            if each.tokens + BUFFER_TOKENS <= rooms[best]:
                each.instance_id = best
                rooms[best] -= each.tokens + BUFFER_TOKENS
        for each in paused:
            if each.instance_id is None and each.turn is not None and now_s - each.since_s > FORCED_AFTER_S:
                each.instance_id = max(self._capacity_tokens, key=self._room)
        goes: list[tuple[int, str]] = []
        for each in paused:
            if each.instance_id is not None and each.turn is not None:
                goes.append((each.turn, each.instance_id))
                each.turn, each.began = None, True
        return goes

    def _pause(self, instance_id: str) -> None:
        own = [each for each in self._programs.values() if each.instance_id == instance_id and not each.pauses]
        for each in sorted(own, key=lambda each: (each.at_work, each.tokens)):
            if self._room(instance_id) >= 0:
                return
            if each.at_work:
                each.pauses = True
            else:
                each.instance_id = None


def _rank(program: _Program) -> int:
    if not program.began:
        return 1
    return 0 if program.at_work else 2
