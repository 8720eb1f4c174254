"""``/metrics`` of a port that replicas share: the sum of them all, whichever answers, within its bound of time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dualmap.router.peer_client import PeerClient
from dualmap.router.telemetry.fleet_gauges import FleetOverviews
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.router.telemetry.port_metrics import COUNTS_PATH, PortMetrics
from dualmap.runtime.clock import RealClock
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.statestore.call_values import PoolOverview
from dualmap.statestore.leases import ReplicaInfo

HERE = {"host": "here", "port": "8000"}
Answer = Callable[[httpx.Request], Any]


def values(page: bytes) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def value(page: bytes, name: str, **labels: str) -> float:
    return values(page)[f"{name}{sorted(labels.items())}"]


def replica(name: str, info: Mapping[str, str], **more: str) -> ReplicaInfo:
    return ReplicaInfo(name, 10_000, 6000, {**info, "ops_url": f"http://{name}", **more})


def overview(*replicas: ReplicaInfo) -> PoolOverview:
    loads = {
        "a": InstanceLoad("a", InstanceState.READY, queued_requests=3, running_requests=4, context_tokens=500_000),
        "b": InstanceLoad("b", InstanceState.READY, queued_requests=1, running_requests=2),
    }
    return PoolOverview(5000, loads, replicas, None, {}, {})


class Stand:
    """One replica, and what its peers answer."""

    def __init__(self, *replicas: ReplicaInfo, info: Mapping[str, str] = HERE) -> None:
        self.metrics = RouterMetrics(["default"])
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        fleet = FleetOverviews({}, clock=RealClock())
        fleet.overviews["default"] = overview(*replicas)
        self.fleet = fleet
        client = PeerClient(httpx.MockTransport(self._answer))
        self.page = PortMetrics("me", self.metrics, fleet, {"default": "org/m"}, info, client)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == COUNTS_PATH
        self.asked.append(request.url.host)
        told = self.answers[request.url.host](request)
        told = await told if asyncio.iscoroutine(told) else told
        return told if isinstance(told, httpx.Response) else httpx.Response(200, content=told)


def peer_counts(name: str, metrics: RouterMetrics) -> bytes:
    return orjson.dumps({"replica_id": name, "counts": metrics.instruments.counts(), "migrations": {}})


async def test_counters_and_histograms_are_those_of_all_replicas_of_the_port() -> None:
    stand, other = Stand(replica("me", HERE), replica("peer", HERE)), RouterMetrics(["default"])
    stand.answers["peer"] = lambda _: peer_counts("peer", other)
    for metrics, ttft_s in ((stand.metrics, 0.2), (other, 4.0), (other, 4.0)):
        metrics.pools["default"].outcomes[Outcome.COMPLETED].inc()
        metrics.pools["default"].ttft_s.observe(ttft_s)
        metrics.in_flight.labels("default").inc()
    other.refused(429, "queue_full")
    other.degraded.set(1)

    page = await stand.page.page()

    assert value(page, "dualmap_requests_total", pool="default", outcome="completed") == 3
    assert value(page, "dualmap_ttft_seconds_count", pool="default") == 3
    assert value(page, "dualmap_ttft_seconds_sum", pool="default") == pytest.approx(8.2)
    assert value(page, "dualmap_ttft_seconds_bucket", pool="default", le="0.25") == 1
    assert value(page, "dualmap_inflight_requests", pool="default") == 3
    assert value(page, "dualmap_refusals_total", code="queue_full") == 1, "the peer alone has counted any"
    assert value(page, "dualmap_store_degraded") == 1, "the largest, not the sum"
    assert value(page, "dualmap_instance_running_requests", pool="default", instance="a") == 4, "once, not per replica"


async def test_every_replica_of_a_port_says_the_same() -> None:
    one, other = Stand(replica("me", HERE), replica("peer", HERE)), Stand(replica("me", HERE), replica("peer", HERE))
    one.metrics.refused(429, "queue_full")
    other.metrics.refused(429, "replica_full")
    one.answers["peer"] = lambda _: peer_counts("peer", other.metrics)
    other.answers["peer"] = lambda _: peer_counts("peer", one.metrics)

    assert values(await one.page.page()) == values(await other.page.page())


@pytest.mark.parametrize(
    "info", [{"host": "here", "port": "9000"}, {"host": "there", "port": "8000"}, {}], ids=["port", "machine", "untold"]
)
async def test_a_replica_of_another_port_is_not_counted(info: dict[str, str]) -> None:
    stand = Stand(replica("me", HERE), replica("far", info))

    assert value(await stand.page.page(), "dualmap_store_degraded") == 0
    assert stand.asked == []


async def test_a_peer_that_hangs_or_fails_counts_with_what_it_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmap.router.telemetry.port_metrics.QUERY_TIMEOUT_S", 0.01)
    stand, other = Stand(replica("me", HERE), replica("peer", HERE)), RouterMetrics(["default"])
    other.refused(429, "queue_full")
    stand.answers["peer"] = lambda _: peer_counts("peer", other)
    await stand.page.page()

    async def hang() -> None:
        await asyncio.Event().wait()

    for answer in (lambda _: hang(), lambda _: httpx.Response(500), lambda _: b"{}", lambda _: b"[1", lambda _: b"7"):
        stand.answers["peer"] = answer
        assert value(await stand.page.page(), "dualmap_refusals_total", code="queue_full") == 1


async def test_a_peer_that_left_is_forgotten_and_an_absent_store_forgets_none() -> None:
    stand, other = Stand(replica("me", HERE), replica("peer", HERE)), RouterMetrics(["default"])
    other.refused(429, "queue_full")
    stand.answers["peer"] = lambda _: peer_counts("peer", other)
    await stand.page.page()

    known = stand.fleet.overviews.pop("default")
    assert value(await stand.page.page(), "dualmap_refusals_total", code="queue_full") == 1
    stand.fleet.overviews["default"] = overview(known.replicas[0])
    assert "queue_full" not in (await stand.page.page()).decode()


async def test_what_another_version_counts_is_left_out() -> None:
    stand = Stand(replica("me", HERE), replica("peer", HERE))
    counts = {
        "dualmap_new_thing": [[["x"], [1]]],
        "dualmap_refusals": [[["a", "label more"], [1]]],
        "dualmap_ttft_seconds": [[["default"], [1, 2, 3]]],
    }
    stand.answers["peer"] = lambda _: orjson.dumps({"replica_id": "peer", "counts": counts, "migrations": {"x": {}}})

    page = await stand.page.page()

    assert b"dualmap_new_thing" not in page
    assert value(page, "dualmap_ttft_seconds_count", pool="default") == 0


async def test_a_counter_of_the_fleet_never_falls_behind_what_a_peer_has_read_already() -> None:
    stand = Stand(replica("me", HERE), replica("peer", HERE))
    stand.fleet.overviews["default"] = replace(stand.fleet.overviews["default"], migrations={"idle": 3, "drain": 1})
    told = {"replica_id": "peer", "counts": {}, "migrations": {"default": {"idle": 5, "rebalance": 2}}}
    stand.answers["peer"] = lambda _: orjson.dumps(told)

    page = await stand.page.page()

    assert {
        reason: value(page, "dualmap_migrations_total", pool="default", reason=reason)
        for reason in ("idle", "drain", "rebalance")
    } == {"idle": 5, "drain": 1, "rebalance": 2}


async def test_the_fleet_is_told_by_vllms_names() -> None:
    stand, other = Stand(replica("me", HERE), replica("peer", HERE)), RouterMetrics(["default"])
    stand.answers["peer"] = lambda _: peer_counts("peer", other)
    for metrics in (stand.metrics, other):
        metrics.pools["default"].prompt_tokens_unreported.inc(100)
        metrics.pools["default"].hit_tokens_unreported.inc(40)
    named = {"model_name": "org/m", "engine": "0"}

    page = await stand.page.page()

    assert value(page, "vllm:num_requests_running", **named) == 6
    assert value(page, "vllm:num_requests_waiting", **named) == 4
    assert value(page, "vllm:kv_cache_usage_perc", **named) == 0.25
    assert value(page, "vllm:prefix_cache_queries_total", **named) == 200
    assert value(page, "vllm:prefix_cache_hits_total", **named) == 80
