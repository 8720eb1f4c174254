"""The metrics of tenants."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from dualmap.router.telemetry.instruments import Instruments
from dualmap.router.telemetry.tenant_metrics import OTHER, TenantMetrics
from dualmap.scheduling.request.outcome import Outcome, Usage


def test_ends_are_counted_before_anybody_reads_them_and_once() -> None:
    make = Instruments()
    metrics, registry = TenantMetrics(make, 8), CollectorRegistry()
    registry.register(make)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"dualmap_tenant_{name}_total", labels)

    metrics.count_end(("acme", Outcome.COMPLETED, Usage(100, 64, 20)))
    metrics.count_end(("other", Outcome.CLIENT_GONE, None))
    metrics.count_end(("acme", Outcome.COMPLETED, Usage(10, None, 2)))
    metrics.count_end(("acme", Outcome.UPSTREAM_FAILED, Usage(None, None, None)))

    for _ in range(2):
        assert value("requests", tenant="acme", outcome="completed") == 2.0
        assert value("requests", tenant="acme", outcome="upstream_failed") == 1.0
        assert value("requests", tenant="other", outcome="client_gone") == 1.0
        assert [value("tokens", tenant="acme", kind=kind) for kind in ("prompt", "cached", "output")] == [110, 64, 22]
        assert value("tokens", tenant="other", kind="prompt") == 0.0
    metrics.count_end(("acme", Outcome.COMPLETED, None))
    assert [["acme", "completed"], [3.0]] in [
        [[*values], each] for values, each in make.counts()["dualmap_tenant_requests"]
    ]


def test_the_first_tenants_to_end_a_request_have_series_of_their_own() -> None:
    metrics = TenantMetrics(Instruments(), 2)

    for tenant in ("zebra", "acme", "mule"):
        metrics.count_end((tenant, Outcome.COMPLETED, Usage(1, 0, 1)))

    assert metrics.named == ["zebra", "acme"]
    assert {tenant for tenant, _ in metrics.requests.instruments} == {"zebra", "acme", OTHER}
