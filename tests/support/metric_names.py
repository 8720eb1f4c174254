"""The names of all metrics."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from dualmap.router.telemetry.fleet_gauges import FleetGauges, FleetOverviews
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.runtime.clock import RealClock
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.memory import MemoryStore
from dualmap.workers.metrics import WorkerMetrics

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def router_registry() -> CollectorRegistry:
    """Return the metrics that a replica exposes, the fleet's gauges included."""
    router = RouterMetrics(["default"])
    pool = MemoryStore(SchedulingSettings()).pool("default")
    fleet = FleetOverviews({"default": pool}, clock=RealClock())
    asyncio.run(fleet.refresh())
    FleetGauges(fleet, router.registry)
    return router.registry


def sample_names(registry: CollectorRegistry) -> set[str]:
    return {family.name + suffix for family in registry.collect() for suffix in _SUFFIXES[family.type]}


def existing_metrics() -> set[str]:
    """Every sample name that a router replica or a worker can expose."""
    return sample_names(router_registry()) | sample_names(WorkerMetrics().registry)
