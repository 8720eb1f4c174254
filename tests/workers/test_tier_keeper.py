"""Tiers are described with sizes from the settings and prices from the engines' own counters."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import orjson
import pytest

from dualmap.runtime.pool_settings import KvTierSettings, PoolSettings, PullSettings
from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, PullEnd, Tier
from dualmap.scheduling.estimates.load_prices import PRIORS, PULL_PRIOR
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.simulation.emulator.instance import EmulatedInstance
from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.engine.settings import TransferSettings
from dualmap.statestore.pool import PoolStore
from dualmap.workers.engine_metrics import loads_of, names_offloading
from dualmap.workers.pool_reader import CachedPoolReader
from dualmap.workers.probe import LoadReport, Prober
from dualmap.workers.pull_ends import BY_SETTINGS
from dualmap.workers.tier_keeper import TierKeeper, takes_limits
from tests.support.ports import free_port
from tests.workers.contexts import context_of

BLOCK_TOKENS = 128
SIZES = KvTierSettings(host_tokens=16_000, pool_tokens=1_000_000)
PROMPTS = [f"{number} " + "word " * 6000 for number in range(3)]
"""Each of 7,500 tokens, which is more than half of the device."""


@pytest.fixture
async def emulator() -> AsyncIterator[EmulatedInstance]:
    preset = "qwen2.5-7b-910b4-tp1:host_kv_tokens=64000+host_gb_per_s=5"
    settings = EmulatorSettings(
        preset=preset, port=0, block_tokens=BLOCK_TOKENS, kv_capacity_tokens=12_800, time_scale=100.0
    )
    async with emulated_instances(settings) as (instance,):
        yield instance


async def keeper_of(
    pool: PoolStore, prober: Prober, sizes: KvTierSettings = SIZES, pulls: PullSettings | None = None
) -> TierKeeper:
    own = context_of(pool, settings=PoolSettings(kv_tiers=sizes, pulls=pulls or PullSettings()))
    lease = await pool.leader_lease.acquire("w1", 600_000)
    assert lease is not None
    return TierKeeper(own.leading(lease.fence, CachedPoolReader(pool, own.clock, 0.0)), prober)


class Elsewhere(Prober):
    """A prober of engines whose metrics are without those of vLLM's offloading."""

    async def loads(self, url: str, rank: int | None = None) -> LoadReport:
        page = "vllm:num_requests_running 1"
        return LoadReport(loads_of(page), names_offloading(page))


async def described(pool: PoolStore, name: str = "a") -> InstanceTiers:
    return (await pool.tiers.described())[name]


async def serve(emulator: EmulatedInstance, rounds: int, **fields: object) -> None:
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60, verify=False) as http:
        for number in range(rounds):
            prompt = PROMPTS[number % len(PROMPTS)]
            (await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **fields})).raise_for_status()


async def test_prices_are_measured_within_a_fifth_from_what_was_loaded(
    pool: PoolStore, emulator: EmulatedInstance
) -> None:
    await pool.members.put_instance(InstanceSpec("a", emulator.url, state=InstanceState.READY))
    async with Prober(timeout_s=30) as prober:
        keeper = await keeper_of(pool, prober)
        await keeper.tick()
        before = await described(pool)
        for _ in range(4):
            await serve(emulator, 6)
            await keeper.tick()
    tiers = await described(pool)
    (host, shared), config = tiers.tiers, emulator.generator.config
    real_s = config.kept_tiers[0].price(config.transfer.bytes_per_token).load_s(7424) / 100

    assert [each.price for each in before.tiers] == [PRIORS[Tier.HOST], PRIORS[Tier.POOL]]
    assert (host.tier, host.tokens, shared.tier, shared.tokens) == (Tier.HOST, 16_000, Tier.POOL, 1_000_000)
    assert host.price.load_s(7424) == pytest.approx(real_s, rel=0.2)
    assert shared.price == PRIORS[Tier.POOL], "nothing was loaded from there"
    assert [each.reason for each in tiers.tiers] == ["", "nothing was loaded yet"]
    assert tiers.takes_limits


async def test_a_server_that_does_not_answer_has_the_priors_and_takes_no_limits(pool: PoolStore) -> None:
    await pool.members.put_instance(InstanceSpec("a", "http://127.0.0.1:1", state=InstanceState.READY))
    async with Prober(timeout_s=5) as prober:
        await (await keeper_of(pool, prober)).tick()
    tiers = await described(pool)

    assert [each.price for each in tiers.tiers] == [PRIORS[Tier.HOST], PRIORS[Tier.POOL]]
    assert not tiers.takes_limits


async def test_an_instance_that_is_not_ready_is_left_alone(pool: PoolStore) -> None:
    await pool.members.put_instance(InstanceSpec("a", "http://127.0.0.1:1", state=InstanceState.DOWN))
    async with Prober(timeout_s=5) as prober:
        await (await keeper_of(pool, prober)).tick()

    assert await pool.tiers.described() == {}


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        ("0.32.0", True),
        ("v0.33.1+cpu", True),
        ("1.0", True),
        ("0.31.9", False),
        ("0.9.2", False),
        ("main", False),
        ("9" * 5000 + ".1", False),
    ],
)
def test_limits_are_taken_from_the_version_on_that_knows_them(version: str, takes: bool) -> None:
    assert takes_limits(version) is takes


async def test_tiers_that_are_not_vllms_own_take_no_limits(pool: PoolStore, emulator: EmulatedInstance) -> None:
    """LMCache and AscendStore load what they have; their engines name no metrics of offloading."""
    await pool.members.put_instance(InstanceSpec("a", emulator.url, state=InstanceState.READY))
    async with Elsewhere(timeout_s=30) as prober:
        await (await keeper_of(pool, prober)).tick()

    assert not (await described(pool)).takes_limits


async def test_pulls_are_described_and_their_price_is_measured(
    pool: PoolStore, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EmulatorSettings(
        preset="qwen2.5-7b-910b4",
        port=free_port(1),
        instances=2,
        block_tokens=BLOCK_TOKENS,
        time_scale=20.0,
        peer_pulls=True,
        transfer=TransferSettings(gb_per_s=0.1),
    )
    async with emulated_instances(settings) as (source, target), Prober(timeout_s=30) as prober:
        for name, each in (("a", target), ("b", source)):
            await pool.members.put_instance(InstanceSpec(name, each.url, state=InstanceState.READY))
        keeper = await keeper_of(pool, prober, KvTierSettings(), PullSettings(enabled=True))
        await keeper.tick()
        before = await described(pool)
        await serve(source, 3)
        at = httpx.URL(source.url)
        for _ in range(4):
            target.generator.engine.clear_cache()
            place = {"kv_request_id": "r", "remote_host": at.host, "remote_port": at.port}
            await serve(target, 3, kv_transfer_params={"remote_kv_source": place})
            await keeper.tick()
        after = await described(pool)

    assert before.pulls is not None
    assert after.pulls is not None
    assert (before.tiers, before.pulls.price) == ((), PULL_PRIOR)
    assert (after.pulls.host, after.pulls.port) == (httpx.URL(target.url).host, httpx.URL(target.url).port)
    real_s = target.generator.config.transfer.alone_s(7424) / 20
    assert after.pulls.price.load_s(7424) == pytest.approx(real_s, rel=0.25)
    assert "kv_load_failure_policy recompute" in caplog.text


async def test_an_instance_that_does_not_say_where_it_serves_pulls_takes_no_part(
    pool: PoolStore, emulator: EmulatedInstance, caplog: pytest.LogCaptureFixture
) -> None:
    await pool.members.put_instance(InstanceSpec("a", emulator.url, state=InstanceState.READY))
    async with Prober(timeout_s=30) as prober:
        await (await keeper_of(pool, prober, SIZES, PullSettings(enabled=True))).tick()

    tiers = await described(pool)
    assert tiers.pulls is None
    assert "neither /server_info nor pools.pulls" in tiers.no_pulls
    assert "nothing is pulled to or from this instance" in caplog.text


class Told(Prober):
    """A prober of a server that answers ``/server_info`` as a test says."""

    info: bytes | None = None

    async def server_info(self, url: str) -> bytes | None:
        return self.info


def told(policy: str, port: int = 5710) -> bytes:
    tiers = {"secondary_tiers": [{"type": "p2p", "port": port}]}
    transfer = {"kv_load_failure_policy": policy, "kv_connector_extra_config": tiers}
    return orjson.dumps({"vllm_config": {"kv_transfer_config": transfer}})


async def test_an_instance_that_was_started_with_other_flags_is_described_by_these(
    pool: PoolStore, caplog: pytest.LogCaptureFixture
) -> None:
    await pool.members.put_instance(InstanceSpec("a", "http://127.0.0.1:1", state=InstanceState.READY))
    seen = []
    async with Told(timeout_s=5) as prober:
        keeper = await keeper_of(pool, prober, KvTierSettings(), PullSettings(enabled=True))
        for prober.info in (None, told("fail"), None, told("recompute", 5711)):
            await keeper.tick()
            tiers = await described(pool)
            end = tiers.pulls
            seen.append((bool(tiers.no_pulls), None if end is None else (end.port, end.fails_requests)))

    assert seen == [(True, None), (False, (5710, True)), (False, (5710, True)), (False, (5711, False))]
    assert caplog.text.count("kv_load_failure_policy recompute") == 1


async def test_an_instance_that_was_removed_is_forgotten(pool: PoolStore) -> None:
    """Another server may come under its name, and not answer at first."""
    spec = InstanceSpec("a", "http://127.0.0.1:1", state=InstanceState.READY)
    await pool.members.put_instance(spec)
    async with Told(timeout_s=5) as prober:
        keeper = await keeper_of(pool, prober, KvTierSettings(), PullSettings(enabled=True))
        prober.info = told("fail")
        await keeper.tick()
        await pool.members.remove_instance("a")
        await keeper.tick()
        await pool.members.put_instance(spec)
        prober.info = None
        await keeper.tick()

    assert (await described(pool)).pulls is None


class Unread(Prober):
    """A prober of a server whose version is known, and whose metrics cannot be read."""

    answer = "0.33.0"

    async def version(self, url: str) -> str:
        return self.answer


@pytest.mark.parametrize(("sizes", "takes"), [(SIZES, False), (KvTierSettings(), True)])
async def test_limits_are_taken_only_where_it_is_known_whose_tiers_they_are(
    pool: PoolStore, sizes: KvTierSettings, *, takes: bool
) -> None:
    await pool.members.put_instance(InstanceSpec("a", "http://127.0.0.1:1", state=InstanceState.READY))
    async with Unread(timeout_s=5) as prober:
        await (
            await keeper_of(pool, prober, sizes, PullSettings(port=5710, failure_policy="fail", enabled=True))
        ).tick()

    assert (await described(pool)).takes_limits is takes


async def test_an_engine_that_comes_back_with_an_older_version_takes_no_limits(pool: PoolStore) -> None:
    await pool.members.put_instance(InstanceSpec("a", "http://127.0.0.1:1", state=InstanceState.READY))
    pulls, takes = PullSettings(port=5710, failure_policy="fail", enabled=True), []
    async with Unread(timeout_s=5) as prober:
        keeper = await keeper_of(pool, prober, KvTierSettings(), pulls)
        for prober.answer in ("0.33.0", "0.31.0"):
            await keeper.tick()
            takes.append((await described(pool)).takes_limits)

    assert takes == [True, False]


async def test_a_new_leader_keeps_the_prices_that_were_measured_until_it_has_its_own(pool: PoolStore) -> None:
    await pool.members.put_instance(InstanceSpec("a", "http://127.0.0.1:1", state=InstanceState.READY))
    slow, unloaded = LoadPrice(0.1, 1e-4), "nothing was loaded yet"
    tiers = (InstanceTier(Tier.HOST, 16_000, slow), InstanceTier(Tier.POOL, 1_000_000, slow, unloaded))
    end = PullEnd("127.0.0.1", 5710, BY_SETTINGS, slow)
    await pool.tiers.describe("a", InstanceTiers(tiers, takes_limits=False, pulls=end))
    pulls = PullSettings(port=5710, failure_policy="recompute", enabled=True)
    async with Prober(timeout_s=5) as prober:
        await (await keeper_of(pool, prober, SIZES, pulls)).tick()
    host, shared = (found := await described(pool)).tiers

    assert (host.price, host.reason) == (slow, "")
    assert (shared.price, shared.reason) == (PRIORS[Tier.POOL], unloaded)
    assert found.pulls is not None
    assert (found.pulls.price, found.pulls.reason) == (slow, "")
