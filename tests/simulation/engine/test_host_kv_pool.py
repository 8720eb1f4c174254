"""Blocks that the prefix cache evicts go to host memory, and are loaded from there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_types import EngineRequest, EventKind
from dualmap.simulation.engine.host_kv_pool import HostKvPool
from dualmap.simulation.engine.kv_pool import CacheChange, Journal
from dualmap.simulation.engine.presets import find_preset


def test_evicted_blocks_are_hits_until_host_memory_is_full() -> None:
    journal: Journal = []
    pool = HostKvPool(2, 2, journal)
    for block in (1, 2, 3, 4, 5):
        pool.hold((block,))
        pool.drop((block,))

    assert pool.match((1,), 1) == (0, 0), "gone from both"
    assert [block for change, block in journal if change is CacheChange.REMOVED] == [1]
    assert pool.match((2, 3, 4, 5), 4) == (4, 4), "all to be taken before they are held"
    assert pool.take_loaded() == 0
    pool.hold_hits((4, 3))
    assert (pool.used_blocks, pool.take_loaded(), pool.take_loaded()) == (2, 1, 0)
    assert pool.match((5, 2), 2) == (2, 2), "evicted in the place of what was loaded"


def test_a_cleared_pool_has_no_hits_in_either_place() -> None:
    pool = HostKvPool(1, 4)
    for block in (1, 2):
        pool.hold((block,))
        pool.drop((block,))

    assert pool.clear_idle() == 2
    assert pool.match((1,), 1) == pool.match((2,), 1) == (0, 0)


def test_what_is_cleared_beside_a_request_is_reported_as_removed() -> None:
    journal: Journal = []
    pool = HostKvPool(2, 2, journal)
    for block in (1, 2):
        pool.hold((block,))
        pool.drop((block,))
    pool.hold((3,))  # takes the place of 1, which goes to host memory

    assert pool.clear_idle() == 2
    assert sorted(block for change, block in journal if change is CacheChange.REMOVED) == [1, 2]
    assert CacheChange.CLEARED not in {change for change, _ in journal}


def test_a_step_waits_for_what_it_loads() -> None:
    card = find_preset("qwen2.5-7b-910b4-tp1:kv_capacity_tokens=10240+host_kv_tokens=102400").engine
    config = replace(card, block_tokens=512)
    prompt, other = tuple(range(16)), tuple(range(100, 118))

    def ttft_s(engine: Engine, name: str, hashes: tuple[int, ...], at_s: float) -> float:
        engine.submit(EngineRequest(name, 512 * len(hashes), 1, hashes), at_s)
        events = engine.advance(at_s + 60)
        return next(event.time_s for event in events if event.kind is EventKind.FIRST_TOKEN) - at_s

    def again_s(engine: Engine) -> float:
        ttft_s(engine, "first", prompt, 0.0)
        ttft_s(engine, "other", other, 100.0)  # takes the memory of the first
        return ttft_s(engine, "again", prompt, 200.0)

    # The device keeps the two first blocks, and the last one is computed again.
    loading_s = 13 * 512 * config.host_token_s
    resident = Engine(replace(config, kv_capacity_tokens=102_400, host_kv_tokens=0))
    assert again_s(Engine(config)) == pytest.approx(again_s(resident) + loading_s)
    assert again_s(Engine(replace(config, host_kv_tokens=0))) > 5 * again_s(Engine(config))
    assert config.host_token_s == pytest.approx(57_344 / 25e9)
