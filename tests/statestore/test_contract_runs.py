"""The ledger of runs: which turns go, and which wait for memory, on every store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dualmap.scheduling.placing.placement import PlaceReply, PlaceStatus
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.admission import AGED_S, LATE_SHARE, MEMORY_SHARE, PASSED_BY, QUANTUM_FROM, SILENT_S
from dualmap.scheduling.runs.turn import RunName, RunRecord, Turn, TurnEnd
from dualmap.scheduling.tenants.budgets import Draw, Draws, Limit, Measure, Period, budgets_of, drawn_text
from dualmap.scheduling.tenants.shares import Share
from dualmap.statestore.pool import PoolStore, scripts
from dualmap.statestore.pool.runs import TurnStatus
from tests.statestore.samples import HandClock, hold, instance, lead, own_chain, place, record, until

CAPACITY_TOKENS = 1000
BLOCK_TOKENS = 100
FITS = int(MEMORY_SHARE * CAPACITY_TOKENS)
START_MS = 1_700_000_000_000


@dataclass
class Fleet:
    """A pool's ledger, with turns named by their run and number, and times in seconds from the start."""

    pool: PoolStore
    clock: HandClock
    replica_id: str = "one"
    turns: int = 0
    waiting: dict[str, Turn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at(0.0)

    def at(self, now_s: float) -> None:
        self.clock.now_ms = START_MS + round(now_s * 1000)

    async def arrives(
        self,
        run: str,
        tokens: int,
        now_s: float,
        branch: str = "",
        *,
        hashes: tuple[int, ...] = (),
        waits_s: float = 1e6,
        tenant: str = "",
        share: Share | None = None,
        tail: int | None = None,
    ) -> tuple[str, bool]:
        """The id of the turn, and whether it goes at once. Without hashes its prompt is like no other. ``tail``: the
        hash of all of it, where it ends behind its last full block."""
        self.turns += 1
        turn_id = f"{run or 'x'}-{self.turns}"
        chain = Chain(hashes or (1000 + self.turns,), BLOCK_TOKENS, tokens, tail)
        turn = Turn(turn_id, self.replica_id, RunName(run, branch), chain, waits_s, tenant=tenant, share=share)
        self.at(now_s)
        (status,) = await self.pool.runs.admit([turn], CAPACITY_TOKENS)
        if status is TurnStatus.WAITS:
            self.waiting[turn_id] = turn
        return turn_id, status is TurnStatus.GOES

    async def due(self, now_s: float) -> list[str]:
        """The turns that go now, by a repetition of those that wait; in no order."""
        self.at(now_s)
        turns = list(self.waiting.values())
        statuses = await self.pool.runs.admit(turns, CAPACITY_TOKENS)
        goes = [turn.turn_id for turn, status in zip(turns, statuses, strict=True) if status is TurnStatus.GOES]
        for turn_id in goes:
            del self.waiting[turn_id]
        return goes

    async def ends(self, turn_id: str, output_tokens: int, now_s: float, *, served: str = "") -> None:
        self.at(now_s)
        self.waiting.pop(turn_id, None)
        await self.pool.release(
            [Release(served, replica_id=self.replica_id, turn=TurnEnd(turn_id, self.replica_id, output_tokens))]
        )

    async def refused(self, turn_id: str, now_s: float) -> None:
        """A turn that went is refused before an instance has it."""
        self.at(now_s)
        over = TurnEnd(turn_id, self.replica_id, was_sent=False)
        await self.pool.release([Release("", replica_id=self.replica_id, turn=over)])

    async def turn(self, run: str, tokens: int, now_s: float, output_tokens: int = 0, takes_s: float = 0.0) -> None:
        """A turn that goes at once, and ends."""
        turn_id, goes = await self.arrives(run, tokens, now_s)
        assert goes
        await self.ends(turn_id, output_tokens, now_s + takes_s)

    async def knows_quantum(self, service: float) -> None:
        """Runs of this service have ended, and given way to others."""
        for number in range(QUANTUM_FROM + 1):
            await self.turn(f"former{number}", FITS, -10_000 + number * 200.0, takes_s=service / FITS)
        assert await self.used_tokens() == FITS

    async def used_tokens(self) -> int:
        return (await self.pool.runs.ledger()).memory.used_tokens

    async def waiting_turns(self) -> int:
        return (await self.pool.runs.ledger()).memory.waiting_turns

    async def run(self, name: str) -> RunRecord:
        return next(each for each in (await self.pool.runs.ledger()).runs if each.name == name)

    async def served(self, turn_id: str, hashes: tuple[int, ...], tokens: int) -> None:
        """The turn is placed on instance a, as a router does once it goes."""
        await place(self.pool, turn_id, chain=Chain(hashes, BLOCK_TOKENS, tokens))


@pytest.fixture
async def fleet(pool: PoolStore, clock: HandClock) -> Fleet:
    fleet = Fleet(pool, clock)
    await pool.members.put_instance(instance("a", kv_capacity_tokens=10**6, dispatch_window_tokens=10**6))
    return fleet


async def test_runs_that_fit_go_at_once_and_a_turn_of_an_active_run_always_goes(fleet: Fleet) -> None:
    await fleet.turn("a", FITS // 2, 0.0, output_tokens=50)
    await fleet.turn("b", FITS // 2 - 50, 1.0)
    await fleet.turn("a", FITS, 2.0)

    assert await fleet.used_tokens() == FITS + FITS // 2 - 50, "beyond what fits: nothing is stopped at work"
    memory = (await fleet.pool.overview()).runs
    assert (memory.used_tokens, memory.capacity_tokens, memory.waiting_turns) == (await fleet.used_tokens(), 1000, 0)


async def test_a_run_that_does_not_fit_waits_until_another_has_been_silent(fleet: Fleet) -> None:
    await fleet.turn("a", FITS, 0.0)

    waits, goes = await fleet.arrives("b", 100, 1.0)
    assert not goes
    assert await fleet.waiting_turns() == 1
    assert (await fleet.run("b")).state == "parked"
    assert await fleet.due(SILENT_S) == [], "it may come back"
    assert await fleet.due(SILENT_S + 0.1) == [waits]
    assert await fleet.waiting_turns() == 0
    assert (await fleet.run("b")).state == "active"
    assert (await fleet.run("b")).parked_ms == SILENT_S * 1000 - 900
    assert (await fleet.run("a")).state == "ended"


async def test_a_run_at_work_is_not_silent_however_long_its_turn_takes(fleet: Fleet) -> None:
    at_work, _ = await fleet.arrives("a", FITS, 0.0)
    waits, _ = await fleet.arrives("b", 100, 1.0)

    assert await fleet.due(1000.0) == []
    await fleet.ends(at_work, 10, 1000.0)
    assert await fleet.due(1000.0) == []
    assert (await fleet.run("a")).state == "at a tool"
    assert await fleet.due(1000.1 + SILENT_S) == [waits]


async def test_a_turn_that_goes_as_another_ends_is_announced_to_its_replica(fleet: Fleet) -> None:
    announced: list[str] = []
    fleet.pool.runs.on_turn("one", announced.append)
    await fleet.turn("a", FITS, 0.0)
    leaves, _ = await fleet.arrives("b", FITS, 1.0)
    waits, _ = await fleet.arrives("c", FITS, 2.0)
    other, _ = await fleet.arrives("d", 10, 3.0)
    await fleet.ends(leaves, 0, 30.0)

    await until(lambda: announced)

    assert announced == [waits], "not the one that gave up"
    assert await fleet.due(30.0) == [waits], "a repetition finds what a lost message said"
    assert await fleet.waiting_turns() == 1
    await fleet.ends(other, 0, 31.0)
    assert await fleet.waiting_turns() == 0


async def test_a_newcomer_does_not_pass_those_that_wait_with_as_little_service(fleet: Fleet) -> None:
    await fleet.turn("a", FITS - 50, 0.0)
    first, _ = await fleet.arrives("big", 500, 1.0)
    second, goes = await fleet.arrives("small", 10, 2.0)

    assert not goes
    assert await fleet.due(20.0) == [first, second]


async def test_a_silent_run_that_returns_goes_before_new_ones(fleet: Fleet) -> None:
    await fleet.turn("begun", FITS, 0.0, takes_s=30.0)
    other, _ = await fleet.arrives("other", FITS, 31.0)
    assert await fleet.due(41.0) == [other]
    new, _ = await fleet.arrives("new", FITS, 42.0)
    returns, _ = await fleet.arrives("begun", FITS, 43.0)

    await fleet.ends(other, 0, 44.0)

    assert await fleet.due(54.1) == [returns]
    await fleet.ends(returns, 0, 55.0)
    assert await fleet.due(65.1) == [new]


async def test_a_turn_that_is_late_waits_behind_those_that_can_be_on_time_but_not_for_ever(fleet: Fleet) -> None:
    at_work, _ = await fleet.arrives("at_work", FITS, 0.0)
    late, _ = await fleet.arrives("late", FITS, 1.0, waits_s=4.0)
    on_time, _ = await fleet.arrives("on_time", FITS, 8.0, waits_s=42.0)
    await fleet.ends(at_work, 0, 9.0)
    assert await fleet.due(19.1) == [on_time]

    next_one, _ = await fleet.arrives("on_time_too", FITS, 20.0)
    await fleet.ends(on_time, 0, 30.0)
    assert await fleet.due(40.1) == [next_one]
    await fleet.arrives("on_time_as_well", FITS, 50.0)
    aged_s = 1.1 + 2 * AGED_S
    await fleet.ends(next_one, 0, aged_s)

    assert await fleet.due(aged_s + 10.1) == [late]


async def test_runs_that_have_aged_go_in_between_those_that_can_be_on_time(fleet: Fleet) -> None:
    at_work, _ = await fleet.arrives("at_work", FITS, 0.0)
    aged, _ = await fleet.arrives("aged", FITS, 0.0, waits_s=4.0)
    now_s, went = AGED_S + 1.0, []
    for number in range(PASSED_BY + 2):
        await fleet.arrives(f"new{number}", FITS, now_s)

    for _ in range(PASSED_BY + 2):
        await fleet.ends(at_work, 0, now_s)
        now_s += SILENT_S + 0.1
        (at_work,) = await fleet.due(now_s)
        went.append(at_work)

    assert went.index(aged) == PASSED_BY - 1, "the first one went before as well"


async def test_a_run_ages_by_those_of_its_turns_that_still_wait(fleet: Fleet) -> None:
    at_work, _ = await fleet.arrives("at_work", FITS, 0.0)
    gives_up, _ = await fleet.arrives("b", 100, 0.0, "one", waits_s=4.0)
    aged, _ = await fleet.arrives("c", FITS, 50.0, waits_s=4.0)
    await fleet.arrives("b", FITS, 100.0, "two", waits_s=4.0)
    await fleet.ends(gives_up, 0, 101.0)

    now_s = 51.0 + 2 * AGED_S
    await fleet.ends(at_work, 0, now_s - SILENT_S - 0.1)

    assert await fleet.due(now_s) == [aged]


async def test_a_run_whose_turn_no_instance_had_keeps_no_place(fleet: Fleet) -> None:
    refused, goes = await fleet.arrives("a", FITS, 0.0)
    assert goes
    waits, goes = await fleet.arrives("b", FITS, 1.0)
    assert not goes

    await fleet.refused(refused, 1.5)

    assert await fleet.due(1.5) == [waits]
    assert await fleet.used_tokens() == FITS
    await fleet.arrives("b", FITS, 2.0, "sub-agent")
    await fleet.refused(waits, 3.0)
    assert (await fleet.run("b")).state == "active", "a sub-agent of it is at work"


async def test_a_late_run_needs_more_room_while_others_come_that_can_be_on_time(fleet: Fleet) -> None:
    much = int(LATE_SHARE * CAPACITY_TOKENS)
    at_work, _ = await fleet.arrives("at_work", FITS, 0.0)
    late, _ = await fleet.arrives("late", 100, 0.0, waits_s=4.0)
    on_time, _ = await fleet.arrives("on_time", much, 20.0)
    await fleet.ends(at_work, 0, 20.0)
    assert await fleet.due(30.1) == [on_time], "the memory has room for both"

    assert await fleet.due(30.2) == []
    assert await fleet.due(30.1 + SILENT_S) == [late], "nobody else came for it"


async def test_a_run_that_had_its_quantum_gives_way_between_two_turns_to_one_with_less_service(fleet: Fleet) -> None:
    await fleet.knows_quantum(service=100.0 * FITS)
    await fleet.turn("long", FITS - 100, 0.0, takes_s=150.0)
    waits, goes = await fleet.arrives("new", 200, 150.0)
    assert not goes

    returns, goes = await fleet.arrives("long", FITS - 50, 151.0)

    assert not goes
    assert await fleet.due(151.0) == [waits]
    await fleet.ends(waits, 0, 152.0)
    assert await fleet.due(162.1) == [returns]


async def test_a_run_without_its_quantum_goes_on_though_others_wait(fleet: Fleet) -> None:
    await fleet.knows_quantum(service=100.0 * FITS)
    await fleet.turn("young", FITS - 100, 0.0, takes_s=50.0)
    await fleet.arrives("new", 200, 50.0)

    _, goes = await fleet.arrives("young", FITS - 50, 51.0)

    assert goes


async def test_where_active_runs_have_grown_beyond_the_memory_any_of_them_gives_way(fleet: Fleet) -> None:
    for name in ("young", "other"):
        await fleet.turn(name, FITS // 2, 0.0, takes_s=5.0)
    waits, goes = await fleet.arrives("new", 100, 6.0)
    assert not goes

    _, goes = await fleet.arrives("young", FITS // 2 + 10, 7.0)
    assert goes, "it has not had its quantum, and the memory holds them"
    _, goes = await fleet.arrives("other", CAPACITY_TOKENS, 8.0)

    assert not goes
    assert await fleet.due(8.0) == [waits]


async def test_sub_agents_of_an_active_run_go_at_once_and_no_longer_count_when_they_are_done(fleet: Fleet) -> None:
    await fleet.turn("a", 300, 0.0)
    for branch in ("s1", "s2"):
        turn_id, goes = await fleet.arrives("a", 400, 1.0, branch)
        assert goes, "beyond what fits"
        await fleet.ends(turn_id, 0, 2.0)
    assert await fleet.used_tokens() == 1100

    await fleet.arrives("a", 350, 20.0, "a")

    assert await fleet.used_tokens() == 350
    assert [each.tokens for each in (await fleet.run("a")).agents] == [350, 0, 0]


async def test_what_sub_agents_hold_is_service_of_their_run(fleet: Fleet) -> None:
    await fleet.turn("a", 300, 0.0)
    one, _ = await fleet.arrives("a", 400, 1.0, "s1")
    other, _ = await fleet.arrives("a", 100, 1.0, "s2")

    await fleet.ends(one, 0, 6.0)
    await fleet.ends(other, 0, 6.0)

    assert (await fleet.run("a")).service == 300 * 1.0 + (300 + 400 + 100) * 5.0


async def test_turns_of_one_run_that_wait_go_together(fleet: Fleet) -> None:
    await fleet.turn("a", FITS, 0.0)
    one, _ = await fleet.arrives("b", 100, 1.0, "s1")
    other, _ = await fleet.arrives("b", 100, 1.0, "s2")

    assert await fleet.due(20.0) == [one, other]


async def test_a_prefix_that_several_runs_begin_with_counts_for_the_first_of_them(fleet: Fleet) -> None:
    first, _ = await fleet.arrives("a", 1250, 0.0, hashes=tuple(range(1, 13)))
    await fleet.served(first, tuple(range(1, 13)), 1250)
    assert await fleet.used_tokens() == 1250

    hashes = (*range(1, 11), 77, 78)
    await fleet.ends(first, 0, 0.5, served=first)
    second, _ = await fleet.arrives("b", 1250, 1.0, hashes=hashes)
    assert await fleet.due(12.0) == [second]
    assert await fleet.used_tokens() == 250, "the ten blocks that the prefix index samples are shared"
    await fleet.ends(second, 20, 13.0)
    assert await fleet.used_tokens() == 270

    await fleet.arrives("b", 1350, 14.0, hashes=(*hashes, 79))
    assert await fleet.used_tokens() == 350, "the part that it shares is that of its first prompt"


async def test_a_run_that_is_larger_than_the_memory_is_served_alone(fleet: Fleet) -> None:
    turn_id, goes = await fleet.arrives("huge", 10 * CAPACITY_TOKENS, 0.0)
    assert goes

    waits, goes = await fleet.arrives("a", 10, 1.0)
    assert not goes
    await fleet.ends(turn_id, 0, 2.0)
    again, _ = await fleet.arrives("other", 10 * CAPACITY_TOKENS, 3.0)

    assert await fleet.due(13.0) == [waits]
    await fleet.ends(waits, 0, 13.0)
    assert await fleet.due(24.0) == [again]


async def test_however_many_silent_runs_there_are_they_give_way_to_one_that_waits(fleet: Fleet) -> None:
    chains = [Chain((number,), BLOCK_TOKENS, 2) for number in range(300)]
    turns = [Turn(f"t{number}", "one", RunName(f"r{number}"), each, 5.0) for number, each in enumerate(chains)]
    assert await fleet.pool.runs.admit(turns, CAPACITY_TOKENS) == [TurnStatus.GOES] * 300
    for turn in turns:
        await fleet.ends(turn.turn_id, 0, 1.0)

    waits, _ = await fleet.arrives("big", FITS, 2.0)

    goes: list[str] = []
    for second in range(10):
        goes += await fleet.due(12.0 + second)
    assert goes == [waits]


async def test_a_run_says_where_its_time_went(fleet: Fleet) -> None:
    await fleet.turn("first", FITS, 0.0)
    turn_id, _ = await fleet.arrives("a", FITS, 1.0)
    assert await fleet.due(11.0) == [turn_id]
    fleet.at(16.0)
    over = TurnEnd(turn_id, "one", 7, 2000, 3000)
    await fleet.pool.release([Release("", replica_id="one", turn=over)])

    await fleet.arrives("a", FITS, 20.0)

    run = await fleet.run("a")
    assert (run.parked_ms, run.prefill_ms, run.decode_ms, run.tool_ms) == (10_000, 2000, 3000, 4000)


async def test_runs_of_a_tenant_above_its_share_wait_behind_the_others_however_long(fleet: Fleet) -> None:
    await fleet.turn("first", FITS, 0.0, takes_s=25.0)
    await place(fleet.pool, "light work", tenant="light", shares_as="light", share=Share("light", 1.0, 1), tokens=10)
    about = {"tenant": "heavy", "shares_as": "heavy", "share": Share("heavy", 1.0, 1), "tokens": 900_000}
    await place(fleet.pool, "heavy work", **about)
    at_work, _ = await fleet.arrives("first", FITS, 25.6)
    heavy, _ = await fleet.arrives("heavy", 300, 26.0, tenant="heavy", share=Share("heavy", 1.0, 1))
    light, _ = await fleet.arrives("light", 800, 27.0, tenant="light", share=Share("light", 1.0, 1))
    assert (await fleet.run("heavy")).level > 0

    await fleet.ends(at_work, 0, 28.0)

    assert await fleet.due(38.1) == [light]
    await fleet.ends(light, 0, 39.0)
    assert await fleet.due(49.1) == [heavy], "it does not starve"


async def test_a_turn_that_goes_is_placed_in_the_same_step_and_one_that_waits_reserves_nothing(fleet: Fleet) -> None:
    def turn(name: str) -> Turn:
        return Turn(name, "one", RunName(name), Chain((7,), BLOCK_TOKENS, FITS - 50), 5.0)

    async def placed(name: str) -> PlaceReply:
        sent = turn(name)
        return await place(fleet.pool, name, chain=sent.chain, turn=sent, memory_tokens=CAPACITY_TOKENS)

    goes, waits, again = await placed("goes"), await placed("waits"), await placed("goes")

    assert (goes.status, goes.chosen.instance_id) == (PlaceStatus.DISPATCHED, "a")
    assert again.status is PlaceStatus.DISPATCHED, "a repetition after a lost reply"
    assert (waits.status, waits.chosen.instance_id) == (PlaceStatus.PARKED, None)
    assert [*await fleet.pool.records(["goes", "waits"])] == ["goes"]
    assert (await fleet.pool.loads())["a"].running_requests == 1
    assert await fleet.waiting_turns() == 1

    await fleet.ends("goes", 0, 1.0, served="goes")
    fleet.at(1.0 + SILENT_S + 1.0)
    assert await fleet.pool.runs.admit([turn("waits")], CAPACITY_TOKENS) == [TurnStatus.GOES]
    assert (await placed("waits")).status is PlaceStatus.DISPATCHED


async def test_a_repeated_turn_counts_once_and_one_that_the_store_lost_is_entered_again(fleet: Fleet) -> None:
    turn_id, _ = await fleet.arrives("a", 300, 0.0)
    turn = Turn(turn_id, "one", RunName("a"), Chain((1,), BLOCK_TOKENS, 300), 5.0)

    assert await fleet.pool.runs.admit([turn], CAPACITY_TOKENS) == [TurnStatus.GOES]

    assert (await fleet.run("a")).busy == 1
    await fleet.ends(turn_id, 0, 1.0)
    await fleet.ends(turn_id, 0, 1.0)
    assert (await fleet.run("a")).busy == 0
    assert await fleet.pool.runs.admit([turn], CAPACITY_TOKENS) == [TurnStatus.GOES]
    assert (await fleet.run("a")).busy == 1


async def test_a_prompt_without_a_name_belongs_to_the_run_whose_context_it_continues(fleet: Fleet) -> None:
    first, goes = await fleet.arrives("", 350, 0.0, hashes=(1, 2, 3))
    assert goes
    assert await fleet.used_tokens() == 0, "a request that is no run's holds nothing"
    await fleet.served(first, (1, 2, 3), 350)
    await fleet.ends(first, 100, 1.0, served=first)

    second, _ = await fleet.arrives("", 500, 2.0, hashes=(1, 2, 3, 4, 5))
    (run,) = (await fleet.pool.runs.ledger()).runs
    assert (run.turns, run.tokens) == (1, 500)
    await fleet.served(second, (1, 2, 3, 4, 5), 500)
    await fleet.ends(second, 100, 3.0, served=second)
    await fleet.arrives("", 700, 4.0, hashes=(1, 2, 3, 4, 5, 6, 7))

    (run,) = (await fleet.pool.runs.ledger()).runs
    assert (run.turns, run.tokens, run.home) == (2, 700, "a")


async def test_prompts_that_only_begin_alike_are_of_different_runs(fleet: Fleet) -> None:
    first, _ = await fleet.arrives("", 350, 0.0, hashes=(1, 2, 3))
    await fleet.served(first, (1, 2, 3), 350)
    await fleet.ends(first, 100, 1.0, served=first)

    await fleet.arrives("", 390, 2.0, hashes=(1, 2, 3))
    await fleet.arrives("", 600, 2.0, hashes=(1, 2, 9, 10, 11, 12))

    assert (await fleet.pool.runs.ledger()).runs == ()


@pytest.mark.parametrize("names", [("", "", ""), ("a", "b", "c")], ids=["without names", "with names"])
async def test_a_prompt_that_others_begin_with_as_well_captures_no_conversation(
    fleet: Fleet, names: tuple[str, str, str]
) -> None:
    async def turn(name: str, tokens: int, now_s: float, *hashes: int, tail: int) -> None:
        turn_id, _ = await fleet.arrives(name, tokens, now_s, hashes=hashes, tail=tail)
        await fleet.served(turn_id, hashes, tokens)
        await fleet.ends(turn_id, 20, now_s + 0.5, served=turn_id)

    async def turns() -> dict[str, int]:
        return {each.name: each.turns for each in (await fleet.pool.runs.ledger()).runs}

    one, other, third = names
    await turn(one, 150, 0.0, 1, tail=11)  # a system prompt, and a short question
    await turn(other, 155, 1.0, 1, tail=12)
    await turn(third, 280, 2.0, 1, 31, tail=13)  # a longer question
    await turn(one, 370, 3.0, 1, 21, 22, tail=14)

    assert await turns() == ({"a": 2, "b": 1, "c": 1} if one else {}), "none of them is a turn of another one's run"

    await turn(one, 590, 4.0, 1, 21, 22, 23, 24, tail=15)
    found = await turns()
    assert sum(found.values()) == (5 if one else 1), "behind what is common its context shows whose it is"


async def test_the_same_prompt_sent_again_is_no_other_conversation(fleet: Fleet) -> None:
    for now_s in (0.0, 1.0):
        turn_id, _ = await fleet.arrives("", 150, now_s, hashes=(1,), tail=11)
        await fleet.served(turn_id, (1,), 150)
        await fleet.ends(turn_id, 20, now_s + 0.5, served=turn_id)

    await fleet.arrives("", 370, 2.0, hashes=(1, 21, 22))

    (run,) = (await fleet.pool.runs.ledger()).runs
    assert run.turns == 1


@pytest.mark.parametrize("name", ["", "new"])
async def test_no_prompt_is_of_the_run_of_another_tenant_whose_context_it_continues(fleet: Fleet, name: str) -> None:
    async def turn(run: str, hashes: tuple[int, ...], now_s: float, tenant: str) -> None:
        turn_id, _ = await fleet.arrives(run, 100 * len(hashes) + 50, now_s, hashes=hashes, tenant=tenant)
        await fleet.served(turn_id, hashes, 100 * len(hashes) + 50)
        await fleet.ends(turn_id, 1, now_s + 0.5, served=turn_id)

    await turn("", (1,), 0.0, "evil")
    await turn("theirs", (1, 2), 1.0, "evil")
    await turn(name, (1, 2, 3), 2.0, "acme")
    await turn(name, (1, 2, 3, 4), 3.0, "acme")
    await turn("", (1, 2, 3), 4.0, "evil")

    found = sorted((each.tenant, each.turns) for each in (await fleet.pool.runs.ledger()).runs)
    assert found == [("acme", 2 if name else 1), ("evil", 2)]


async def test_a_client_with_a_new_name_for_every_turn_gains_nothing(fleet: Fleet) -> None:
    hashes: tuple[int, ...] = (1, 2, 3)
    for number in range(4):
        turn_id, _ = await fleet.arrives(f"name{number}", 100 * len(hashes) + 50, number, hashes=hashes)
        await fleet.served(turn_id, hashes, 100 * len(hashes) + 50)
        await fleet.ends(turn_id, 60, number + 0.5, served=turn_id)
        hashes = (*hashes, 10 + number, 20 + number)

    (run,) = (await fleet.pool.runs.ledger()).runs
    assert (run.name, run.turns) == ("name0", 4)


async def test_a_named_run_that_is_known_stands_though_another_had_the_same_context(fleet: Fleet) -> None:
    for name in ("b", "a"):
        turn_id, _ = await fleet.arrives(name, 350, 0.0, hashes=(1, 2, 3))
        await fleet.served(turn_id, (1, 2, 3), 350)
        await fleet.ends(turn_id, 60, 0.5, served=turn_id)

    await fleet.arrives("b", 450, 1.0, hashes=(1, 2, 3, 4))

    assert (await fleet.run("b")).turns == 2
    assert (await fleet.run("a")).turns == 1


async def test_too_many_turns_of_one_run_that_wait_are_refused(fleet: Fleet) -> None:
    await fleet.turn("a", FITS, 0.0)
    turns = [
        Turn(f"t{number}", "one", RunName("b", f"s{number}"), Chain((number,), BLOCK_TOKENS, 10), 5.0)
        for number in range(257)
    ]

    statuses = await fleet.pool.runs.admit(turns, CAPACITY_TOKENS)

    assert statuses == [TurnStatus.WAITS] * 256 + [TurnStatus.REFUSED]
    assert await fleet.waiting_turns() == 256


async def test_a_run_that_was_silent_for_an_hour_is_forgotten_with_what_is_left_of_it(fleet: Fleet) -> None:
    await fleet.arrives("leaked", 300, 0.0)

    await fleet.turn("b", 100, 3601.0)

    assert [each.name for each in (await fleet.pool.runs.ledger()).runs] == ["b"]
    assert await fleet.used_tokens() == 100


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "MAX_RUNS", 3)


async def test_runs_in_use_keep_no_others_from_being_forgotten(few_runs: None, fleet: Fleet) -> None:
    for name in ("b", "a"):
        await fleet.arrives(name, 1, 0.0)

    for number in range(20):
        await fleet.turn(f"{number}", 1, 1.0 + number)

    names = {each.name for each in (await fleet.pool.runs.ledger()).runs}
    assert len(names) <= 4
    assert {"a", "b", "19"} <= names


async def test_the_turns_of_a_dead_replica_are_over(fleet: Fleet) -> None:
    pool, clock = fleet.pool, fleet.clock
    await pool.heartbeat("one", 6000, {})
    await fleet.arrives("a", FITS, 0.0)
    await hold(pool, "other")
    await fleet.arrives("b", 100, 1.0)
    fleet.waiting.clear()
    fleet.replica_id = "other"
    waits, _ = await fleet.arrives("c", 100, 2.0)
    fence = await lead(pool)
    clock.now_ms += 20_000

    assert await pool.runs.turns_of("one") != []
    await pool.upkeep.reap("one", fence=fence)

    assert await pool.runs.turns_of("one") == []
    assert await fleet.waiting_turns() == 1
    assert await fleet.due(50.0) == [waits]


async def test_the_death_of_a_replica_takes_no_run_its_service_its_order_or_its_home(fleet: Fleet) -> None:
    pool = fleet.pool
    now_s = 0.0
    for number, (run, takes_s) in enumerate((("much", 60.0), ("little", 20.0), ("middle", 40.0))):
        turn_id, goes = await fleet.arrives(run, FITS, now_s, hashes=(number,))
        assert goes
        await fleet.served(turn_id, (number,), FITS)
        await fleet.ends(turn_id, 5, now_s + takes_s, served=turn_id)
        now_s += takes_s + SILENT_S + 0.1
    before = {each.name: each for each in (await pool.runs.ledger()).runs}
    assert {each.home for each in before.values()} == {"a"}
    for replica_id in ("one", "other"):
        await pool.heartbeat(replica_id, 6000, {})
    fleet.replica_id = "other"
    at_work, _ = await fleet.arrives("at_work", FITS, now_s)
    for run, replica_id in (("much", "other"), ("middle", "one"), ("little", "other")):
        fleet.replica_id = replica_id
        await fleet.arrives(run, FITS, now_s + 1.0)

    fleet.waiting = {name: turn for name, turn in fleet.waiting.items() if turn.replica_id != "one"}
    now_s += 8.0
    fleet.at(now_s)
    await pool.upkeep.reap("one", fence=await lead(pool))

    assert await pool.runs.turns_of("one") == []
    kept = {each.name: each for each in (await pool.runs.ledger()).runs}
    for name, known in before.items():
        assert (kept[name].home, kept[name].service, kept[name].turns) == (known.home, known.service, known.turns)
    fleet.replica_id = "other"
    await fleet.arrives("middle", FITS, now_s + 2.0)  # its client asks again
    went, working = [], at_work
    for _ in range(3):
        now_s += 20.0
        await fleet.ends(working, 0, now_s)
        (working,) = await fleet.due(now_s + SILENT_S + 0.1)
        went.append(working.partition("-")[0])
    assert went == ["little", "middle", "much"], "as if none had died"


async def test_a_parked_turn_counts_for_its_tenant_as_any_request_that_is_not_answered_yet(
    fleet: Fleet, pool: PoolStore
) -> None:
    (in_flight,) = budgets_of("acme", [Limit(Measure.REQUESTS, Period.IN_FLIGHT, 2)])
    draws = Draws.of(Draw(in_flight, 1))
    about: dict[str, Any] = {
        "draws": draws, "drawn": drawn_text(draws), "tenant": "acme", "account": "acme ci - m", "memory_tokens": FITS,
    }  # fmt: skip

    async def arrives(name: str, replica_id: str = "one") -> PlaceReply:
        chain = own_chain(name, FITS)
        turn = Turn(name, replica_id, RunName(f"run-of-{name}".replace(" ", "-"), "agent"), chain, 1e6, tenant="acme")
        return await place(pool, name, chain=chain, turn=turn, replica_id=replica_id, **about)

    async def used() -> Sequence[float]:
        return await pool.usage.budgets("acme", [in_flight.limit])

    # given: one turn has the memory, another waits for it, and a repetition of that changes nothing
    assert (await arrives("at work")).status is PlaceStatus.DISPATCHED
    assert (await arrives("waits")).status is PlaceStatus.PARKED
    assert (await arrives("waits")).status is PlaceStatus.PARKED
    assert await used() == [2]

    # then: no third one parks, and a limit that keeps a turn out keeps it out of the ledger
    assert (await arrives("too much")).status is PlaceStatus.LIMITED
    assert await fleet.waiting_turns() == 1
    known = {each.request_id: each.instance_id for each in await pool.requests_of("one")}
    assert known == {"at work": "a", "waits": ""}

    # when: it goes, it is placed by what it has drawn
    await pool.release([Release("at work", replica_id="one", turn=TurnEnd("at work", "one"))])
    assert await used() == [1]
    reply = await place(pool, "waits", chain=own_chain("waits", FITS), must_draw=True, **about)
    assert (reply.status, await used()) == (PlaceStatus.DISPATCHED, [1])
    assert (await record(pool, "waits")).instance_id == "a"

    # and: one whose client leaves, or whose replica dies, gives its place back
    assert (await arrives("leaves")).status is PlaceStatus.PARKED
    await pool.release([Release("leaves", replica_id="one", turn=TurnEnd("leaves", "one", was_sent=False))])
    assert await used() == [1]
    assert (await arrives("of a new replica", "two")).status is PlaceStatus.PARKED
    assert "two" in {each.replica_id for each in (await pool.snapshot()).replicas}, "its death will show"
    gone = TurnEnd("of a new replica", "two", was_sent=False)
    await pool.release([Release("of a new replica", replica_id="two", turn=gone)])
    assert (await arrives("is orphaned")).status is PlaceStatus.PARKED
    await pool.retire("one")
    assert await pool.upkeep.reap("one", fence=await lead(pool)) == 2
    assert (await used(), await fleet.waiting_turns(), list(await pool.requests_of("one"))) == ([0], 0, [])


async def test_a_parked_turn_that_draws_nothing_leaves_no_record(fleet: Fleet, pool: PoolStore) -> None:
    for name in ("at work", "waits"):
        chain = own_chain(name, FITS)
        turn = Turn(name, "one", RunName(f"run-of-{name}".replace(" ", "-")), chain, 1e6)
        await place(pool, name, chain=chain, turn=turn, memory_tokens=FITS)

    assert [each.request_id for each in await pool.requests_of("one")] == ["at work"]
    assert await fleet.waiting_turns() == 1
