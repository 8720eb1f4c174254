"""What the device evicts is loaded from tiers, over links with queues, while others are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.estimates.kv_tiers import LoadPrice, Tier
from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, Event, EventKind
from dualmap.simulation.engine.kv_pool import CacheChange, Journal
from dualmap.simulation.engine.kv_tiers import KvTier, TierCache, TierLink
from dualmap.simulation.engine.presets import UnknownPresetError, find_preset
from dualmap.simulation.engine.tiered_kv_pool import TieredKvPool

BLOCK = 512
CARD = find_preset("qwen2.5-7b-910b4-tp1:kv_capacity_tokens=20480+host_kv_tokens=204800").engine
"""40 blocks on the device, 400 behind it."""
PROMPT, OTHER, LARGE = tuple(range(16)), tuple(range(100, 116)), tuple(range(200, 238))


def config_with(*tiers: KvTier, kv_capacity_tokens: int = CARD.kv_capacity_tokens) -> EngineConfig:
    return replace(CARD, block_tokens=BLOCK, tiers=tiers or CARD.tiers, kv_capacity_tokens=kv_capacity_tokens)


def submit(
    engine: Engine, name: str, hashes: tuple[int, ...], at_s: float, *, most: int | None = None, output: int = 1
) -> None:
    engine.submit(EngineRequest(name, BLOCK * len(hashes) + 1, output, hashes, max_load_tokens=most), at_s)


def first_tokens(events: list[Event]) -> dict[str, tuple[float, int]]:
    return {event.request_id: (event.time_s, event.tokens) for event in events if event.kind is EventKind.FIRST_TOKEN}


def alone(
    engine: Engine, name: str, hashes: tuple[int, ...], at_s: float, *, most: int | None = None
) -> tuple[float, int]:
    """TTFT and cached tokens of a request that is alone on the engine."""
    submit(engine, name, hashes, at_s, most=most)
    time_s, cached = first_tokens(engine.advance(at_s + 60))[name]
    return time_s - at_s, cached


def evicted(config: EngineConfig) -> Engine:
    """An engine whose device has computed and evicted two prompts."""
    engine = Engine(config)
    for number, hashes in enumerate((PROMPT, OTHER, LARGE)):
        alone(engine, f"before {number}", hashes, 60.0 * number)
    return engine


def test_a_tier_forgets_what_was_used_longest_ago_and_the_end_of_a_prompt_first() -> None:
    journal: Journal = []
    tier = TierCache(4, journal)
    tier.keep((1, 2, 3))
    tier.touch((1, 2, 3))
    tier.keep((8, 9))

    assert [block for block in (1, 2, 3, 8, 9) if block in tier] == [1, 2, 8, 9]
    assert [block for change, block in journal if change is CacheChange.REMOVED] == [3]


def test_a_tier_that_tells_stores_only_reports_nothing_that_it_forgets() -> None:
    journal: Journal = []
    tier = TierCache(1, journal, tells_removals=False)
    tier.keep((1, 2))

    assert (1 in tier, 2 in tier) == (False, True)
    assert journal == [(CacheChange.STORED, 1), (CacheChange.STORED, 2)]


@pytest.mark.parametrize(
    "change", ["host_kv_tokens=-1", "host_gb_per_s=0", "disk_gb_per_s=nan", "pool_kv_tokens=many", "tape_kv_tokens=1"]
)
def test_an_absurd_tier_of_a_preset_is_refused(change: str) -> None:
    with pytest.raises(UnknownPresetError, match=r"cannot be|unknown change"):
        find_preset(f"qwen2.5-7b-910b4-tp1:{change}")


def test_changes_of_a_preset_say_what_its_tiers_are() -> None:
    engine = find_preset("qwen2.5-7b-910b4:disk_kv_tokens=9000+disk_gb_per_s=1.5+disk_stores_only=1").engine

    assert engine.kept_tiers == (KvTier(Tier.DISK, 9000, 1.5e9, start_s=0.002, tells_removals=False),)


def test_every_block_is_counted_by_the_nearest_tier_that_has_it() -> None:
    near, far = TierCache(2), TierCache(10)
    pool = TieredKvPool(2, (near, far))
    for block in (4, 3, 2, 1):
        pool.hold((block,))
        pool.drop((block,))

    assert pool.match((1, 2, 3, 4, 5), 5) == (2, 2)
    assert pool.loadable((1, 2, 3, 4, 5), 2, 5) == [0, 2]
    assert pool.loadable((1, 2, 5, 3), 0, 4) == [2, 0], "nothing behind one that is nowhere"
    assert pool.loadable((1, 2, 3, 4), 1, 2) == [1, 0]


def test_loads_of_a_link_follow_each_other() -> None:
    link = TierLink(LoadPrice(0.1, 0.001))

    assert [link.load(100, 1.0), link.load(200, 1.1), link.load(100, 9.0)] == pytest.approx([1.2, 1.5, 9.2])
    assert (link.counts.loads, link.counts.tokens, link.counts.busy_s) == (3, 400, pytest.approx(0.7))


def test_a_prompt_that_was_evicted_is_loaded_and_the_rest_computed() -> None:
    config = config_with()
    (host,) = config.kept_tiers
    load_s = host.price(config.transfer.bytes_per_token).load_s(16 * BLOCK)

    loaded_s, cached = alone(evicted(config), "again", PROMPT, 200.0)
    resident = evicted(config_with(kv_capacity_tokens=204_800))
    resident_s, _ = alone(resident, "again", PROMPT, 200.0)
    computed_s, found = alone(evicted(config), "again", PROMPT, 200.0, most=0)

    assert cached == 16 * BLOCK
    assert loaded_s == pytest.approx(resident_s + load_s)
    assert found == 0
    assert computed_s > 5 * loaded_s
    assert host.price(config.transfer.bytes_per_token).token_s == pytest.approx(57_344 / 25e9)


def test_a_request_bounds_what_is_loaded_for_it_in_whole_blocks() -> None:
    _, cached = alone(evicted(config_with()), "again", PROMPT, 200.0, most=3 * BLOCK + 5)
    assert cached == 3 * BLOCK


def test_an_older_engine_loads_whatever_a_request_allows() -> None:
    _, cached = alone(evicted(replace(config_with(), ignores_load_limits=True)), "again", PROMPT, 200.0, most=0)
    assert cached == 16 * BLOCK


def test_a_load_holds_up_nobody_else_and_waits_for_those_before_it_on_its_link() -> None:
    slow = KvTier(Tier.DISK, 204_800, bytes_per_s=1e9)
    engine = evicted(config_with(slow))
    load_s = slow.price(57_344).load_s(16 * BLOCK)
    submit(engine, "first", PROMPT, 200.0)
    submit(engine, "second", OTHER, 200.0)
    submit(engine, "short", (), 200.0)
    engine.advance(200.0)
    assert (engine.statistics().loading, engine.statistics().waiting) == (2, 2)
    came = first_tokens(engine.advance(260.0))

    assert came["short"][0] < 200.1
    assert came["first"][0] == pytest.approx(200.0 + load_s, abs=0.1)
    assert came["second"][0] == pytest.approx(200.0 + 2 * load_s, abs=0.1)
    counts = engine.statistics().loads[Tier.DISK]
    assert (counts.loads, counts.tokens, counts.busy_s) == (2, 32 * BLOCK, pytest.approx(2 * load_s))


def test_links_of_two_tiers_work_side_by_side() -> None:
    near, far = KvTier(Tier.HOST, 46 * BLOCK, bytes_per_s=1e9), KvTier(Tier.DISK, 204_800, bytes_per_s=1e9)
    engine = Engine(config_with(near, far))
    alone(engine, "before", PROMPT, 0.0)
    alone(engine, "large", LARGE, 60.0)  # host memory forgets the second half of the prompt, the device nearly all
    ttft_s, cached = alone(engine, "again", PROMPT, 120.0)

    loads = engine.statistics().loads
    assert cached == 16 * BLOCK
    assert (loads[Tier.HOST].tokens, loads[Tier.DISK].tokens) == (7 * BLOCK, 8 * BLOCK)
    assert loads[Tier.DISK].busy_s < ttft_s < loads[Tier.HOST].busy_s + loads[Tier.DISK].busy_s


def test_a_request_that_leaves_while_it_loads_gives_its_blocks_back() -> None:
    engine = evicted(config_with(KvTier(Tier.DISK, 204_800, bytes_per_s=1e8)))
    used = engine.statistics().used_blocks
    submit(engine, "again", PROMPT, 200.0)
    engine.advance(200.1)
    assert engine.statistics().used_blocks == used + 17

    assert engine.abort("again", 200.2)
    assert engine.statistics().used_blocks == used
    submit(engine, "again", PROMPT, 200.3, most=0)
    assert first_tokens(engine.advance(260.0))["again"][1] == 0, "a load that ends late is nobody's"


def test_how_often_time_is_asked_for_changes_nothing() -> None:
    config = config_with(KvTier(Tier.DISK, 204_800, bytes_per_s=2e9))

    def run(steps: int, longest: int) -> list[Event]:
        engine = Engine(config, max_run_steps=longest)
        for number, hashes in enumerate((PROMPT, OTHER, LARGE)):
            alone(engine, f"before {number}", hashes, 60.0 * number)
        submit(engine, "decoding", (), 200.0, output=400)
        submit(engine, "again", PROMPT, 200.5, output=50)
        submit(engine, "other", OTHER, 200.6, output=5)
        events: list[Event] = []
        for step in range(1, steps + 1):
            events += engine.advance(201.0 + 60 * step / steps)
        return events

    assert run(1, 1 << 40) == run(700, 1 << 40)
    stepwise = [event._replace(time_s=pytest.approx(event.time_s)) for event in run(1, 1)]
    assert stepwise == run(1, 1 << 40)
