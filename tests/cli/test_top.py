"""The full-screen table of a fleet, by its store alone."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from dualmap.cli.top import LastMinutes, MadeLimits, Shown, _bar, _screen, pool_table, tenant_table, values
from dualmap.router.telemetry.traffic import INFO_FIELD, TrafficCounts
from dualmap.router.tenants.tenant_record import TenantRecord
from dualmap.router.tenants.usage import TenantNow
from dualmap.runtime.tenant_settings import LimitSettings
from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, Tier
from dualmap.scheduling.request.metering import Counts
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.tenants.budgets import Measure
from dualmap.scheduling.tenants.shares import Work
from dualmap.statestore.call_values import PoolOverview, RunMemory
from dualmap.statestore.leases import OVERDUE_FIELD, Lease, ReplicaInfo
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool.chronicle import ChronicleRecord, KnownProblem
from dualmap.statestore.tenants.tenant_book import Edition

READY = InstanceState.READY
LOADS = {
    "a": InstanceLoad("a", READY, pending_tokens=100, prefill_tokens_per_s=1000.0, queued_requests=7),
    "b": InstanceLoad("b", READY, pending_tokens=9000, prefill_tokens_per_s=1000.0, context_tokens=1_500_000),
    "c": InstanceLoad("c", InstanceState.DOWN, prefill_tokens_per_s=1000.0, running_requests=3),
}


def overview(traffic: TrafficCounts) -> PoolOverview:
    replica = ReplicaInfo("r", 60_000, 60_000, {INFO_FIELD: traffic.to_text()})
    return PoolOverview(1000, LOADS, (replica,), Lease("worker-1", 3, 9000), {"rebalance": 4}, {})


def text(renderable: Any, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    file: Any = console.file
    return str(file.getvalue())


def names(shown: str) -> str:
    rows = (line.split() for line in shown.splitlines()[4:])
    return "".join(row[0] for row in rows if row and row[0] in LOADS)


def test_prices_of_tiers_and_doubts_about_caches_are_shown_where_there_are_some() -> None:
    tiers = InstanceTiers(
        (
            InstanceTier(Tier.HOST, 800_000, LoadPrice(0.001, 1e-6)),
            InstanceTier(Tier.DISK, 9_000_000, LoadPrice(0.01, 2e-5), "nothing was loaded yet"),
        )
    )
    plain = overview(TrafficCounts())
    seen = replace(plain, tiers={"a": tiers}, doubts={"b": "its events name a memory that is not known"})
    shown, without = (text(pool_table("default", each, Shown(), "name", 5.0, None)) for each in (seen, plain))

    assert "host 0.009 s  disk 0.174 s?" in shown
    assert "b: its cache is estimated: its events name a memory that is not known" in shown
    assert "load of" not in without and "estimated" not in without
    assert values(seen)["tiers"] == {"a": tiers.tiers}


def test_the_memory_of_agents_runs_is_shown_where_there_are_some() -> None:
    plain = overview(TrafficCounts())
    seen = replace(plain, runs=RunMemory(used_tokens=820, capacity_tokens=1000, waiting_turns=7))
    shown, without = (text(pool_table("default", each, Shown(), "name", 5.0, None)) for each in (seen, plain))

    assert "runs have 82.0% of the KV memory · 7 turns parked" in shown
    assert "runs" not in without
    assert values(seen)["runs"] == seen.runs


@pytest.mark.parametrize(
    ("sort", "order"),
    [("name", "abc"), ("ahead", "bac"), ("held", "abc"), ("running", "cab"), ("kv", "bac"), ("state", "cab")],
)
def test_instances_come_in_the_order_that_is_asked_for(sort: str, order: str) -> None:
    shown = text(pool_table("default", overview(TrafficCounts()), Shown(), sort, 5.0, None))

    assert names(shown) == order


def test_traffic_is_what_was_counted_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, now_s = Shown(), 100.0
    monkeypatch.setattr("dualmap.cli.top.time.monotonic", lambda: now_s)
    pool_table("default", overview(TrafficCounts(ended=1000, late=1000)), shown, "name", 5.0, None)
    now_s = 110.0
    later = TrafficCounts(ended=1020, refused=5, on_time=15, late=1000, prompt_tokens=100, hit_tokens=25)

    fleet, figures = text(pool_table("default", overview(later), shown, "name", 5.0, None)).splitlines()[:2]

    assert figures.rstrip() == "2.0 requests/s · on time 100.0% · hit rate 25.0% · refused 25.0%"
    assert "2/3 ready · 1 replica · worker-1 leads · 4 migrations" in fleet


def test_the_hit_rate_says_what_was_loaded_from_tiers_pulled_or_computed_all_the_same() -> None:
    counts = TrafficCounts(
        ended=9, prompt_tokens=1000, hit_tokens=500, host_tokens=300, peer_tokens=100, forgone_tokens=50
    )

    figures = text(pool_table("default", overview(counts), Shown(), "name", 5.0, None)).splitlines()[1]

    assert "hit rate 50.0% (host 30.0%, peer 10.0%, 5.0% in tiers computed) ·" in figures


def test_tenants_are_shown_with_what_they_did_lately_and_the_limits_that_are_nearest_to_their_end() -> None:
    shown, limits = Shown(), (("tokens_per_month", "", 0.95), ("requests_in_flight", "key:ci", 0.25), ("x", "", 0.1))
    tenant_table([TenantNow("acme", Counts(10, 100, 0, 20), 0, 0, limits)], shown, 100.0)
    now = TenantNow("acme", Counts(30, 1100, 0, 220, refused=5), 3, 2, limits, Work(5.0, 0.625, 0.5))

    heading, row = text(tenant_table([now], shown, 110.0)).splitlines()[:2]

    assert heading.split()[:4] == ["tenant", "requests/s", "tokens/s", "refused/s"]
    assert row.split()[:8] == ["acme", "2.0", "120.0", "0.5", "3", "2", "30", "1,320"]
    assert row.split()[8] == "62%/50%"
    assert row.split()[9:] == ["tokens_per_month", "95%", "requests_in_flight", "key:ci", "25%"]


async def test_tenants_that_were_made_in_the_running_fleet_have_their_limits() -> None:
    store, made = MemoryStore(SchedulingSettings()), MadeLimits()
    record = TenantRecord(limits=LimitSettings(requests_per_minute=60))
    edition = await store.tenants.change(Edition(), {"acme": record.text()}, by="a", action="c", before={}, after={})
    assert edition is not None
    await store.tenants.change(edition, {"broken": b"no json"}, by="a", action="c", before={}, after={})

    [limit] = (await made.read(store.tenants))["acme"]
    assert (limit.measure, limit.amount) == (Measure.REQUESTS, 60)
    assert [*await made.read(store.tenants)] == ["acme"]


def test_a_fleet_of_which_nobody_lives_says_so_and_what_to_do() -> None:
    gone = replace(overview(TrafficCounts()), now_ms=10**9, leader=None)

    first, advice, *rest = text(pool_table("default", gone, Shown(), "name", 5.0, None)).splitlines()

    assert first.startswith("Nobody lives: no router has a lease, and no worker leads.")
    assert "dualmap router" in advice and "dualmap worker" in advice
    assert names("\n".join(["", *rest])) == "abc", "the instances are listed as they were"
    alone = text(pool_table("default", replace(gone, leader=Lease("w", 1, 2 * 10**9)), Shown(), "name", 5.0, None))
    assert alone.startswith("No router lives: no request is served.")
    led = text(pool_table("default", replace(overview(TrafficCounts()), leader=None), Shown(), "name", 5.0, None))
    assert led.startswith("No worker leads: ")


def test_an_overload_is_the_first_that_one_reading_says() -> None:
    behind = {name: InstanceLoad(name, READY, pending_tokens=560_000, queued_requests=48) for name in "ab"}
    loaded = replace(overview(TrafficCounts(on_time=10_000)), loads=behind, now_ms=900_000)
    replica = ReplicaInfo("r", 960_000, 60_000, {OVERDUE_FIELD: "71"})
    loaded = replace(loaded, replicas=(replica,), leader=Lease("w", 3, 9000))
    known = KnownProblem("default/queue", "warning", "100 requests refused", "why", "what to do", 0, 895_000)
    ended = replace(known, key="default/late", what="30 % late", since_ms=600_000, until_ms=720_000)
    recent = TrafficCounts(on_time=71, late=29, arrived=2460, answered=1440, ended=1440)
    minutes = LastMinutes(ChronicleRecord(at_ms=899_000, problems=(known, ended)), recent, 60.0)

    shown = text(pool_table("default", loaded, Shown(), "name", 5.0, None, minutes), width=400)

    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == "Overload: 29 % of requests are not on time"
    for words in ("41.0 requests/s arrive and 24.0/s are answered", "96 held, 71 overdue", "2 of 2 instances"):
        assert words in lines[1]
    for words in ("instances add", "max_deferred_s", "autoscale"):
        assert words in lines[2]
    assert lines[3:6] == ["100 requests refused: why", "what to do", "over since 3 min, after 2 min: 30 % late"]
    assert "on time 71.0%" in shown, "of the last minute, and not since the start"
    assert "71 overdue" in shown


async def test_the_slo_is_the_one_in_effect() -> None:
    store = MemoryStore(SchedulingSettings())
    pool = store.pool("default")
    await pool.members.put_instance(InstanceSpec("a", url="http://a"))
    await pool.settings.change({"slo_ttft_s": 2.5}, by="ops")

    shown = text(await _screen(store, {"default": Shown()}, "name", None))

    assert "│SLO 2.5s" in shown


def test_a_bar_tells_dispatched_held_and_deferred_work_on_a_scale_of_twice_the_slo() -> None:
    load = InstanceLoad(
        "a", READY, pending_tokens=6000, dispatched_tokens=2500, deferred_tokens=1250, prefill_tokens_per_s=1000.0
    )

    assert str(_bar(load, 5.0)) == "████▓▓▓▓│░░······"
    assert str(_bar(replace(load, pending_tokens=90_000), 5.0)) == "████▓▓▓▓│▓▓▓▓▓▓▓▓"


def test_it_fits_a_terminal_of_80_columns() -> None:
    load = InstanceLoad("instance-10", InstanceState.DRAINING, pending_tokens=123_456, prefill_tokens_per_s=12_345.0)
    full = replace(overview(TrafficCounts()), loads={"instance-10": load})

    shown = text(pool_table("default", full, Shown(), "name", 5.0, None), width=80)

    assert "…" not in shown
    assert len(shown.splitlines()) == 6


def test_what_does_not_fit_the_screen_is_counted() -> None:
    shown = text(pool_table("default", overview(TrafficCounts()), Shown(), "ahead", 5.0, 1))

    assert "9.00" in shown
    assert "… 2 more" in shown
