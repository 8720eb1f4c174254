"""Samples of requests are learned once, by the leader, and published for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from dualmap.scheduling.estimates.learning import RATIO_MIN_TOKENS, DisprovedTier, features_to_note, finished_note
from dualmap.scheduling.estimates.weights import Form
from dualmap.scheduling.prompts.blocks import DEFAULT_BYTES_PER_TOKEN
from dualmap.statestore.errors import LeaseLostError, StoreUnavailableError
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.learning_jobs import Learner
from tests.statestore.samples import finish, first_token
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance, Reserve
from tests.workers.flaky_pool import FlakyPool

RATE = 2000.0
"""What the engines of these tests really prefill, tokens per second; they are entered with half of that."""


LearnerOf = Callable[[Any], Learner]


@pytest.fixture
def learner_of(leading: LeaderContext) -> LearnerOf:
    def make(pool: Any) -> Learner:
        return Learner(replace(leading, pool=pool, reader=pool))

    return make


Prefills = Callable[..., Awaitable[None]]


@pytest.fixture
def prefills(pool: PoolStore, add_instance: AddInstance, reserve: Reserve, clock: ManualClock) -> Prefills:
    """``await prefills(n)``: n requests on a, one after the other, each with a first token after its prefill."""
    count = 0

    async def run(requests: int, tokens: int = 1000, expected_s: float | None = None) -> None:
        nonlocal count
        if not count:
            await add_instance("a", prefill_tokens_per_s=RATE / 2)
        for _ in range(requests):
            count += 1
            await reserve(f"r{count}", "a", tokens)
            clock.jump(tokens / RATE)
            features = Form(constant=1.0, compute_s=expected_s or tokens / (RATE / 2))
            note = orjson.dumps({"features": features_to_note(features)}).decode()
            await first_token(pool, f"r{count}", "a", note=note)
            await finish(pool, f"r{count}", note=f'{{"text_bytes":{2 * tokens},"tokens":{tokens}}}')

    return run


RateOfA = Callable[[], Awaitable[float]]


@pytest.fixture
def rate_of_a(pool: PoolStore) -> RateOfA:
    async def read() -> float:
        return (await pool.loads())["a"].prefill_tokens_per_s

    return read


async def test_the_prefill_rate_of_an_instance_follows_its_first_tokens(
    pool: PoolStore, learner_of: LearnerOf, prefills: Prefills, rate_of_a: RateOfA, value: Callable[..., float]
) -> None:
    learner = learner_of(pool)

    await prefills(200)
    await learner.tick()

    assert await rate_of_a() == pytest.approx(RATE, rel=0.1)
    assert value("dualmap_worker_samples_total") == 400


async def test_the_bytes_per_token_are_learned_once_enough_was_seen(
    pool: PoolStore, learner_of: LearnerOf, prefills: Prefills
) -> None:
    learner = learner_of(pool)
    await prefills(1)
    await learner.tick()
    assert (await pool.membership()).learned.bytes_per_token == DEFAULT_BYTES_PER_TOKEN

    await prefills(RATIO_MIN_TOKENS // 1000 + 1)
    await learner.tick()

    assert (await pool.membership()).learned.bytes_per_token == pytest.approx(2.0)


async def test_the_expected_ttft_moves_towards_what_was_measured(
    pool: PoolStore, learner_of: LearnerOf, prefills: Prefills
) -> None:
    learner, features = learner_of(pool), Form(constant=1.0, compute_s=1.0)
    before = (await pool.membership()).learned.ttft.of(features)

    await prefills(300)
    await learner.tick()

    measured_s = 1000 / RATE
    after = (await pool.membership()).learned.ttft.of(features)
    assert abs(after - measured_s) < abs(before - measured_s) / 2


async def test_without_samples_nothing_is_published(
    flaky: FlakyPool, learner_of: LearnerOf, prefills: Prefills
) -> None:
    learner = learner_of(flaky)
    await prefills(1)
    await learner.tick()
    await learner.tick()

    assert flaky.calls.count("publish_learned") == 1


async def test_what_could_not_be_published_is_with_the_next_samples(
    pool: PoolStore,
    flaky: FlakyPool,
    learner_of: LearnerOf,
    prefills: Prefills,
    rate_of_a: RateOfA,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = learner_of(pool)
    await prefills(200)

    async def away(*_arguments: object, **_named: object) -> None:
        raise StoreUnavailableError("the store is away")

    with monkeypatch.context() as outage:
        outage.setattr(pool.publications, "publish_learned", away)
        with pytest.raises(StoreUnavailableError):
            await learner.tick()
    assert await rate_of_a() == RATE / 2
    await prefills(1)
    await learner.tick()

    assert await rate_of_a() == pytest.approx(RATE, rel=0.1)


async def test_a_new_leader_goes_on_from_what_was_published(
    pool: PoolStore, learner_of: LearnerOf, prefills: Prefills, rate_of_a: RateOfA
) -> None:
    await prefills(200)
    await learner_of(pool).tick()
    published = (await pool.membership()).learned

    successor = learner_of(pool)
    await prefills(1)
    await successor.tick()

    assert await rate_of_a() == pytest.approx(RATE, rel=0.1)
    assert (await pool.membership()).learned.bytes_per_token == published.bytes_per_token


async def test_an_instance_that_left_teaches_nothing(
    pool: PoolStore, learner_of: LearnerOf, prefills: Prefills
) -> None:
    learner = learner_of(pool)
    await prefills(2)
    await pool.members.remove_instance("a")

    await learner.tick()

    assert await pool.loads() == {}


async def test_an_instance_that_came_back_under_its_id_is_learned_afresh(
    pool: PoolStore, learner_of: LearnerOf, prefills: Prefills, rate_of_a: RateOfA, add_instance: AddInstance
) -> None:
    """It may be another engine on another machine."""
    learner = learner_of(pool)
    await prefills(200)
    await learner.tick()
    await pool.members.remove_instance("a")
    await learner.tick()

    await add_instance("a", prefill_tokens_per_s=100.0)
    await prefills(1, tokens=10)
    await learner.tick()

    assert await rate_of_a() < RATE / 2


async def test_a_deposed_learner_publishes_nothing(
    pool: PoolStore, learner_of: LearnerOf, prefills: Prefills, rate_of_a: RateOfA, clock: ManualClock
) -> None:
    await prefills(200)
    clock.jump(20_000.0)

    with pytest.raises(LeaseLostError):
        await learner_of(pool).tick()

    assert await rate_of_a() == RATE / 2


async def test_a_tier_that_answers_disproved_is_corrected_once(
    pool: PoolStore,
    learner_of: LearnerOf,
    add_instance: AddInstance,
    reserve: Reserve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corrected: list[DisprovedTier] = []

    async def correct(disproved: DisprovedTier, *, fence: int) -> None:
        corrected.append(disproved)

    monkeypatch.setattr(pool.tiers, "correct", correct)
    lacking = DisprovedTier("a", "host", 1234)
    await add_instance("a")
    for number, disproved in enumerate((lacking, lacking, lacking._replace(instance_id="gone"))):
        await reserve(f"r{number}", "a", 100)
        await finish(pool, f"r{number}", note=finished_note(0, 0, 0, 0, disproved=disproved))
    await learner_of(pool).tick()

    assert corrected == [lacking]
