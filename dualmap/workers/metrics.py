"""Metrics of a worker process, on a registry of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dualmap.runtime.certificates import CertificateReport
from dualmap.scheduling.revisions.rollout import RolloutState
from dualmap.scheduling.state.instance import Role

TERM_EVENTS = ("started", "stepped_down", "lost", "expired", "failed")
NOT_SENT = "not_asked"
"""Outcome of a health check for which this worker had no file descriptor left."""
_LAG_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_TICK_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)


class WorkerMetrics:
    """Every metric of the workers package. Labels are bounded by the number of pools, jobs and reasons.

    Series of ``pools`` exist from the start, at 0: ``increase`` misses the event that a series begins with.
    """

    def __init__(self, pools: Iterable[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self.leader = Gauge(
            "dualmap_worker_leader", "1 while this worker leads the pool", ["pool"], registry=self.registry
        )
        self.fence = Gauge(
            "dualmap_worker_fence", "Fencing number of this worker's latest term", ["pool"], registry=self.registry
        )
        self.terms = Counter(
            "dualmap_worker_terms",
            f"Terms by what happened ({', '.join(TERM_EVENTS)})",
            ["pool", "event"],
            registry=self.registry,
        )
        self.ticks = Counter(
            "dualmap_worker_ticks",
            "Rounds of a job by outcome (ok, store_unavailable, store_error, timeout, error)",
            ["pool", "job", "outcome"],
            registry=self.registry,
        )
        self.tick_seconds = Histogram(
            "dualmap_worker_tick_seconds",
            "Duration of one round of a job",
            ["pool", "job"],
            registry=self.registry,
            buckets=_TICK_BUCKETS_S,
        )
        self.role_changes = Counter(
            "dualmap_worker_role_changes", "Changes of an instance's role", ["pool", "role"], registry=self.registry
        )
        self.rollout_percent = Gauge(
            "dualmap_worker_rollout_percent",
            "Percent of all sessions that the rollout under way gives its revision",
            ["pool", "revision"],
            registry=self.registry,
        )
        self.rollout_moves = Counter(
            "dualmap_worker_rollout_moves",
            f"Moves of rollouts by the state that they led to ({', '.join(RolloutState)})",
            ["pool", "state"],
            registry=self.registry,
        )
        self.migrations = Counter(
            "dualmap_worker_migrations",
            "Migrations requested by this worker, by reason and by the store's reply",
            ["pool", "reason", "status"],
            registry=self.registry,
        )
        self.rebalances = Counter(
            "dualmap_worker_rebalances",
            "Instance queues examined by the rebalancer, by cause (triggered, sweep)",
            ["pool", "cause"],
            registry=self.registry,
        )
        self.swept_granted = Counter(
            "dualmap_worker_swept_granted",
            "Held requests granted by the leader's sweep, as no replica had planned them",
            ["pool"],
            registry=self.registry,
        )
        self.hot_prefixes = Gauge(
            "dualmap_worker_hot_prefixes", "Hot prefixes in the published tree", ["pool"], registry=self.registry
        )
        self.samples = Counter(
            "dualmap_worker_samples",
            "First tokens and ends of requests that the leader learned from",
            ["pool"],
            registry=self.registry,
        )
        self.trees_published = Counter(
            "dualmap_worker_trees_published", "Hotness trees published", ["pool"], registry=self.registry
        )
        self.health_checks = Counter(
            "dualmap_worker_health_checks",
            f"Health checks by outcome (ok, failed, stalled, {NOT_SENT}: this worker is out of file descriptors)",
            ["pool", "outcome"],
            registry=self.registry,
        )
        self.adapter_steps = Counter(
            "dualmap_worker_adapter_steps",
            "Calls of the leader to instances about registered adapters, by what they did",
            ["pool", "step", "result"],
            registry=self.registry,
        )
        self.health_cut_off = Gauge(
            "dualmap_worker_health_cut_off",
            "1 while the checks of most instances fail at once, so that only those go down that a router has lost too",
            ["pool"],
            registry=self.registry,
        )
        self.health_transitions = Counter(
            "dualmap_worker_health_transitions",
            "State changes of instances made by this worker",
            ["pool", "source", "target"],
            registry=self.registry,
        )
        self.reaped_replicas = Counter(
            "dualmap_worker_reaped_replicas", "Replicas whose lease ran out", ["pool"], registry=self.registry
        )
        self.reaped_requests = Counter(
            "dualmap_worker_reaped_requests", "Requests finished for dead replicas", ["pool"], registry=self.registry
        )
        self.allotted = Counter(
            "dualmap_worker_allotted",
            "Budgets of tenants that were divided again among pools, as this pool wanted more",
            ["pool"],
            registry=self.registry,
        )
        self.mended = Counter(
            "dualmap_worker_mended",
            "Fields and keys of the store that could not be read, and were mended; the log names each",
            ["pool"],
            registry=self.registry,
        )
        self.drift_repaired = Counter(
            "dualmap_worker_drift_repaired",
            "Instances whose counts were wrong and were corrected",
            ["pool"],
            registry=self.registry,
        )
        self.registrations = Counter(
            "dualmap_worker_registrations",
            "Instances entered in the store, by cause (start, restored)",
            ["pool", "cause"],
            registry=self.registry,
        )
        self.drained = Counter(
            "dualmap_worker_drained", "Instances that finished draining", ["pool"], registry=self.registry
        )
        self.tier_price_seconds = Gauge(
            "dualmap_worker_tier_price_seconds",
            "Price of a load from a tier of an instance, its start and each token, of the worker that leads the pool",
            ["pool", "instance", "tier", "part"],
            registry=self.registry,
        )
        self.kv_event_batches = Counter(
            "dualmap_worker_kv_event_batches", "Batches of KV events applied", ["pool"], registry=self.registry
        )
        self.kv_event_blocks = Counter(
            "dualmap_worker_kv_event_blocks",
            "Blocks of KV events by what became of them (stored, removed, unknown: what came before them is not known;"
            " tier_stored, tier_removed: of tiers)",
            ["pool", "kind"],
            registry=self.registry,
        )
        self.kv_event_gaps = Counter(
            "dualmap_worker_kv_event_gaps",
            "Losses of KV events by outcome (filled by a replay, restarted: the engine's new cache was read from its"
            " beginning, dropped: the view was emptied)",
            ["pool", "outcome"],
            registry=self.registry,
        )
        self.kv_event_views = Gauge(
            "dualmap_worker_kv_event_views",
            "Instances whose KV events this worker reads, by status of the view (exact, partial, estimate)",
            ["pool", "status"],
            registry=self.registry,
        )
        self.kv_event_lag_seconds = Histogram(
            "dualmap_worker_kv_event_lag_seconds",
            "Time from publishing a batch of KV events, by the engine's clock, to the store",
            ["pool"],
            registry=self.registry,
            buckets=_LAG_BUCKETS_S,
        )
        self.wanted_instances = Gauge(
            "dualmap_worker_wanted_instances",
            "Instances that the autoscaler wants, of the worker that leads the pool alone",
            ["pool", "role"],
            registry=self.registry,
        )
        self.least_instances = Gauge(
            "dualmap_worker_least_instances",
            "Least instances that the autoscaler keeps, of the worker that leads the pool alone; 0: none while idle",
            ["pool", "role"],
            registry=self.registry,
        )
        self.scale_decisions = Counter(
            "dualmap_worker_scale_decisions",
            "Scaling decisions by what became of them (open, done, failed, withdrawn, published)",
            ["pool", "role", "status"],
            registry=self.registry,
        )
        self.discovered = Counter(
            "dualmap_worker_discovered",
            "Changes of members by discovery (entered, replaced, resumed, role changed, aliases changed, drained,"
            " removed)",
            ["pool", "change"],
            registry=self.registry,
        )
        self.discovery_failing = Gauge(
            "dualmap_worker_discovery_failing",
            "1 while what discovery looks at cannot be watched, of the worker that leads the pool alone",
            ["pool"],
            registry=self.registry,
        )

        self.certificate_expires = Gauge(
            "dualmap_tls_certificate_expires_unix_seconds",
            "End of the validity of a certificate that is in use",
            ["certificate"],
            registry=self.registry,
        )
        self.certificate_problem = Gauge(
            "dualmap_tls_certificate_problem",
            "1 while a renewed certificate cannot be used, or the one that is in use is not valid: /health says why",
            ["certificate"],
            registry=self.registry,
        )

        for pool in pools:
            self._start_at_0(pool)

    def certificate(self, report: CertificateReport) -> None:
        if report.expires_unix_s is not None:
            self.certificate_expires.labels(report.name).set(report.expires_unix_s)
        self.certificate_problem.labels(report.name).set(bool(report.problem))

    def end_term(self, pool: str) -> None:
        """Drop what only a leader knows: a former one must not publish it."""
        with contextlib.suppress(KeyError):
            self.discovery_failing.remove(pool)
        for gauge in (self.wanted_instances, self.least_instances):
            for role in (Role.PREFILL, Role.DECODE):
                with contextlib.suppress(KeyError):
                    gauge.remove(pool, role.value)

    def _start_at_0(self, pool: str) -> None:
        for counter in (
            self.swept_granted, self.samples, self.trees_published, self.reaped_replicas, self.reaped_requests,
            self.mended, self.drift_repaired, self.drained, self.allotted,
        ):  # fmt: skip
            counter.labels(pool)
        for event in TERM_EVENTS:
            self.terms.labels(pool, event)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
