"""The Lua twin of an instance's learned TTFT, over more first tokens than a lockstep test sees."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import redis

from scheduling.ttft_model import TtftFeatures, TtftModel
from statestore.base import PoolStore
from statestore.keys import PoolKeys
from statestore.redis import RedisStore
from statestore.settings import StoreSettings
from tests.statestore.samples import CHAIN, SCHEDULING, HandClock, instance, reservation


@pytest.fixture
async def pool(valkey_url: str, clock: HandClock) -> AsyncIterator[PoolStore]:
    store = RedisStore(StoreSettings(url=valkey_url), scheduling=SCHEDULING, test_clock=clock)
    await store.open()
    pool = store.pool("default")
    await pool.put_instance(instance("a", dispatch_window_tokens=10_000))
    yield pool
    await store.close()


async def answer(pool: PoolStore, clock: HandClock, request_id: str, features: TtftFeatures, ttft_ms: int) -> None:
    await pool.reserve(reservation(request_id, ttft_features=features))
    clock.advance(ttft_ms)
    await pool.first_token(request_id, "a", CHAIN)
    await pool.finish(request_id)


async def test_it_agrees_to_the_last_digit_after_thousands_of_first_tokens(pool: PoolStore, clock: HandClock) -> None:
    rng, model = random.Random(1), TtftModel()

    for number in range(2500):
        features = TtftFeatures(rng.randrange(3000), rng.randrange(2000), rng.randrange(300), rng.randrange(800_000))
        ttft_ms = features.queueing_ms + features.compute_ms + rng.randrange(1000)
        await answer(pool, clock, f"r{number}", features, ttft_ms)
        model = model.after(features, ttft_ms / 1000)

    assert (await pool.loads())["a"].ttft_weights == model.weights


async def test_a_spoilt_covariance_makes_it_start_afresh(pool: PoolStore, clock: HandClock, valkey_url: str) -> None:
    features = TtftFeatures(1000, 500, 100, 400_000)
    await answer(pool, clock, "r1", features, 9000)
    account = PoolKeys("dualmap", "default").account("a").account
    with redis.Redis.from_url(valkey_url) as client:
        known = client.hget(account, "ttft_covariance")
        assert isinstance(known, bytes)
        client.hset(account, "ttft_covariance", b"[-" + known[1:])

    await answer(pool, clock, "r2", features, 2000)

    assert (await pool.loads())["a"].ttft_weights == TtftModel().after(features, 2.0).weights
