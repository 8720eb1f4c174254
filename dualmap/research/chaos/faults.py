"""The faults: each brings one about on a running fleet, waits until it shows as the documents say, and ends it.

All take a ``Stage``. Where a fault fails to show they raise ChaosError, and have ended the fault all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from dualmap.research.chaos.fault_proxy import (
    BLACK_HOLE,
    GARBAGE,
    HALF_OPEN,
    LEFT_OPEN,
    RESET,
    NetworkFault,
)
from dualmap.research.chaos.local_fleet import ChaosError, Engine, until_async
from dualmap.research.chaos.stage import SHOWN_WITHIN_S, Stage
from dualmap.scheduling.state.instance import InstanceState
from dualmap.simulation.emulator.generation_request import DEADLY_TEXT
from dualmap.simulation.emulator.lies import Lie

Fault = Callable[[Stage], Awaitable[None]]
_SMALL_KV_TOKENS = 6_000
_CLOCK_RIGHT_S = 15.0
"""Leases and waits are right by then."""
_PORT_CLOSED_S = 1.0
"""The port of an engine that died is closed by then."""
_DRIFT = """
local count = '"pending_tokens":'
local changed = redis.call('HGET', KEYS[1], ARGV[1]):gsub(count .. '(%d+)', function(tokens)
    return count .. (tokens + 1000)
end)
redis.call('HSET', KEYS[1], ARGV[1], changed)
"""


# --- engines


async def dead_engine(stage: Stage) -> None:
    engine = stage.any_engine()
    async with _restarted(engine):
        await engine.kill()
        await stage.becomes(engine, InstanceState.DOWN)


async def engine_terminated(stage: Stage) -> None:
    """SIGTERM, as an orchestrator sends it to an engine that was not drained."""
    engine = stage.any_engine()
    async with _restarted(engine):
        engine.signal(signal.SIGTERM)
        await engine.ended()
        await stage.becomes(engine, InstanceState.DOWN)


async def suspended_engine(stage: Stage) -> None:
    engine = stage.any_engine()
    engine.signal(signal.SIGSTOP)
    try:
        await stage.becomes(engine, InstanceState.DOWN)
        await stage.hold(2.0)
    finally:
        engine.signal(signal.SIGCONT)


async def unreachable_engine(stage: Stage) -> None:
    """The engine's machine is gone: what was sent to it is never answered, and no connection ends."""
    await _down_by_network(stage, BLACK_HOLE)


async def half_open_engine(stage: Stage) -> None:
    """The engine gets requests, and its answers get lost."""
    await _down_by_network(stage, HALF_OPEN)


async def slow_checks(stage: Stage) -> None:
    """Every byte to and from an engine is late by more than a check may take."""
    engine = stage.any_engine()
    async with engine.proxy.broken(NetworkFault(delay_s=1.2)):
        await stage.becomes(engine, InstanceState.DOWN)


async def leader_cut_off_from_engines(stage: Stage) -> None:
    fleet = stage.fleet
    said, concerned = "the checks of most instances fail at once", fleet.connections_of([await fleet.leader()])
    async with contextlib.AsyncExitStack() as stack:
        async with stage.logged(said):
            for engine in fleet.engines:
                await stack.enter_async_context(engine.proxy.broken(BLACK_HOLE, concerned))
        health = [await fleet.health_text(url) for url in fleet.ops_urls()]
        for engine in fleet.engines:  # one that a router avoids for a former fault counts as lost by it
            if not any(f'"{engine.name}":{{"state"' in text.replace(" ", "") for text in health):
                await stage.stays(engine, InstanceState.READY, 1.0)


async def engine_restarted_at_once(stage: Stage) -> None:
    engine = stage.any_engine()
    async with stage.logged("restarted between two checks"):
        await engine.order("die", {"abruptly": True, "revive_after_s": 0.05})


async def hung_engine(stage: Stage) -> None:
    engine = stage.any_engine()
    await engine.order("pause", {})
    try:
        await stage.becomes(engine, InstanceState.DOWN)
        await stage.hold(2.0)
    finally:
        await engine.order("resume", {})


async def full_kv_memory(stage: Stage) -> None:
    """An engine with KV memory for a few requests decodes for long: its counters move, so it stays in service."""
    engine = stage.any_engine()
    async with _restarted(engine):
        engine.signal(signal.SIGTERM)
        await engine.ended()
        await engine.start("--emulator.kv_capacity_tokens", str(_SMALL_KV_TOKENS))
        await stage.becomes(engine, InstanceState.READY)
        await stage.stays(engine, InstanceState.READY, 8.0)


async def all_engines_dead(stage: Stage) -> None:
    fleet = stage.fleet
    async with contextlib.AsyncExitStack() as stack:
        for engine in fleet.engines:
            await stack.enter_async_context(_restarted(engine))
        await asyncio.gather(*(engine.kill() for engine in fleet.engines))
        await stage.fleet_shows(lambda view: view.ready == 0, "no instance is ready")
        await stage.hold(1.0)


async def deadly_prompt(stage: Stage) -> None:
    """A prompt kills every engine that reads it: it gets two, and the router then refuses its copies."""
    fleet = stage.fleet
    try:
        async with stage.logged("engines died while they held it"):
            status, _ = await stage.ask(
                {"prompt": f"{stage.rng.getrandbits(64):x} {DEADLY_TEXT.decode()}", "max_tokens": 4}
            )
        await stage.hold(_PORT_CLOSED_S)
        dead = [engine.name for engine in fleet.engines if not await engine.proxy.target_listens()]
        if status == 200 or len(dead) > 2:
            raise ChaosError(f"the prompt got status {status}, and killed {', '.join(dead)}")
    finally:
        await asyncio.gather(*(_revived(engine) for engine in fleet.engines))


async def streams_left_open(stage: Stage) -> None:
    """An engine takes no new connection, and leaves those that are open silent."""
    await _down_by_network(stage, LEFT_OPEN)


async def engine_dies_while_it_drains(stage: Stage) -> None:
    engine = stage.any_engine()
    status = await stage.admin("POST", f"instances/{engine.name}/drain")
    if status >= 400:
        raise ChaosError(f"{engine.name} cannot be drained: {status}")
    try:
        async with _restarted(engine):
            await engine.kill()
            await stage.becomes(engine, InstanceState.STANDBY)
    finally:
        await stage.admin("POST", f"instances/{engine.name}/resume")


async def engine_reset(stage: Stage) -> None:
    """Every connection to an engine is reset, and every new one."""
    await _down_by_network(stage, RESET)


async def engine_garbage(stage: Stage) -> None:
    """The answers of an engine arrive as bytes that mean nothing."""
    async with stage.any_engine().proxy.broken(GARBAGE):
        await stage.hold(5.0)


async def engine_throttled(stage: Stage) -> None:
    """A connection to an engine passes 3 kB/s."""
    async with stage.any_engine().proxy.broken(NetworkFault(bytes_per_s=3_000)):
        await stage.hold(5.0)


def lying_engine(lie: Lie) -> Fault:
    """An engine whose ``/health`` is fine lies to every request."""

    async def lying(stage: Stage) -> None:
        engine = stage.any_engine()
        await engine.order("lie", {"lie": lie, "retry_after": "1"} if lie is Lie.BUSY else {"lie": lie})
        try:
            await stage.hold(5.0)
        finally:
            await engine.order("lie", {"lie": None})

    return lying


# --- routers


async def killed_router(stage: Stage) -> None:
    fleet, name = stage.fleet, stage.rng.choice(stage.fleet.routers)
    dead = fleet.up.kill(name)
    await stage.shows(lambda: fleet.up.pid(name) != dead, f"{name} is started again")


async def hung_router(stage: Stage) -> None:
    fleet, name = stage.fleet, stage.rng.choice(stage.fleet.routers)
    hung = fleet.up.pid(name)
    with _suspended(hung):
        await stage.shows(lambda: f"{name} has not answered" in fleet.up.output, f"{name} is found to hang")
        await stage.shows(lambda: fleet.up.pid(name) != hung, f"{name} is started again")


# --- workers


async def killed_leader(stage: Stage) -> None:
    fleet = stage.fleet
    before = (await fleet.view()).leader
    fleet.up.kill(await fleet.leader())
    await _another_leads(stage, before)


async def suspended_leader(stage: Stage) -> None:
    fleet = stage.fleet
    before, pid = (await fleet.view()).leader, fleet.up.pid(await fleet.leader())
    async with stage.logged("term over"):
        with _suspended(pid):
            await _another_leads(stage, before)


async def leader_cut_off_from_store(stage: Stage) -> None:
    fleet = stage.fleet
    before = (await fleet.view()).leader
    concerned = fleet.connections_of([await fleet.leader()])
    async with stage.logged("term over"), fleet.store_proxy.broken(BLACK_HOLE, concerned):
        await _another_leads(stage, before)


async def all_workers_gone(stage: Stage) -> None:
    fleet = stage.fleet
    with _suspended(*(fleet.up.pid(name) for name in fleet.workers)):
        await stage.fleet_shows(lambda view: view.leader is None, "no worker leads")
        await stage.hold(3.0)


# --- the store


def store_behind(fault: NetworkFault, hold_s: float = 2.0) -> Fault:
    """The network to the store has a fault, for all alike."""

    async def behind(stage: Stage) -> None:
        async with stage.logged("the store is back"), stage.fleet.store_proxy.broken(fault):
            await stage.alone()
            await stage.hold(hold_s)

    return behind


async def suspended_store(stage: Stage) -> None:
    with _suspended(stage.fleet.valkey.server_pid):
        await stage.alone()
        await stage.hold(1.0)


async def late_store(stage: Stage) -> None:
    """Calls reach the store when their callers have given them up."""
    async with stage.fleet.store_proxy.broken(NetworkFault(delay_s=3.5)):
        async with stage.logged("on its own, without the store"):
            await stage.alone()
        await stage.hold(4.0)


async def refusing_store(stage: Stage) -> None:
    """The store has no memory left."""
    fleet = stage.fleet
    async with stage.logged("on its own, without the store"):
        await fleet.store_command("CONFIG", "SET", "maxmemory", 1)
        try:
            await stage.alone()
            await stage.hold(2.0)
        finally:
            await fleet.store_command("CONFIG", "SET", "maxmemory", 0)


async def spoiled_store(stage: Stage) -> None:
    """The replies of the store arrive as bytes that mean nothing."""
    async with stage.fleet.store_proxy.broken(GARBAGE):
        await stage.alone(all_of_them=False)
        await stage.hold(2.0)


async def emptied_store(stage: Stage) -> None:
    """The store dies, and comes back with nothing."""
    fleet = stage.fleet
    async with stage.logged("the store is back"):
        await fleet.kill_store()
        try:
            await stage.alone()
        finally:
            await fleet.start_store()


async def evicted_members(stage: Stage) -> None:
    """The store forgets its instances and its replicas while it runs."""
    fleet = stage.fleet
    for name in ("instances", "instances:records", "replicas"):
        await fleet.store_command("DEL", fleet.key(name))
        await stage.hold(1.0)


async def version_beside_another(stage: Stage) -> None:
    """A newer version holds the pool: a process of this one ends at its start, and writes nothing."""
    async with _newer_version(stage):
        fleet = stage.fleet
        command = [sys.executable, "-m", "dualmap", "worker", "--config", str(fleet.directory / "chaos.yaml")]
        done = await asyncio.to_thread(
            subprocess.run,
            [*command, "--store.url", fleet.valkey.url, "--name", "beside"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode != 2 or "beside which this version" not in done.stderr:
            raise ChaosError(f"it ended with {done.returncode}: {done.stderr[-300:]}")


async def newer_version(stage: Stage) -> None:
    """A newer version takes the pool over, and goes again."""
    async with _newer_version(stage):
        await stage.alone()
        await stage.hold(2.0)


async def damaged_store(stage: Stage) -> None:
    """Somebody writes into the fleet's keys."""
    fleet = stage.fleet
    damage = (
        ("HSET", "meta", "epoch", "abc"),
        ("HSET", "leader", "expires_ms", "abc"),
        ("HSET", "instances", "instance-1", "[]"),
        ("HSET", "instances:records", "instance-2", "{"),
        ("HSET", "learned", "ttft_weights", "null"),
        ("HSET", "hotness:tree", "no hash", "x"),
        ("SET", "replicas", "x"),
    )
    async with stage.logged("unreadable state mended"):
        for command, key, *words in damage:
            await fleet.store_command(command, fleet.key(key), *words)
            await stage.hold(0.7)


def store_clock_jumps(seconds: float) -> Fault:
    """The store's clock is set forward, or back, and stays so."""

    async def jumps(stage: Stage) -> None:
        clock = stage.fleet.store_clock
        if clock.server is None:
            raise ChaosError("the store's clock can be set only where there is a C compiler (cc)")
        async with stage.logged("term over"):
            clock.jump(seconds)
        await stage.hold(_CLOCK_RIGHT_S)

    return jumps


async def drifted_counts(stage: Stage) -> None:
    """A count of an instance is not what its requests add up to."""
    fleet, engine = stage.fleet, stage.any_engine()
    async with stage.logged("sums had drifted"):
        await fleet.store_command("EVAL", _DRIFT, 1, fleet.key("instances:records"), engine.name)


# --- certificates


async def unusable_certificate(stage: Stage) -> None:
    """The endpoint's renewed certificate has another one's key: the former one is shown on."""
    certificates = stage.fleet.certificates
    certificates.show(certificates.issued(), key=b"no key")
    try:
        await _certificate_problem(stage, "router.tls_key")
        await stage.hold(2.0)
    finally:
        certificates.show(certificates.issued())


async def expired_certificate(stage: Stage) -> None:
    """The endpoint's certificate expires, and is renewed."""
    certificates = stage.fleet.certificates
    certificates.show(certificates.expired())
    try:
        await _certificate_problem(stage, "expired at")
        await stage.hold(2.0)
    finally:
        certificates.show(certificates.issued())


async def engine_refuses_certificate(stage: Stage) -> None:
    """An engine demands a certificate of another authority."""
    fleet, engine = stage.fleet, stage.any_engine()
    await engine.proxy.exchange_tls(fleet.certificates.server(refuses=True))
    try:
        await stage.becomes(engine, InstanceState.DOWN)
        await stage.hold(1.0)
    finally:
        await engine.proxy.exchange_tls(fleet.certificates.server())


async def store_refuses_certificate(stage: Stage) -> None:
    """The store demands a certificate of another authority."""
    fleet = stage.fleet
    async with stage.logged("the store is back"):
        await fleet.store_proxy.exchange_tls(fleet.certificates.server(refuses=True))
        try:
            await stage.alone()
            await stage.hold(2.0)
        finally:
            await fleet.store_proxy.exchange_tls(fleet.certificates.server())


# --- what several have in common


async def _certificate_problem(stage: Stage, words: str) -> None:
    """Wait until every router reports a problem in these words."""
    fleet = stage.fleet

    async def reported() -> bool:
        return all([words in await fleet.health_text(url) for url in fleet.ops_urls()])

    await until_async(reported, f"routers report a certificate: {words}", SHOWN_WITHIN_S)


async def _down_by_network(stage: Stage, fault: NetworkFault) -> None:
    engine = stage.any_engine()
    async with engine.proxy.broken(fault):
        await stage.becomes(engine, InstanceState.DOWN)
        await stage.hold(2.0)


async def _another_leads(stage: Stage, before: str | None) -> None:
    await stage.fleet_shows(lambda view: view.leader not in (None, before), "another worker leads")


@contextmanager
def _suspended(*pids: int) -> Iterator[None]:
    """These processes do nothing for the time of the context."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
                os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def _restarted(engine: Engine) -> AsyncIterator[None]:
    """The engine runs again after the context."""
    try:
        yield
    finally:
        await engine.kill()
        await engine.start()


async def _revived(engine: Engine) -> None:
    if not await engine.proxy.target_listens():
        await engine.kill()
        await engine.start()


@asynccontextmanager
async def _newer_version(stage: Stage) -> AsyncIterator[None]:
    fleet, meta = stage.fleet, stage.fleet.key("meta")
    before = [await fleet.store_command("HGET", meta, name) for name in ("schema", "oldest_schema")]
    await fleet.store_command("HSET", meta, "schema", 99, "oldest_schema", 99)
    try:
        yield
    finally:
        await fleet.store_command("HSET", meta, "schema", before[0].decode(), "oldest_schema", before[1].decode())
