"""Weights of revisions and homes of sessions, on every store."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights
from dualmap.scheduling.revisions.figures import Figures
from dualmap.scheduling.revisions.gate import Bounds
from dualmap.scheduling.revisions.rollout import Move, Rollout, begun
from dualmap.scheduling.revisions.weights import (
    NO_WEIGHTS,
    Home,
    RevisionWeights,
    WeightError,
    with_weights,
    without,
)
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.pool import PoolStore, revisions
from tests.statestore.samples import CHAIN, instance, place

LEAST_COST = Weights(Form(ahead_s=1.0, kv_demand=4.0, compute_s=3.0), PLAIN_TTFT)


def canary(known: RevisionWeights) -> RevisionWeights:
    return with_weights(known, {"v1": 95.0, "v2": 5.0})


async def test_weights_are_a_part_of_the_membership_and_its_epoch_grows(pool: PoolStore) -> None:
    before = await pool.membership()

    made = await pool.revisions.change(canary, "v2 5 %", by="ada")

    after = await pool.membership()
    assert before.revisions == NO_WEIGHTS
    assert after.revisions == made == await pool.revisions.weights()
    assert after.epoch > before.epoch
    assert [(each.by, each.text) for each in await pool.revisions.history(5)] == [("ada", "v2 5 %")]


async def test_the_salt_of_sessions_is_made_once_and_stays(pool: PoolStore) -> None:
    await pool.revisions.restore(canary(NO_WEIGHTS), None)  # as a version without salts wrote them
    assert (await pool.revisions.weights()).salt == ""

    first = await pool.revisions.change(canary, "v2 5 %", by="ada")
    move = await pool.revisions.conduct(start, by="ada")

    assert move is not None
    assert {first.salt, move.weights.salt, (await pool.revisions.weights()).salt} == {first.salt}
    assert len(first.salt) == 16


async def test_a_rollout_salts_weights_that_a_version_without_salts_wrote(pool: PoolStore) -> None:
    await pool.revisions.restore(canary(NO_WEIGHTS), None)

    move = await pool.revisions.conduct(start, by="ada")

    assert move is not None
    assert len(move.weights.salt) == 16
    assert await pool.revisions.weights() == move.weights


async def test_a_refused_change_leaves_everything(pool: PoolStore) -> None:
    await pool.revisions.change(canary, "start", by="ada")
    before = await pool.membership()

    with pytest.raises(WeightError):
        await pool.revisions.change(lambda known: without(known, "v9"), "v9 forgotten", by="ada")

    assert await pool.membership() == before
    assert len(await pool.revisions.history(5)) == 1


async def test_changes_at_a_time_follow_one_another(pool: PoolStore) -> None:
    await pool.revisions.change(canary, "start", by="ada")

    await asyncio.gather(
        *(
            pool.revisions.change(lambda known, percent=percent: with_weights(known, {"v2": percent}), "more", by="ada")
            for percent in (10.0, 20.0, 30.0)
        )
    )

    assert (await pool.revisions.weights()).version == 4


async def test_a_session_keeps_the_home_that_it_was_given_first(pool: PoolStore) -> None:
    assert await pool.revisions.home("session") is None

    homes = await asyncio.gather(
        *(pool.revisions.settle("session", Home(name, 3), None) for name in ("v1", "v2", "v1", "v2"))
    )

    assert len({*homes}) == 1
    assert await pool.revisions.home("session") == homes[0]


async def test_a_session_that_was_moved_gets_another_home(pool: PoolStore) -> None:
    first = await pool.revisions.settle("session", Home("v2", 3), None)

    assert await pool.revisions.settle("session", Home("v1", 4), first) == Home("v1", 4)
    assert await pool.revisions.settle("session", Home("v2", 5), first) == Home("v1", 4), "another was faster"


async def test_homes_in_use_outlive_a_generation(pool: PoolStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revisions, "MAX_HOMES", 3)
    for name in ("used", "unused", "b", "c"):
        await pool.revisions.settle(name, Home("v1", 1), None)
    assert await pool.revisions.home("used") == Home("v1", 1), "from the older generation"
    for name in ("d", "e", "f"):
        await pool.revisions.settle(name, Home("v1", 1), None)

    assert await pool.revisions.home("used") == Home("v1", 1)
    assert await pool.revisions.home("unused") is None


async def test_without_weights_no_home_is_kept(pool: PoolStore) -> None:
    await pool.revisions.change(lambda known: with_weights(known, {"v1": 100.0}), "start", by="ada")
    await pool.revisions.settle("session", Home("v1", 1), None)

    await pool.revisions.change(lambda known: without(known, "v1"), "end", by="ada")

    assert await pool.revisions.home("session") is None


async def test_what_the_store_has_lost_is_entered_again_and_no_more(pool: PoolStore) -> None:
    lost = canary(NO_WEIGHTS)

    assert await pool.revisions.restore(lost, None) == 1
    assert await pool.revisions.restore(with_weights(lost, {"v2": 50.0}), None) == 0
    assert await pool.revisions.restore(NO_WEIGHTS, None) == 0
    assert await pool.revisions.weights() == lost


async def test_a_rollout_that_the_store_has_lost_is_entered_again(pool: PoolStore) -> None:
    lost = replace(start(None, NO_WEIGHTS, 7).rollout, figures={"v2": Figures(3)})

    assert await pool.revisions.restore(canary(NO_WEIGHTS), lost) == 2
    assert await pool.revisions.restore(NO_WEIGHTS, replace(lost, step=1)) == 0
    assert (await pool.membership()).rollout == await pool.revisions.rollout() == lost


async def test_a_record_keeps_the_revision_that_serves_it(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", revision="v2"))

    await place(pool, "one", "a", chain=CHAIN, revision="v2")
    await place(pool, "two", "a", chain=CHAIN, adapter="sql", revision="v3")

    found = await pool.records(["one", "two"])
    assert (found["one"].revision, found["one"].adapter) == ("v2", "")
    assert (found["two"].revision, found["two"].adapter) == ("v3", "sql")


async def test_a_search_beyond_the_candidates_stays_within_the_revision(pool: PoolStore) -> None:
    for name, revision in (("a", "v1"), ("b", "v2"), ("c", "v1"), ("d", "")):
        spec = instance(name, prefill_tokens_per_s=100.0, max_queued_requests=9, revision=revision)
        await pool.members.put_instance(spec)
    await place(pool, "ahead", "a", revision="v1")
    await place(pool, "before", "b", chain=CHAIN, revision="v2")  # and "b" holds the prefix

    about = {"weights": LEAST_COST, "chain": CHAIN, "beyond_from_s": 0.0}
    free = await place(pool, "free", "a", **about)
    first = await place(pool, "first", "a", revision="v1", **about)
    bare = await place(pool, "bare", "a", revision="unlabelled", **about)

    assert sorted(first.seen.loads) == ["a", "c"]
    assert sorted(bare.seen.loads) == ["a", "d"]
    assert "b" in free.seen.loads


def start(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
    assert rollout is None
    return begun("v2", (5.0, 50.0), Bounds(), canary(weights), now_ms)


async def test_a_rollout_moves_with_the_weights_in_one_step(pool: PoolStore) -> None:
    before = await pool.membership()
    assert await pool.revisions.rollout() is None

    move = await pool.revisions.conduct(start, by="ada")

    after = await pool.membership()
    assert move is not None
    assert (await pool.revisions.rollout(), after.revisions) == (move.rollout, move.weights)
    assert after.epoch > before.epoch
    assert [each.text for each in await pool.revisions.history(5)] == [move.text]


async def test_a_rollout_that_only_adds_figures_up_moves_no_weights(pool: PoolStore) -> None:
    await pool.revisions.conduct(start, by="ada")
    before = await pool.membership()

    def counted(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
        assert rollout is not None
        return Move(replace(rollout, figures={"v2": Figures(3)}), weights, "")

    await pool.revisions.conduct(counted, by="the gate")

    rollout = await pool.revisions.rollout()
    assert rollout is not None and rollout.figures["v2"].requests == 3
    assert await pool.membership() == replace(before, rollout=rollout)
    assert len(await pool.revisions.history(5)) == 1


async def test_a_rollout_stays_where_nothing_is_planned_or_the_plan_is_refused(pool: PoolStore) -> None:
    def refused(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
        raise WeightError("no")

    assert await pool.revisions.conduct(lambda rollout, weights, now_ms: None, by="ada") is None
    with pytest.raises(WeightError):
        await pool.revisions.conduct(refused, by="ada")
    assert await pool.revisions.rollout() is None


async def test_only_the_leader_moves_a_rollout_with_a_fence(pool: PoolStore) -> None:
    lease = await pool.leader_lease.acquire("one", 60_000)
    assert lease is not None

    with pytest.raises(LeaseLostError):
        await pool.revisions.conduct(start, by="the gate", fence=lease.fence - 1)
    assert await pool.revisions.conduct(start, by="the gate", fence=lease.fence) is not None
