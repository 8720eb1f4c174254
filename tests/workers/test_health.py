"""Instances go up and down by what their servers answer and by the progress they make."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.errors import LeaseLostError, StoreUnavailableError
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.health import CONCURRENCY, HealthChecker, check_pause_s, plan_checks
from dualmap.workers.health_rules import HealthRecord
from dualmap.workers.probe import Health, Prober
from dualmap.workers.settings import WorkerSettings
from tests.statestore.samples import finish, first_token
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance, Reserve
from tests.workers.scripted_server import ScriptedServer

SETTINGS = WorkerSettings(health_interval_s=1.0, stall_down_s=20.0)


class Steady(random.Random):
    """Jitter that does not."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


@pytest.fixture
def checking(leading: LeaderContext) -> LeaderContext:
    return replace(leading, settings=PoolSettings(model="qwen"), worker=SETTINGS, jitter=Steady())


@pytest.fixture
async def checker(checking: LeaderContext) -> AsyncIterator[HealthChecker]:
    async with (
        Prober(timeout_s=30, canary_timeout_s=30) as prober,
        HealthChecker(checking, prober) as health,
    ):
        yield health


Check = Callable[..., Awaitable[None]]


@pytest.fixture
def check(checker: HealthChecker, clock: ManualClock) -> Check:
    """Let ``rounds`` check intervals pass, each check through to its end."""

    async def run(rounds: int = 1) -> None:
        for _ in range(rounds):
            await checker.tick()
            under_way = list(checker._under_way.values())
            if under_way:
                await asyncio.wait(under_way, timeout=60)
            clock.jump(1.0)
        checker._collect()

    return run


StateOf = Callable[[str], Awaitable[InstanceState]]


@pytest.fixture
def state_of(pool: PoolStore) -> StateOf:
    async def read(instance_id: str) -> InstanceState:
        return (await pool.membership()).instances[instance_id].state

    return read


async def test_a_starting_instance_is_ready_after_its_first_good_check(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    state_of: StateOf,
    value: Callable[..., float],
) -> None:
    server = await servers()
    server.answers["/health"] = (503, "")
    await add_instance("a", InstanceState.STARTING, url=server.url)

    await check(5)
    assert await state_of("a") is InstanceState.STARTING

    server.answers["/health"] = (200, "")
    await check()
    assert await state_of("a") is InstanceState.READY
    assert value("dualmap_worker_health_transitions_total", source="starting", target="ready") == 1


async def test_what_a_server_reports_too_late_is_read_at_a_later_check(
    checking: LeaderContext, clock: ManualClock, servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance, pool: PoolStore,
) -> None:  # fmt: skip
    """vLLM's first answer to ``/server_info`` takes a second or several, those behind it milliseconds."""
    server, info = await servers(), "/server_info?config_format=json"
    server.answers[info] = 5.0
    await add_instance("a", InstanceState.STARTING, url=server.url)

    async def window_tokens() -> tuple[InstanceState, int]:
        spec = (await pool.membership()).instances["a"]
        return spec.state, spec.dispatch_window_tokens

    async with Prober(timeout_s=0.5) as prober, HealthChecker(checking, prober) as health:
        seen = []
        for answer in (5.0, (200, '{"vllm_config": {"scheduler_config": {"max_num_batched_tokens": 9000}}}'), None):
            server.answers[info] = answer
            await health.tick()
            await asyncio.wait(list(health._under_way.values()), timeout=60)
            clock.jump(1.0)
            seen.append(await window_tokens())
        times = [path for path, _ in server.requests].count(info)

    assert seen[0] == (InstanceState.READY, 4096)
    assert seen[1] == seen[2] == (InstanceState.READY, 18_000)
    assert times == 2, "it has said what it has to say"


async def test_a_worker_without_files_leaves_the_states_and_says_so(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    state_of: StateOf,
    value: Callable[..., float],
    no_files_left: Callable[[], contextlib.AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = await servers()
    await add_instance("up", InstanceState.READY, url=server.url)
    await add_instance("new", InstanceState.STARTING, url=server.url)

    with no_files_left():
        await check(5)

    assert (await state_of("up"), await state_of("new")) == (InstanceState.READY, InstanceState.STARTING)
    assert value("dualmap_worker_health_checks_total", outcome="not_asked") == 10
    assert caplog.text.count("out of files") == 1 and "LimitNOFILE" in caplog.text

    await check()
    assert await state_of("new") is InstanceState.READY


async def test_an_instance_whose_url_nobody_can_ask_is_its_own_failure_alone(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], add_instance: AddInstance, state_of: StateOf
) -> None:
    server = await servers()
    await add_instance("a", InstanceState.STARTING, url=server.url)
    await add_instance("z", InstanceState.READY, url="http://127.0.0.1:99999")

    await check(4)

    assert (await state_of("a"), await state_of("z")) == (InstanceState.READY, InstanceState.DOWN)


async def test_a_ready_instance_goes_down_after_three_failed_checks_and_comes_back_after_two_good_ones(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], add_instance: AddInstance, state_of: StateOf
) -> None:
    server = await servers()
    await add_instance("a", url=server.url)
    seen = []
    for answer in [(200, ""), (500, ""), (500, ""), (500, ""), (200, ""), (200, "")]:
        server.answers["/health"] = answer
        await check()
        seen.append((await state_of("a")).value)

    assert seen == ["ready", "ready", "ready", "down", "down", "ready"]


async def test_what_the_server_says_of_its_cache_is_learned_when_it_becomes_ready(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], pool: PoolStore, add_instance: AddInstance
) -> None:
    server = await servers()
    server.answers["/metrics"] = (200, 'vllm:cache_config_info{block_size="128",num_gpu_blocks="1000"} 1.0\n')
    await add_instance("a", InstanceState.STARTING, url=server.url, max_running_requests=77)

    await check()

    spec = (await pool.membership()).instances["a"]
    assert (spec.state, spec.kv_capacity_tokens, spec.max_running_requests) == (InstanceState.READY, 128_000, 77)


async def test_learning_keeps_what_an_operator_changed_during_the_check(
    checker: HealthChecker, servers: Callable[[], Awaitable[ScriptedServer]], pool: PoolStore, add_instance: AddInstance
) -> None:
    server = await servers()
    server.answers["/metrics"] = (200, 'vllm:cache_config_info{block_size="128",num_gpu_blocks="1000"} 1.0\n')
    await add_instance("a", InstanceState.STARTING, url=server.url)

    await checker.tick()
    await pool.members.put_instance(InstanceSpec("a", server.url, max_queued_requests=5))
    await asyncio.wait(list(checker._under_way.values()), timeout=60)

    spec = (await pool.membership()).instances["a"]
    assert (spec.kv_capacity_tokens, spec.max_queued_requests) == (128_000, 5)


async def test_a_server_with_another_model_is_reported(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = await servers()
    server.answers["/v1/models"] = (200, json.dumps({"data": [{"id": "llama"}]}))
    await add_instance("a", InstanceState.STARTING, url=server.url)

    await check()

    assert "--served-model-name" in caplog.text


async def test_one_hanging_instance_delays_nobody_elses_checks(
    checker: HealthChecker,
    clock: ManualClock,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    state_of: StateOf,
) -> None:
    hanging, fine = await servers(), await servers()
    hanging.answers["/health"] = 60.0
    await add_instance("a", InstanceState.STARTING, url=hanging.url)
    await add_instance("b", InstanceState.STARTING, url=fine.url)

    await checker.tick()
    await asyncio.wait([checker._under_way["b"]], timeout=30)

    assert await state_of("b") is InstanceState.READY
    assert not checker._under_way["a"].done()


async def test_an_engine_that_answers_but_makes_no_progress_goes_down_and_stays_until_it_proves_itself(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    pool: PoolStore,
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
    value: Callable[..., float],
) -> None:
    # given an engine that stopped: /health is fine, its counters stand still, no request ends well
    server = await servers()
    server.answers |= {"/metrics": (200, "vllm:generation_tokens_total 100.0\n"), "/v1/completions": None}
    await add_instance("a", url=server.url)
    await add_instance("b", url=(await servers()).url)
    await reserve("r1", "a", other="b")

    await check(15)
    assert await state_of("a") is InstanceState.READY, "suspect, but not condemned yet"
    await check(7)
    assert await state_of("a") is InstanceState.DOWN
    assert value("dualmap_worker_health_checks_total", outcome="stalled") == 1

    # when its work is gone, /health alone does not bring it back
    await finish(pool, "r1")
    await check(6)
    assert await state_of("a") is InstanceState.DOWN
    assert "it completes no token: no HTTP from" in (await pool.members.notes())["a"].text
    server.answers["/v1/completions"] = (200, "{}")
    await check(3)
    assert await state_of("a") is InstanceState.READY


@pytest.mark.parametrize("presumed", [0, 2, 4], ids=["streams", "half", "plain"])
async def test_an_engine_that_hangs_is_down_whatever_the_share_of_requests_whose_first_token_is_presumed(
    presumed: int,
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    pool: PoolStore,
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
) -> None:
    server = await servers()
    server.answers |= {"/metrics": (200, "vllm:generation_tokens_total 100.0\n"), "/v1/completions": None}
    await add_instance("a", url=server.url)

    for second in range(23):  # new ones come all the time, and routers presume that they are prefilled
        await reserve(f"r{second}", "a")
        if second % 4 < presumed:
            await first_token(pool, f"r{second}", "a", seen=False)
        await check()

    assert await state_of("a") is InstanceState.DOWN


async def test_an_engine_whose_plain_answers_come_stays_in_service(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    pool: PoolStore,
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
) -> None:
    server = await servers()
    server.answers["/metrics"] = (200, "vllm:generation_tokens_total 100.0\n")  # what it tells is out of date
    await add_instance("a", url=server.url)
    await reserve("long", "a")
    await first_token(pool, "long", "a", seen=False)

    for second in range(40):
        if second % 8 == 7:
            await reserve(f"r{second}", "a")
            await finish(pool, f"r{second}", seen=True)
        await check()

    assert await state_of("a") is InstanceState.READY


IDLE = "vllm:generation_tokens_total 100.0\nvllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"


async def test_an_idle_engine_is_not_taken_down_for_requests_that_it_never_got(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
    asked_for: AskedFor,
) -> None:
    server = await servers()
    server.answers |= {"/metrics": (200, IDLE), "/v1/completions": (200, "{}")}
    await add_instance("a", url=server.url)
    await reserve("ghost", "a")

    await check(60)

    assert await state_of("a") is InstanceState.READY
    assert 3 <= asked_for(server, "/v1/completions") <= 6, "once in a while"


async def test_an_engine_that_hung_while_it_was_idle_goes_down(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
) -> None:
    server = await servers()
    server.answers |= {"/metrics": (200, IDLE), "/v1/completions": None}
    await add_instance("a", url=server.url)
    await reserve("r1", "a")

    await check(22)

    assert await state_of("a") is InstanceState.DOWN


async def test_an_engine_that_decodes_for_long_stays_in_service(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
) -> None:
    server = await servers()
    await add_instance("a", url=server.url)
    await reserve("r1", "a")

    for second in range(40):
        server.answers["/metrics"] = (200, f"vllm:generation_tokens_total {second}.0\n")
        await check()

    assert await state_of("a") is InstanceState.READY


async def test_a_busy_engine_that_is_slow_to_tell_its_counters_stays_in_service(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
    value: Callable[..., float],
) -> None:
    server = await servers()
    server.answers["/metrics"] = (503, "")
    await add_instance("a", url=server.url)
    await reserve("r1", "a")

    await check(40)

    assert "/metrics" in {path for path, _ in server.requests}
    assert await state_of("a") is InstanceState.READY
    assert not value("dualmap_worker_health_checks_total", outcome="stalled")


async def test_counters_are_read_rarely_unless_an_instance_is_suspect(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    reserve: Reserve,
    asked_for: AskedFor,
) -> None:
    server = await servers()
    await add_instance("a", url=server.url)

    await check(60)
    assert 2 <= asked_for(server, "/metrics") <= 5
    await reserve("r1", "a")
    await check(9)
    before = asked_for(server, "/metrics")
    await check(10)
    assert asked_for(server, "/metrics") >= before + 7


METADATA = (1, 2, 3)


Caching = Callable[[str], Awaitable[ScriptedServer]]


@pytest.fixture
def caching(servers: Callable[[], Awaitable[ScriptedServer]], add_instance: AddInstance, reserve: Reserve) -> Caching:
    """Starts a server with these metrics, for instance "a", whose KV metadata are those of request "r1"."""

    async def start(metrics: str) -> Any:
        server = await servers()
        server.answers["/metrics"] = (200, metrics)
        await add_instance("a", url=server.url)
        await reserve("r1", "a", hashes=METADATA)
        return server

    return start


"""Blocks of the chain that the tests of restarts give to an instance."""


BelievedBlocks = Callable[[str], Awaitable[int]]


@pytest.fixture
def believed_blocks(pool: PoolStore) -> BelievedBlocks:
    async def read(instance_id: str) -> int:
        return (await pool.observe([instance_id], Chain(METADATA, 128, 3 * 128))).loads[instance_id].hit_blocks

    return read


AskedFor = Callable[[ScriptedServer, str], int]


@pytest.fixture
def asked_for() -> AskedFor:
    def count(server: Any, path: str) -> int:
        return sum(asked == path for asked, _ in server.requests)

    return count


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("process_start_time_seconds 100.0\n", "process_start_time_seconds 160.5\n"),
        ("vllm:prompt_tokens_total 900.0\n", "vllm:prompt_tokens_total 0.0\n"),
    ],
)
async def test_a_restart_between_two_checks_is_noticed_and_its_kv_metadata_forgotten(
    check: Check,
    caching: Caching,
    reserve: Reserve,
    pool: PoolStore,
    state_of: StateOf,
    believed_blocks: BelievedBlocks,
    value: Callable[..., float],
    before: str,
    after: str,
) -> None:
    server = await caching(before)
    await finish(pool, "r1")
    await check(3)
    assert await believed_blocks("a") == 3

    server.answers["/metrics"] = (200, after)
    await server.drop_connections()
    await check()

    assert await believed_blocks("a") == 0
    assert await state_of("a") is InstanceState.READY
    assert value("dualmap_worker_health_transitions_total", source="ready", target="starting") == 1

    await reserve("r2", "a", hashes=METADATA)
    await finish(pool, "r2")
    await check(40)
    assert await believed_blocks("a") == 3, "one restart is noticed once"


async def test_a_restart_that_the_store_could_not_be_told_of_is_told_again(
    check: Check, caching: Caching, pool: PoolStore, believed_blocks: BelievedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await caching("process_start_time_seconds 100.0\n")
    await check(2)
    server.answers["/metrics"] = (200, "process_start_time_seconds 160.0\n")
    await server.drop_connections()

    async def unavailable(*_arguments: object, **_named: object) -> bool:
        raise StoreUnavailableError("the store is away")

    with monkeypatch.context() as away:
        away.setattr(pool.members, "set_instance_state", unavailable)
        with pytest.raises(StoreUnavailableError):
            await check()
    assert await believed_blocks("a") == 3

    await check(2)
    assert await believed_blocks("a") == 0


STARTED = "process_start_time_seconds 100.0\nvllm:prompt_tokens_total 900.0\n"


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        (STARTED, True),
        ("process_start_time_seconds 160.0\nvllm:prompt_tokens_total 900.0\n", False),
        ("vllm:prompt_tokens_total 900.0\n", False),
    ],
    ids=["the same process", "another process", "an unknown process"],
)
async def test_failed_checks_alone_forget_nothing_that_the_process_still_has(
    check: Check,
    caching: Caching,
    reserve: Reserve,
    pool: PoolStore,
    state_of: StateOf,
    believed_blocks: BelievedBlocks,
    later: str,
    kept: bool,
) -> None:
    # given an instance whose checks fail for a while, as on a machine that is out of CPU
    server = await caching(STARTED)
    await finish(pool, "r1")
    await check(2)
    server.answers["/health"] = (503, "")
    await check(4)
    assert await state_of("a") is InstanceState.DOWN

    # when they succeed again
    server.answers |= {"/health": (200, ""), "/metrics": (200, later)}
    await check(3)

    # then its start time tells whether it has its cache
    assert await state_of("a") is InstanceState.READY
    assert await believed_blocks("a") == (3 if kept else 0)
    await reserve("r2", "a", hashes=METADATA)
    await finish(pool, "r2")
    await check(40)
    assert await believed_blocks("a") == 3, "nothing is forgotten twice"


async def test_an_engine_that_refuses_connections_is_gone_and_its_cache_too(
    check: Check, caching: Caching, pool: PoolStore, state_of: StateOf, believed_blocks: BelievedBlocks
) -> None:
    server = await caching(STARTED)
    await finish(pool, "r1")
    await check(2)

    await server.stop()
    await check(4)

    assert await state_of("a") is InstanceState.DOWN
    assert await believed_blocks("a") == 0


async def test_a_connection_that_was_closed_alone_is_no_restart(
    check: Check, caching: Caching, believed_blocks: BelievedBlocks, asked_for: AskedFor
) -> None:
    server = await caching("process_start_time_seconds 100.0\nvllm:prompt_tokens_total 5.0\n")
    await check(2)
    read = asked_for(server, "/metrics")

    await server.drop_connections()
    await check()

    assert asked_for(server, "/metrics") == read + 1
    assert await believed_blocks("a") == 3


async def test_a_restart_behind_a_proxy_that_keeps_its_connection_is_noticed_a_little_later(
    check: Check, caching: Caching, believed_blocks: BelievedBlocks
) -> None:
    server = await caching("process_start_time_seconds 100.0\n")
    await check(3)

    server.answers["/metrics"] = (200, "process_start_time_seconds 104.0\n")
    await check(16)

    assert await believed_blocks("a") == 0


async def test_a_restarted_engine_is_asked_for_its_capacity_again(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], pool: PoolStore, add_instance: AddInstance
) -> None:
    server = await servers()
    page = 'process_start_time_seconds {}\nvllm:cache_config_info{{kv_cache_size_tokens="{}"}} 1.0\n'
    server.answers["/metrics"] = (200, page.format(100, 64_000))
    await add_instance("a", InstanceState.STARTING, url=server.url)
    await check(2)

    server.answers["/metrics"] = (200, page.format(130, 32_000))
    await server.drop_connections()
    await check()

    assert (await pool.membership()).instances["a"].kv_capacity_tokens == 32_000


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.STANDBY])
async def test_health_never_puts_back_what_an_operator_took_out(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    state_of: StateOf,
    state: InstanceState,
) -> None:
    server = await servers()
    await add_instance("a", state, url=server.url)
    await check(3)
    assert await state_of("a") is state

    for answer in [(500, "")] * 4 + [(200, "")] * 3:
        server.answers["/health"] = answer
        await check()

    assert await state_of("a") is InstanceState.STANDBY


async def test_an_instance_that_hangs_while_it_drains_is_parked(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    pool: PoolStore,
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
    value: Callable[..., float],
) -> None:
    # given a request that a draining instance never prefills, though its HTTP side is well
    server = await servers()
    server.answers["/metrics"] = (200, "vllm:generation_tokens_total 7.0\n")
    await add_instance("a", url=server.url)
    await reserve("r1", "a")
    await pool.members.set_instance_state("a", InstanceState.DRAINING)

    await check(40)

    assert await state_of("a") is InstanceState.STANDBY
    assert value("dualmap_worker_health_transitions_total", source="draining", target="standby") == 1
    assert value("dualmap_worker_drained_total") == 0


async def test_an_instance_drained_during_its_check_is_not_taken_down(
    checker: HealthChecker,
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    pool: PoolStore,
    add_instance: AddInstance,
    state_of: StateOf,
) -> None:
    server = await servers()
    server.answers["/health"] = (500, "")
    await add_instance("a", url=server.url)
    await check(2)

    await checker.tick()  # the third failing check is under way
    await pool.members.set_instance_state("a", InstanceState.DRAINING)
    await asyncio.wait(list(checker._under_way.values()), timeout=60)

    assert await state_of("a") is InstanceState.DRAINING


async def test_a_deposed_leader_takes_nobody_down(
    checker: HealthChecker,
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    pool: PoolStore,
    add_instance: AddInstance,
    state_of: StateOf,
) -> None:
    server = await servers()
    server.answers["/health"] = (500, "")
    await add_instance("a", url=server.url)
    await check(2)
    await pool.leader_lease.release((await pool.snapshot()).leader)
    assert await pool.leader_lease.acquire("another", 60_000) is not None

    with pytest.raises(LeaseLostError):
        await check(2)

    assert await state_of("a") is InstanceState.READY


async def test_a_deposed_leader_writes_nothing_that_it_learned(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], pool: PoolStore, add_instance: AddInstance
) -> None:
    server = await servers()
    server.answers["/metrics"] = (200, 'vllm:cache_config_info{block_size="128",num_gpu_blocks="1000"} 1.0\n')
    await add_instance("a", InstanceState.STARTING, url=server.url)
    before = (await pool.membership()).instances["a"]
    await pool.leader_lease.release((await pool.snapshot()).leader)
    assert await pool.leader_lease.acquire("another", 60_000) is not None

    with pytest.raises(LeaseLostError):
        await check()

    assert (await pool.membership()).instances["a"] == before


def test_the_longest_overdue_is_checked_first_and_nobody_twice_at_once() -> None:
    instances = {f"i{number}": InstanceSpec(f"i{number}", "http://x") for number in range(5)}
    records = {"i2": HealthRecord(due_s=1.0), "i3": HealthRecord(due_s=0.5), "i4": HealthRecord(due_s=99.0)}

    chosen = plan_checks(instances, records, frozenset({"i0"}), now_s=10.0)

    assert [spec.instance_id for spec in chosen] == ["i3", "i2", "i1"]


def test_a_large_fleet_is_checked_less_often_rather_than_at_a_higher_rate() -> None:
    settings = WorkerSettings(health_interval_s=1.0)

    assert check_pause_s(4, settings) == 1.0
    assert check_pause_s(500, settings) == 2.5


class GatedProber:
    """Counts the checks that are open at once, and lets none end before the gate opens. Shaped as a Prober."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = 0
        self.open = 0
        self.most_open = 0

    async def health(self, url: str) -> Health:
        self.asked += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await self.gate.wait()
        self.open -= 1
        return Health(None, connected=False)

    async def run(self, url: str) -> None:
        return None


async def test_no_more_checks_are_open_at_once_than_allowed(
    checking: LeaderContext, add_instance: AddInstance, eventually: Callable[..., Awaitable[Any]]
) -> None:
    prober = GatedProber()
    for number in range(70):
        await add_instance(f"i{number}", url="http://x")

    async with HealthChecker(checking, prober) as checker:
        await checker.tick()
        await eventually(lambda: prober.open == CONCURRENCY)
        await checker.tick()  # which must not ask again those that wait for their turn
        prober.gate.set()
        await eventually(lambda: prober.asked == 70 and prober.open == 0)

    assert prober.most_open == CONCURRENCY


# what it lists, and what is wrong ------------------------------------------------------------------------------------
def listing(*names: str, **adapters: str) -> tuple[int, str]:
    cards = [{"id": name} for name in names] + [{"id": name, "parent": of} for name, of in adapters.items()]
    return 200, json.dumps({"data": cards})


ModelsOf = Callable[[str], Awaitable[Any]]


@pytest.fixture
def models_of(pool: PoolStore) -> ModelsOf:
    async def read(instance_id: str) -> Any:
        return (await pool.membership()).instances[instance_id].models

    return read


async def test_what_a_server_lists_is_known_when_it_is_ready_and_followed_while_it_runs(
    check: Check,
    servers: Callable[[], Awaitable[ScriptedServer]],
    add_instance: AddInstance,
    models_of: ModelsOf,
    asked_for: AskedFor,
) -> None:
    server = await servers()
    server.answers["/v1/models"] = listing("qwen")
    await add_instance("a", InstanceState.STARTING, url=server.url)
    await check()
    assert await models_of("a") == {"qwen": ""}

    server.answers["/v1/models"] = listing("qwen", sql="qwen")
    await check(6)
    assert await models_of("a") == {"qwen": "", "sql": "qwen"}

    server.answers["/v1/models"] = (503, "")
    await check(6)
    assert await models_of("a") == {"qwen": "", "sql": "qwen"}, "what could not be read stays"

    server.answers["/v1/models"] = listing("qwen")
    await check(6)
    assert await models_of("a") == {"qwen": ""}
    assert asked_for(server, "/v1/models") <= 8, "not with every check"


async def test_the_room_for_adapters_is_known_from_the_first_request_for_one_on(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], add_instance: AddInstance, pool: PoolStore
) -> None:
    """vLLM 0.32 has the metric from the start, and a sample of it from then on."""

    async def slots() -> tuple[int, int]:
        spec = (await pool.membership()).instances["a"]
        return spec.adapter_slots, spec.adapter_host_slots

    server = await servers()
    server.answers |= {"/v1/models": listing("qwen", sql="qwen"), "/metrics": (200, "")}
    await add_instance("a", InstanceState.STARTING, url=server.url)
    await check(6)
    assert await slots() == (0, 0)

    server.answers["/metrics"] = (200, 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql"} 1.7e9\n')
    await check(6)
    assert await slots() == (4, 4)


async def test_an_adapter_that_is_used_past_the_fleet_is_known_by_what_the_instance_reports(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], add_instance: AddInstance, pool: PoolStore
) -> None:
    """Of several ranks behind one URL it does not say which one has it."""
    server = await servers()
    page = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,who"} 1.7e9\n'
    server.answers |= {"/v1/models": listing("qwen", sql="qwen", chat="qwen"), "/metrics": (200, page)}
    await add_instance("a", InstanceState.STARTING, url=server.url, adapter_slots=2)
    await add_instance("rank", InstanceState.STARTING, url=server.url, adapter_slots=2, data_parallel_rank=0)
    await check(6)
    uses, _ = await pool.members.adapters(["a", "rank"])

    assert [use.adapter for use in uses["a"]] == ["sql", "chat"]
    assert [use.adapter for use in uses["rank"]] == ["chat", "sql"], "as listed: the last one was loaded last"


async def test_an_instance_that_reports_which_adapters_it_has_is_believed_for_those_that_it_lists(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], add_instance: AddInstance, pool: PoolStore
) -> None:
    """An adapter that was unloaded keeps its weights there, which no request finds."""
    server = await servers()
    loaded = "".join(
        f'vllm:lora_adapter_loaded{{adapter_name="{name}",level="{level}"}} 1.0\n'
        for name, level in (("sql", "gpu"), ("unloaded", "gpu"), ("chat", "cpu"))
    )
    page = f"vllm:num_gpu_loaded_lora_adapters 2.0\n{loaded}"
    server.answers |= {"/v1/models": listing("qwen", sql="qwen", chat="qwen", law="qwen"), "/metrics": (200, "")}
    await add_instance("a", InstanceState.STARTING, url=server.url, adapter_slots=1, adapter_host_slots=3)
    await check(6)
    server.answers["/metrics"] = (200, page)
    await check(12)
    uses, _ = await pool.members.adapters(["a"])

    assert [use.adapter for use in uses["a"]] == ["sql", "chat"]


async def test_a_server_that_took_the_place_of_another_lists_what_it_says_itself(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], add_instance: AddInstance, models_of: ModelsOf
) -> None:
    server = await servers()
    await add_instance("a", InstanceState.STARTING, url=server.url, models={"former": ""})

    await check()

    assert await models_of("a") is None


async def test_a_returning_engine_proves_itself_by_a_name_that_it_lists(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], add_instance: AddInstance
) -> None:
    server = await servers()
    server.answers |= {"/v1/completions": (200, "{}"), "/v1/models": listing("other", sql="other")}
    await add_instance("a", InstanceState.DOWN, url=server.url)

    await check(2)

    assert [json.loads(body)["model"] for path, body in server.requests if path == "/v1/completions"] == ["other"]


async def test_why_an_instance_does_not_serve_is_noted_until_it_does(
    check: Check, servers: Callable[[], Awaitable[ScriptedServer]], pool: PoolStore, add_instance: AddInstance
) -> None:
    server, gone = await servers(), await servers()
    await gone.stop()
    server.answers["/health"] = (401, "")
    await add_instance("keyed", InstanceState.STARTING, url=server.url)
    await add_instance("refused", InstanceState.STARTING, url=gone.url)
    await add_instance("unknown", InstanceState.STARTING, url="http://no-such-host.invalid:8000")

    await check()
    told = {name: note.text for name, note in (await pool.members.notes()).items()}

    assert "worker.upstream_api_key" in told["keyed"]
    assert "connection refused by 127.0.0.1:" in told["refused"]
    assert "'no-such-host.invalid' cannot be resolved" in told["unknown"]
    server.answers |= {"/health": (200, ""), "/v1/models": listing("llama")}
    await check(2)
    assert "it lists llama, and not the pool's model 'qwen'" in (await pool.members.notes())["keyed"].text
    server.answers["/v1/models"] = listing("qwen")
    await check(6)
    assert "keyed" not in await pool.members.notes()
    await pool.members.remove_instance("refused")
    await pool.members.set_instance_state("unknown", InstanceState.STANDBY)
    await check()
    assert await pool.members.notes() == {}


# a checker that is cut off ---------------------------------------------------------------------------------------
async def beat(pool: Any, **info: str) -> None:
    await pool.heartbeat("router-1", 600_000, info)


@pytest.fixture
async def unreachable(add_instance: AddInstance, servers: Callable[[], Awaitable[ScriptedServer]]) -> None:
    """Three instances in service that the checker cannot reach, while a router is alive."""
    for name in "abc":
        server = await servers()
        await server.stop()
        await add_instance(name, url=server.url)


async def test_instances_that_one_checker_cannot_reach_stay_in_service(
    unreachable: Any,
    pool: PoolStore,
    check: Check,
    state_of: StateOf,
    value: Callable[..., float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await beat(pool)

    await check(6)

    assert [await state_of(name) for name in "abc"] == [InstanceState.READY] * 3
    assert value("dualmap_worker_health_cut_off", pool="default") == 1
    assert caplog.text.count("the checks of most instances fail at once") == 1
    notes = (await pool.overview()).notes
    assert all("of most instances at once" in notes[name].text for name in "abc")


async def test_an_instance_that_a_router_has_lost_too_goes_down(
    unreachable: Any, pool: PoolStore, check: Check, state_of: StateOf
) -> None:
    await beat(pool, lost="b c")

    await check(4)

    assert [await state_of(name) for name in "abc"] == [InstanceState.READY, InstanceState.DOWN, InstanceState.DOWN]


async def test_only_an_instance_that_is_in_service_is_said_to_stay_there(
    unreachable: Any, pool: PoolStore, check: Check
) -> None:
    await beat(pool, lost="b c")

    await check(5)

    notes = (await pool.overview()).notes
    assert {name: "stays in service" in notes[name].text for name in "abc"} == {"a": True, "b": False, "c": False}
    assert not any("stay in service" in notes[name].text for name in "abc")


async def test_where_no_router_is_alive_the_checks_alone_decide(
    unreachable: Any, check: Check, state_of: StateOf
) -> None:
    await check(4)
    assert [await state_of(name) for name in "abc"] == [InstanceState.DOWN] * 3


async def test_instances_that_are_all_down_in_the_end_are_not_said_to_be_well(
    unreachable: Any,
    pool: PoolStore,
    check: Check,
    state_of: StateOf,
    value: Callable[..., float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await beat(pool)
    await check(4)
    await beat(pool, lost="a b c")

    await check(4)

    assert [await state_of(name) for name in "abc"] == [InstanceState.DOWN] * 3
    assert value("dualmap_worker_health_cut_off", pool="default") == 0
    assert "succeed again" not in caplog.text
    assert "no instance is in service any more" in caplog.text


async def test_one_of_many_goes_down_whatever_routers_say(
    add_instance: AddInstance,
    servers: Callable[[], Awaitable[ScriptedServer]],
    pool: PoolStore,
    check: Check,
    state_of: StateOf,
) -> None:
    await beat(pool)
    for name in "abc":
        server = await servers()
        if name == "b":
            await server.stop()
        await add_instance(name, url=server.url)

    await check(4)

    assert [await state_of(name) for name in "abc"] == [InstanceState.READY, InstanceState.DOWN, InstanceState.READY]


class TestAnEngineThatIsPausedOrAsleep:
    ASLEEP, AWAKE = (200, '{"is_sleeping": true}'), (200, '{"is_sleeping": false}')

    async def test_is_out_of_service_at_once_until_it_completes_a_token(
        self,
        check: Check,
        servers: Callable[[], Awaitable[ScriptedServer]],
        add_instance: AddInstance,
        state_of: StateOf,
        asked_for: AskedFor,
        pool: PoolStore,
    ) -> None:
        server = await servers()
        server.answers |= {"/is_sleeping": self.AWAKE, "/metrics": (200, IDLE), "/v1/completions": None}
        await add_instance("a", InstanceState.STARTING, url=server.url)
        await check(2)
        assert await state_of("a") is InstanceState.READY

        server.answers["/is_sleeping"] = self.ASLEEP
        await check()
        assert await state_of("a") is InstanceState.DOWN, "although all instances of the fleet are"
        assert "/is_sleeping" in (await pool.members.notes())["a"].text

        await check(5)
        assert asked_for(server, "/v1/completions") == 0, "no engine that sleeps is given a request"

        server.answers |= {"/is_sleeping": self.AWAKE, "/v1/completions": (200, "{}")}
        await check(3)
        assert await state_of("a") is InstanceState.READY
        assert "a" not in await pool.members.notes()

    async def test_has_an_empty_cache_for_the_fleet(
        self,
        check: Check,
        servers: Callable[[], Awaitable[ScriptedServer]],
        add_instance: AddInstance,
        reserve: Reserve,
        pool: PoolStore,
    ) -> None:
        server = await servers()
        server.answers["/is_sleeping"] = self.AWAKE
        await add_instance("a", InstanceState.READY, url=server.url)
        await reserve("r", "a")
        assert set((await pool.publications.recent_blocks(("a",), 10))["a"])

        server.answers["/is_sleeping"] = self.ASLEEP
        await check()

        assert not (await pool.publications.recent_blocks(("a",), 10)).get("a")

    async def test_a_server_that_does_not_say_is_queried_once_a_minute(
        self,
        check: Check,
        servers: Callable[[], Awaitable[ScriptedServer]],
        add_instance: AddInstance,
        asked_for: AskedFor,
    ) -> None:
        server = await servers()
        await add_instance("a", InstanceState.READY, url=server.url)

        await check(50)
        assert asked_for(server, "/is_sleeping") == 1
        await check(20)
        assert asked_for(server, "/is_sleeping") == 2
