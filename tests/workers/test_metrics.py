"""Metrics live on the worker's own registry under stable names."""

from __future__ import annotations

from prometheus_client import REGISTRY

from dualmap.workers.metrics import WorkerMetrics


def test_every_metric_carries_the_workers_prefix_and_the_pool_but_those_of_certificates() -> None:
    """Routers and workers have the same of certificates, and one alert is for both."""
    metrics = WorkerMetrics()
    families = list(metrics.registry.collect())

    assert families
    for family in families:
        assert family.name.startswith(("dualmap_worker_", "dualmap_tls_certificate_")), family.name
        assert family.documentation
    collectors = [value for value in vars(metrics).values() if value is not metrics.registry]
    assert {collector._labelnames[0] for collector in collectors} == {"pool", "certificate"}


def test_two_workers_in_one_process_count_apart() -> None:
    one, other = WorkerMetrics(), WorkerMetrics()
    one.drift_repaired.labels("default").inc()

    assert b'dualmap_worker_drift_repaired_total{pool="default"} 1.0' in one.exposition()
    assert b"dualmap_worker_drift_repaired_total{" not in other.exposition()
    assert REGISTRY.get_sample_value("dualmap_worker_drift_repaired_total", {"pool": "default"}) is None


def test_a_pools_counters_begin_at_0() -> None:
    shown = WorkerMetrics(["default"]).exposition().decode()

    for name in ("drift_repaired", "reaped_replicas", "reaped_requests", "drained"):
        assert f'dualmap_worker_{name}_total{{pool="default"}} 0.0' in shown
    assert 'dualmap_worker_terms_total{event="started",pool="default"} 0.0' in shown
