"""The course of the ledger of runs is that of the plain one in ``run_ledger``, whatever comes in whatever order."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.admission import AGED_S, SILENT_S
from dualmap.scheduling.runs.turn import RunName, RunRecord, Turn, TurnEnd
from dualmap.scheduling.tenants.shares import Share
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.runs import TurnStatus
from tests.statestore.run_ledger import Run, RunLedger
from tests.statestore.samples import SCHEDULING, HandClock, instance, place

STEPS = 1000
CAPACITY_TOKENS = 1000
SEED = int(os.environ.get("DUALMAP_LOCKSTEP_SEED", "1"))
PAUSES_MS = {"short": (0, 3000), "silent": (0, 2500 * int(SILENT_S)), "aged": (0, 700 * int(AGED_S))}
TENANTS = ("light", "heavy")


@dataclass
class Agents:
    """Runs of agents at random, entered in both ledgers."""

    pool: PoolStore
    clock: HandClock
    pauses_ms: tuple[int, int]
    rng: random.Random
    plain: RunLedger = field(default_factory=RunLedger)
    turns: dict[str, Turn] = field(default_factory=dict)
    """Those that are not over."""
    number: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    async def step(self) -> None:
        rng = self.rng
        self.clock.now_ms += rng.choice((0, 1, rng.randint(*self.pauses_ms)))
        if self.number % 40 == 0:
            await self.work()
        kind = rng.choices(("new", "repeated", "over"), (5, 1, 5))[0]
        if kind == "new" or not self.turns:
            await self.admit(self.new_turn())
        elif kind == "repeated":
            await self.admit(rng.choice([*self.turns.values()]))
        else:
            await self.end(rng.choice((self.in_flight() if rng.random() < 0.8 else []) or [*self.turns.values()]))
        await self.compare()

    async def work(self) -> None:
        """Work of the tenants, so that their levels differ."""
        self.number += 1
        for tenant, tokens in (("light", 10), ("heavy", self.rng.randint(1, 900_000))):
            about: dict[str, Any] = {"tenant": tenant, "shares_as": tenant, "share": Share(tenant, 1.0, 1)}
            await place(self.pool, f"work-{tenant}-{self.number}", tokens=tokens, **about)

    def in_flight(self) -> list[Turn]:
        waiting = {turn_id for run in self.plain.runs.values() for turn_id in run.waiting}
        return [turn for turn in self.turns.values() if turn.turn_id not in waiting]

    def new_turn(self) -> Turn:
        rng, self.number = self.rng, self.number + 1
        run = rng.randrange(12)
        tenant = TENANTS[run % 2] if run < 8 else ""
        name = RunName(f"run{run}", rng.choice(("", "", "one", "two")))
        return Turn(
            f"t{self.number:05d}",
            "one",
            name,
            Chain((10_000 + self.number,), 16, rng.choice((20, 90, 250, 400, 1300))),
            rng.choice((0.5, 4.0, 60.0)),
            tenant=tenant,
            share=Share(tenant, 1.0, 1) if tenant else None,
        )

    async def admit(self, turn: Turn) -> None:
        former = self.plain.runs.get(turn.name.run)
        was_active = former is not None and former.active
        (status,) = await self.pool.runs.admit([turn], CAPACITY_TOKENS)
        # The level of a tenant follows its work: the scripts' own books have it.
        level = next((run.level for run in (await self.pool.runs.ledger()).runs if run.name == turn.name.run), 0)
        expected = self.plain.admit(turn, CAPACITY_TOKENS, level, self.clock.now_ms)
        assert status is expected
        self.turns[turn.turn_id] = turn
        gave_way = was_active and status is TurnStatus.WAITS
        self.seen.update([status.name, f"level {min(level, 1)}", "gave way" if gave_way else "kept its state"])

    async def end(self, turn: Turn) -> None:
        del self.turns[turn.turn_id]
        rng = self.rng
        times = rng.randrange(60), rng.randrange(900), rng.randrange(900)
        over = TurnEnd(turn.turn_id, "one", *times, was_sent=rng.random() < 0.9)
        await self.pool.release([Release("", replica_id="one", turn=over)])
        self.seen["given up"] += any(turn.turn_id in run.waiting for run in self.plain.runs.values())
        self.plain.end(over, self.clock.now_ms)

    async def compare(self) -> None:
        kept = await self.pool.runs.ledger()
        plain = self.plain
        memory = kept.memory
        assert (memory.used_tokens, memory.waiting_turns) == (plain.used_tokens, plain.waiting_turns)
        assert (kept.ended_runs, kept.mean_service) == (plain.ended_runs, pytest.approx(plain.mean_service))
        assert {run.name: kept_figures(run) for run in kept.runs} == {
            run.name: plain_figures(run) for run in plain.runs.values()
        }


def kept_figures(run: RunRecord) -> tuple[Any, ...]:
    agents = {each.name: (each.tokens, each.seen_ms, each.busy) for each in run.agents}
    return (
        run.active, run.tokens, run.busy, run.turns, run.waiting, run.waits_since_ms, pytest.approx(run.service),
        pytest.approx(run.quantum_from), run.interrupted, run.seen_ms, run.latest_ms, run.parked_ms, run.prefill_ms,
        run.decode_ms, run.tool_ms, run.output_tokens, agents,
    )  # fmt: skip


def plain_figures(run: Run) -> tuple[Any, ...]:
    agents = {name: (each.tokens, each.seen_ms, each.busy) for name, each in run.agents.items()}
    return (
        run.active, run.tokens, run.busy, run.turns, len(run.waiting), min(run.waiting.values(), default=0),
        run.service, run.quantum_from, run.interrupted, run.seen_ms, run.latest_ms, run.parked_ms, run.prefill_ms,
        run.decode_ms, run.tool_ms, run.output_tokens, agents,
    )  # fmt: skip


@pytest.mark.parametrize("pauses", PAUSES_MS)
async def test_the_course_of_runs_is_that_of_the_plain_ledger(pauses: str) -> None:
    clock = HandClock()
    store = MemoryStore(SCHEDULING, now_ms=clock)
    pool = store.pool("default")
    await pool.members.put_instance(instance("a", kv_capacity_tokens=10**6, dispatch_window_tokens=10**6))
    agents = Agents(pool, clock, PAUSES_MS[pauses], random.Random(SEED))

    for _ in range(STEPS):
        await agents.step()

    seen = agents.seen
    assert min(seen[name] for name in (TurnStatus.WAITS.name, TurnStatus.GOES.name, "given up")) > 40
    assert min(agents.plain.ended_runs, seen["gave way"], seen["level 1"]) > 5
