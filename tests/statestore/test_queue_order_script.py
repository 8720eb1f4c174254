"""The Lua twin of ``scheduling.queue_order`` picks as the original does, on queues of any kind."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduling.queue_order import PLANNED_REQUESTS, Waiting, plan_on_time, step_rest_tokens, steps_behind

NOW_MS = 1_700_000_000_000
HARNESS = """
local waiting = {}
for index = 5, #ARGV, 2 do
  waiting[#waiting + 1] = { deadline_ms = tonumber(ARGV[index]), uncached_tokens = tonumber(ARGV[index + 1]) }
end
local now_ms, ahead_tokens, window_tokens = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local rate, behind = tonumber(ARGV[4]), {}
local step_tokens = step_rest_tokens(window_tokens, ahead_tokens)
for index, request in ipairs(waiting) do
  local is_behind = steps_behind(request.deadline_ms, request.uncached_tokens, now_ms, step_tokens, rate)
  behind[index] = is_behind and 1 or 0
end
local position, aside_tokens = plan_on_time(waiting, now_ms, ahead_tokens, rate)
return { position - 1, aside_tokens, behind }
"""

Queue = list[tuple[int, int]]
# Few different figures, so that ties and sums that meet a deadline exactly are common.
requests = st.tuples(st.integers(0, 30).map(lambda tenths: tenths * 100), st.integers(1, 12).map(lambda n: n * 100))
queues = st.lists(requests, max_size=30)
WINDOW_TOKENS = 1001
rates = st.sampled_from((1000.0, 1000.0, 2000.0, 333.3))


@pytest.fixture(scope="module")
def lua(valkey_server: Any) -> Any:
    source = (files("statestore") / "lua/shared/queue_order.lua").read_text()
    client = redis.Redis.from_url(valkey_server.url)
    yield client.register_script(f"local max_hold_ms = 0\n{source}\n{HARNESS}")
    client.close()


def assert_same(lua: Any, queue: Queue, ahead_tokens: int, rate: float) -> int:
    waiting = [Waiting(NOW_MS + due_ms, tokens) for due_ms, tokens in sorted(queue)]
    arguments = [part for request in waiting for part in request]

    picked, aside_tokens, behind = lua(args=[NOW_MS, ahead_tokens, WINDOW_TOKENS, repr(rate), *arguments])

    assert (picked, aside_tokens) == plan_on_time(waiting, NOW_MS, ahead_tokens, rate)
    step_tokens = step_rest_tokens(WINDOW_TOKENS, ahead_tokens)
    assert behind == [steps_behind(request, NOW_MS, step_tokens, rate) for request in waiting]
    return int(picked)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(queue=queues, ahead_tokens=st.sampled_from((0, 0, 100, 1500)), rate=rates)
def test_the_pick_is_the_same(lua: Any, queue: Queue, ahead_tokens: int, rate: float) -> None:
    assert_same(lua, queue, ahead_tokens, rate)


def test_both_plan_the_same_number_of_requests(lua: Any) -> None:
    """One request more than is planned, and it alone has a chance."""
    hopeless = [(1, 100)] * PLANNED_REQUESTS
    longer = [(1, 200)] * (PLANNED_REQUESTS - 1)

    assert assert_same(lua, [*hopeless, (5000, 50)], 1000, 1000.0) == 0
    assert assert_same(lua, [*longer, (5000, 50)], 0, 1000.0) == PLANNED_REQUESTS - 1


def test_of_equally_long_requests_the_latest_steps_aside(lua: Any) -> None:
    assert assert_same(lua, [(1000, 1000), (1900, 1000), (2000, 500)], 0, 1000.0) == 0
