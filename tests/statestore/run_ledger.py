"""The ledger of runs once more, as plain objects that are searched from end to end: what the scripts keep in sorted
sets, by the same rules. For runs that their clients name, and whose prompts share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dualmap.scheduling.runs import admission as rules
from dualmap.scheduling.runs.turn import Turn, TurnEnd
from dualmap.statestore.pool.runs import TurnStatus
from dualmap.statestore.pool.scripts import FORGET_RUN_MS

MOST_LOOKED_AT = 4
"""Runs that a turn looks at which are to be forgotten."""


@dataclass
class Agent:
    seen_ms: int
    tokens: int = 0
    busy: int = 0


@dataclass
class Run:
    name: str
    begun_ms: int
    seen_ms: int = 0
    charged_ms: int = 0
    active: bool = False
    interrupted: bool = False
    service: float = 0.0
    quantum_from: float = 0.0
    level: int = 0
    latest_ms: int = 0
    turns: int = 0
    output_tokens: int = 0
    parked_ms: int = 0
    prefill_ms: int = 0
    decode_ms: int = 0
    tool_ms: int = 0
    agents: dict[str, Agent] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    """Since when each turn waits."""

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.agents.values())

    @property
    def busy(self) -> int:
        return sum(each.busy for each in self.agents.values())


@dataclass
class RunLedger:
    capacity_tokens: int = 0
    ended_runs: int = 0
    mean_service: float = 0.0
    passed: int = 0
    on_time_ms: int = 0
    runs: dict[str, Run] = field(default_factory=dict)
    turns: dict[str, tuple[Run, str]] = field(default_factory=dict)
    """The run and the agent of each turn that is not over."""

    @property
    def used_tokens(self) -> int:
        return sum(run.tokens for run in self.runs.values() if run.active)

    @property
    def waiting_turns(self) -> int:
        return sum(len(run.waiting) for run in self.runs.values())

    def admit(self, turn: Turn, capacity_tokens: int, level: int, now_ms: int) -> TurnStatus:
        """A turn has come, or is repeated."""
        self.capacity_tokens = capacity_tokens
        if turn.turn_id in self.turns:
            run = self.turns[turn.turn_id][0]
            if turn.turn_id in run.waiting:
                run.level = level
        else:
            self._enter(turn, level, now_ms)
        self._let_go(now_ms)
        run, _ = self.turns[turn.turn_id]
        return TurnStatus.WAITS if turn.turn_id in run.waiting else TurnStatus.GOES

    def _enter(self, turn: Turn, level: int, now_ms: int) -> None:
        self._forget_oldest(now_ms)
        run = self.runs.setdefault(turn.name.run, Run(turn.name.run, now_ms))
        self._see(run, now_ms)
        for agent in run.agents.values():
            is_silent = not agent.busy and agent.seen_ms < rules.silent_since_ms(now_ms)
            if is_silent and len(run.agents) > 1:
                agent.tokens = 0
        name = turn.name.branch or turn.name.run
        agent = run.agents.setdefault(name, Agent(now_ms))
        if not agent.busy:
            run.tool_ms += now_ms - agent.seen_ms
        agent.seen_ms, agent.tokens = now_ms, turn.chain.prompt_tokens
        self.turns[turn.turn_id] = run, name
        if run.active and not self._gives_way(run, now_ms):
            self._send(run, agent)
            return
        run.active = False
        run.waiting[turn.turn_id] = now_ms
        run.latest_ms = max(run.latest_ms, now_ms + round(turn.waits_s * 1000))
        run.level = level

    def end(self, over: TurnEnd, now_ms: int) -> None:
        """A turn is over, however it went."""
        if over.turn_id not in self.turns:
            return
        run, name = self.turns.pop(over.turn_id)
        self._see(run, now_ms)
        if over.turn_id in run.waiting:
            del run.waiting[over.turn_id]
            run.latest_ms = run.latest_ms if run.waiting else 0
        else:
            agent = run.agents[name]
            agent.busy, agent.seen_ms, agent.tokens = agent.busy - 1, now_ms, agent.tokens + over.output_tokens
            run.output_tokens += over.output_tokens
            run.prefill_ms += over.prefill_ms
            run.decode_ms += over.decode_ms
            run.active = run.active and (over.was_sent or run.busy > 0)
        self._let_go(now_ms)

    def _see(self, run: Run, now_ms: int) -> None:
        if run.active:
            run.service += run.tokens * (now_ms - run.charged_ms) / 1000
        run.charged_ms = run.seen_ms = now_ms

    def _send(self, run: Run, agent: Agent) -> None:
        agent.busy += 1
        run.turns += 1

    def _forget_oldest(self, now_ms: int) -> None:
        for oldest in sorted(self.runs.values(), key=lambda run: (run.seen_ms, run.name))[:MOST_LOOKED_AT]:
            if oldest.seen_ms < now_ms - FORGET_RUN_MS:
                del self.runs[oldest.name]
                self.turns = {name: known for name, known in self.turns.items() if name not in oldest.waiting}

    # those that wait ---------------------------------------------------------------------------------------------
    def _waiting(self) -> Iterator[Run]:
        return (run for run in self.runs.values() if run.waiting)

    def _next(self, now_ms: int) -> tuple[Run, int] | None:
        """The run that goes next, and its group."""

        def since_ms(run: Run) -> int:
            return min(run.waiting.values())

        def age(run: Run) -> tuple[float, str]:
            return rules.waiting_since(since_ms(run), run.level), run.name

        def rank(run: Run) -> tuple[float, str]:
            return rules.waiting_rank(run.service, int(run.interrupted), run.level), run.name

        oldest = min(self._waiting(), key=age, default=None)
        if oldest is None:
            return None
        on_time = [run for run in self._waiting() if run.latest_ms >= now_ms]
        group = rules.goes_as(since_ms(oldest), now_ms, 1 if on_time else 0, self.passed)
        if group == rules.AGED:
            return oldest, group
        late = [run for run in self._waiting() if run.latest_ms < now_ms]
        return min(on_time if group == rules.ON_TIME else late, key=rank), group

    def _missing_tokens(self, run: Run, group: int, now_ms: int) -> float:
        room_tokens = rules.room_tokens(group, self.capacity_tokens, self.on_time_ms, now_ms)
        return rules.missing_tokens(run.tokens, self.used_tokens, room_tokens)

    def _makes_room(self, run: Run, group: int, now_ms: int) -> bool:
        missing, left = self._missing_tokens(run, group, now_ms), self.used_tokens
        if missing <= 0:
            return True
        give_way = []
        for other in sorted(self.runs.values(), key=lambda run: (run.seen_ms, run.name)):
            is_silent = other.active and not other.busy and other.seen_ms < rules.silent_since_ms(now_ms)
            if is_silent and missing > 0:
                give_way.append(other)
                missing, left = missing - other.tokens, left - other.tokens
        if missing > 0 and left > 0:
            return False
        for other in give_way:
            self.ended_runs += 1
            self.mean_service = rules.mean_service_with(other.service, self.ended_runs, self.mean_service)
            other.interrupted, other.active = True, False
        return True

    def _let_go(self, now_ms: int) -> None:
        while (found := self._next(now_ms)) is not None and self._makes_room(*found, now_ms):
            run, group = found
            self.passed = 0 if group == rules.AGED else self.passed + 1
            self.on_time_ms = now_ms if group == rules.ON_TIME else self.on_time_ms
            run.active, run.charged_ms, run.seen_ms, run.latest_ms = True, now_ms, now_ms, 0
            if not run.interrupted:
                run.quantum_from = run.service
            run.interrupted = False
            for turn_id, since_ms in run.waiting.items():
                run.parked_ms += now_ms - since_ms
                self._send(run, run.agents[self.turns[turn_id][1]])
            run.waiting.clear()

    def _gives_way(self, run: Run, now_ms: int) -> bool:
        found = None if run.busy else self._next(now_ms)
        if found is None:
            return False
        first, group = found
        had_quantum = rules.has_had_quantum(run.service, run.quantum_from, self.ended_runs, self.mean_service)
        return self._missing_tokens(first, group, now_ms) > 0 and rules.gives_way(
            run.service, first.service, int(had_quantum), self.used_tokens, self.capacity_tokens
        )
