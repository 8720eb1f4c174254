"""The page ``/metrics`` of the endpoint: the sum over all replicas that share its port, and vLLM's own names for what
load tools and autoscalers read of a server.

The kernel gives a connection to any of the replicas. Counters of that one alone would jump back and forth, which reads
as a restart. A replica's own page is at its ``router.ops_port``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx
import orjson
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.router.peer_client import PeerClient
from dualmap.router.telemetry.fleet_gauges import FleetGauges, FleetOverviews
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.router.telemetry.traffic import TrafficCounts
from dualmap.statestore.call_values import PoolOverview

COUNTS_PATH: Final = "/metrics/counts"
"""Path of a replica's counts, as JSON, for its peers."""
QUERY_TIMEOUT_S: Final = 0.5
"""Timeout for all peers at once: a scrape waits no longer for one that hangs, and has its last counts."""


class PortMetrics:
    """The page of the endpoint's port."""

    def __init__(
        self,
        replica_id: str,
        own: RouterMetrics,
        fleet: FleetOverviews,
        models: Mapping[str, str],
        info: Mapping[str, str],
        client: PeerClient,
    ) -> None:
        """``models`` by pool; ``info`` is what this replica reports of itself."""
        self._replica_id = replica_id
        self._own = own
        self._fleet = fleet
        self._info = info
        self._client = client
        self._peers: dict[str, str] = {}
        self._models = models
        self._said: dict[str, Mapping[str, Any]] = {}
        """Last counts of each peer."""

    def counts(self) -> bytes:
        """The counts that a peer gets."""
        migrations = {pool: overview.migrations for pool, overview in self._fleet.overviews.items()}
        page = {"replica_id": self._replica_id, "counts": self._own.instruments.counts(), "migrations": migrations}
        return orjson.dumps(page)

    async def page(self) -> bytes:
        """The page, after the overviews were refreshed. Waits for ``QUERY_TIMEOUT_S`` at most."""
        if self._fleet.overviews:  # else the store is away, and the peers are those last known
            self._peers = self._sharing(self._fleet.overviews)
        await self._query(set(filter(None, self._peers.values())))
        self._said = {name: said for name, said in self._said.items() if name in self._peers}
        port, fleet = RouterMetrics(self._models), _Latest(self._latest_overviews(), self._fleet.ages_s)
        for counts in (self._own.instruments.counts(), *(said["counts"] for said in self._said.values())):
            port.instruments.add(counts)
        FleetGauges(fleet, port.registry)
        port.registry.register(VllmNames(fleet.overviews, self._models, port))
        return generate_latest(port.registry)

    def _latest_overviews(self) -> dict[str, PoolOverview]:
        """This replica's own, with the counters of the replica that has looked last: its peers' looks are as old as
        theirs, and a counter must not fall from one page to the next."""
        latest: dict[str, PoolOverview] = {}
        for pool, overview in self._fleet.overviews.items():
            migrations = dict(overview.migrations)
            for said in self._said.values():
                for reason, count in said["migrations"].get(pool, {}).items():
                    migrations[reason] = max(migrations.get(reason, 0), count)
            latest[pool] = replace(overview, migrations=migrations)
        return latest

    def _sharing(self, overviews: Mapping[str, PoolOverview]) -> dict[str, str]:
        """The URLs of the other replicas that share the port, by their ids."""
        here = _port_of(self._info)
        replicas = [
            replica
            for overview in overviews.values()
            for replica in overview.replicas
            if replica.is_alive(overview.now_ms) and _port_of(replica.info) == here
        ]
        others = [replica for replica in replicas if here is not None and replica.replica_id != self._replica_id]
        return {replica.replica_id: replica.info.get("ops_url", "") for replica in others}

    async def _query(self, urls: Collection[str]) -> None:
        if not urls:
            return
        queries = [asyncio.create_task(self._read(url)) for url in urls]
        _, late = await asyncio.wait(queries, timeout=QUERY_TIMEOUT_S)
        for each in late:
            each.cancel()

    async def _read(self, url: str) -> None:
        """The counts of the replica that answers: without a port of its own, a replica shares its address too."""
        try:
            page = orjson.loads((await self._client.http.get(url + COUNTS_PATH, timeout=QUERY_TIMEOUT_S)).content)
            said = {name: dict(page[name]) for name in ("counts", "migrations")}
            self._said[page["replica_id"]] = said
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, TypeError):
            return


def _port_of(info: Mapping[str, str]) -> tuple[str, str] | None:
    """The machine and port of a replica's endpoint; None where it does not report them."""
    return (info["host"], info["port"]) if "host" in info and "port" in info else None


@dataclass(frozen=True, slots=True)
class _Latest:
    overviews: Mapping[str, PoolOverview]
    ages_s: Mapping[str, float]


class VllmNames(Collector):
    """The fleet as if each pool were one vLLM server, under that server's names and labels."""

    def __init__(
        self, overviews: Mapping[str, PoolOverview], models: Mapping[str, str], counted: RouterMetrics
    ) -> None:
        """``models`` by pool; ``counted`` by the replicas of the port."""
        self._overviews = overviews
        self._models = models
        self._counted = counted

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not collect

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "engine")
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests that instances have", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that the fleet holds", labels=labels)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of all instances' KV memory in use", labels=labels)
        queries = CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens of answered requests", labels=labels)
        hits = CounterMetricFamily("vllm:prefix_cache_hits", "Those of them that were cached", labels=labels)
        for pool, model in self._models.items():
            traffic = TrafficCounts.of(self._counted.pools[pool])
            queries.add_metric((model, "0"), traffic.prompt_tokens)
            hits.add_metric((model, "0"), traffic.hit_tokens)
        for pool, overview in self._overviews.items():
            named, loads = (self._models[pool], "0"), overview.loads.values()
            capacity_tokens = sum(load.kv_capacity_tokens for load in loads)
            used_tokens = sum(load.kv_usage * load.kv_capacity_tokens for load in loads)
            running.add_metric(named, sum(load.running_requests for load in loads))
            waiting.add_metric(named, sum(load.queued_requests for load in loads))
            usage.add_metric(named, used_tokens / max(1, capacity_tokens))
        yield from (running, waiting, usage, queries, hits)
