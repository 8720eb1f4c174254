"""A block that was computed anywhere is a hit everywhere, and takes memory only while it is held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.settings import PolicyName, SchedulingSettings
from dualmap.simulation.engine.endless_kv_pool import EndlessKvPool
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.generators.conversation import conversation
from dualmap.simulation.workload.trace_figures import cached_tokens_if_infinite


def test_what_one_has_computed_all_of_them_have() -> None:
    computed: set[int] = set()
    one, other = EndlessKvPool(4, computed), EndlessKvPool(4, computed)
    one.hold((1, 2))

    assert one.match((1, 2, 3), 3) == (2, 0)
    assert other.match((1, 2, 3), 3) == (2, 2), "to be taken before they are held"
    assert other.match((1, 2, 3), 1) == (1, 1)
    assert (one.used_blocks, other.used_blocks) == (2, 0)


def test_what_is_held_takes_memory_and_what_is_cached_does_not() -> None:
    pool = EndlessKvPool(4, set())
    pool.hold((1, 2))
    pool.hold((1,))
    pool.take_private(1)
    assert (pool.used_blocks, pool.available_blocks) == (3, 1)

    pool.drop((1, 2))
    assert (pool.used_blocks, pool.available_blocks) == (2, 2)
    pool.drop((1,))
    pool.take_private(3)
    assert (pool.used_blocks, pool.available_blocks, pool.cached_blocks) == (4, 0, 2)
    assert pool.clear_idle() == 0
    assert pool.match((1, 2), 2) == (2, 2)


@pytest.mark.parametrize("policy", ["round-robin", "dualmap-least-cost"])
def test_a_fleet_of_them_has_every_hit_that_there_is(policy: PolicyName) -> None:
    # given a rate at which a request ends before another one can share its prefix
    trace = conversation(requests=150, seed=1).capped(20_480).at_rate(0.01)
    small = replace(find_preset("qwen2.5-7b-910b4").engine, kv_capacity_tokens=40_000)
    # and an order that gives up no request, as by deadline a long one may be that finds no memory for long
    scheduling = SchedulingSettings(policy=policy, queue_order="fifo")
    fleet = Scenario(scheduling, small, instances=3, endless_cache=True)

    record = Simulation(trace, fleet).run()

    ideal = cached_tokens_if_infinite(trace)
    block_tokens = trace.block_tokens  # full ones are cached, and of a whole prompt the last is computed again
    expected = [
        min(hit // block_tokens, (request.input_tokens - 1) // block_tokens) * block_tokens
        for hit, request in zip(ideal, trace.requests, strict=True)
    ]
    assert [outcome.cached_tokens for outcome in record.outcomes] == expected
    assert sum(expected) > 0
