"""The operations page names only metrics that exist."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from router.fleet_gauges import FleetGauges, FleetSnapshots
from router.metrics import RouterMetrics
from scheduling.settings import SchedulingSettings
from statestore.clock import RealClock
from statestore.memory import MemoryStore
from workers.metrics import WorkerMetrics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "operations.md"
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def sample_names(registry: CollectorRegistry) -> set[str]:
    return {family.name + suffix for family in registry.collect() for suffix in _SUFFIXES[family.type]}


def existing_metrics() -> set[str]:
    """Every sample name that a router replica or a worker can expose."""
    router = RouterMetrics(["default"])
    pool = MemoryStore(SchedulingSettings()).pool("default")
    fleet = FleetSnapshots({"default": pool}, clock=RealClock(), max_age_s=1.0, call=router.store_calls["snapshot"])
    asyncio.run(fleet.refresh())
    FleetGauges(fleet, router.registry)
    return sample_names(router.registry) | sample_names(WorkerMetrics().registry)


def test_every_metric_on_the_operations_page_exists() -> None:
    named = set(re.findall(r"\bdualmap_[a-z_]+", PAGE.read_text()))

    assert len(named) > 20
    assert named - existing_metrics() == set()
