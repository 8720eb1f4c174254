"""Grafana dashboards as data: `python deploy/grafana/build.py` writes dashboards/*.json; `make docs` does so too.

Gauges of the fleet are the same on every replica: `max` over replicas. Counters and histograms of requests add up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

POOL = 'pool=~"$pool"'
INSTANCE = f'{POOL}, instance=~"$instance"'
FOLDER = Path(__file__).parent / "dashboards"

Panel = tuple[str, str, str, dict[str, str]]
"""Title, what it says, unit, and queries by legend."""


def rate(counter: str, by: str = "pool", where: str = POOL) -> str:
    return f"sum by ({by}) (rate({counter}{{{where}}}[$__rate_interval]))"


def quantiles(histogram: str, by: str = "pool", where: str = POOL) -> dict[str, str]:
    buckets = f"sum by ({by}, le) (rate({histogram}_bucket{{{where}}}[$__rate_interval]))"
    return {f"P{round(100 * q)} {{{{{by}}}}}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.99)}


def of_instances(gauge: str) -> dict[str, str]:
    return {"{{instance}}": f"max by (pool, instance) ({gauge}{{{INSTANCE}}})"}


HIT_SHARE = {
    by: f"{rate('dualmap_hit_tokens_total', where=f'{POOL}, by=%s' % json.dumps(by))}"
    f" / {rate('dualmap_prompt_tokens_total', where=f'{POOL}, by=%s' % json.dumps(by))}"
    for by in ("expected", "reported")
}
DASHBOARDS: dict[str, list[Panel]] = {
    "Fleet": [
        ("Requests", "by how they ended", "reqps", {"{{outcome}}": rate("dualmap_requests_total", "outcome")}),
        (
            "On time",
            "requests whose first token came before their deadline",
            "percentunit",
            {
                "{{pool}}": f"{rate('dualmap_slo_total', where=POOL + ', slo=' + json.dumps('met'))} / {rate('dualmap_slo_total')}"
            },
        ),
        (
            "Arriving and answered",
            "where they part, an overload begins",
            "reqps",
            {
                "arriving {{pool}}": rate("dualmap_arrived_requests_total"),
                "answered {{pool}}": rate("dualmap_requests_total", where=f'{POOL}, outcome=~"completed|ended"'),
            },
        ),
        (
            "Not on time",
            "deadline passed, refused or failed before it",
            "reqps",
            {"{{why}}": rate("dualmap_not_on_time_requests_total", "why")},
        ),
        (
            "Held and overdue",
            "overdue: without a first token after the deadline",
            "short",
            {
                "held {{pool}}": f"sum by (pool) (max by (pool, instance) (dualmap_instance_queued_requests{{{POOL}}}))",
                "overdue {{pool}}": f"sum by (pool) (dualmap_overdue_requests{{{POOL}}})",
                "parked {{pool}}": f"sum by (pool) (dualmap_parked_turns{{{POOL}}})",
            },
        ),
        ("Time to first token", "", "s", quantiles("dualmap_ttft_seconds")),
        ("Whole answer", "parsed to last byte", "s", quantiles("dualmap_request_seconds")),
        ("Time per output token", "streamed answers", "s", quantiles("dualmap_time_per_output_token_seconds")),
        ("Output tokens", "reported by instances", "short", {"{{pool}}": rate("dualmap_output_tokens_total")}),
        ("Hit rate", "prompt tokens found in a cache", "percentunit", HIT_SHARE),
        (
            "Refused",
            "429, 503 and 504 by code",
            "reqps",
            {"{{code}}": "sum by (code) (rate(dualmap_refusals_total[$__rate_interval]))"},
        ),
        ("Retries", "by the failure before", "reqps", {"{{failure}}": rate("dualmap_retries_total", "failure")}),
        ("Instances", "by state", "short", {"{{state}}": f"max by (pool, state) (dualmap_instances{{{POOL}}})"}),
        ("Replicas", "with a lease", "short", {"{{pool}}": f"max by (pool) (dualmap_replicas{{{POOL}}})"}),
        (
            "Live requests",
            "held or in flight",
            "short",
            {"{{pool}}": f"sum by (pool) (dualmap_inflight_requests{{{POOL}}})"},
        ),
        (
            "Migrations",
            "held requests that moved",
            "reqps",
            {"{{reason}}": f"max by (pool, reason) (rate(dualmap_migrations_total{{{POOL}}}[$__rate_interval]))"},
        ),
        (
            "Requests of tenants",
            "by tenant",
            "reqps",
            {"{{tenant}}": "sum by (tenant) (rate(dualmap_tenant_requests_total[$__rate_interval]))"},
        ),
        (
            "Refused by limits",
            "429 that a limit of the tenant gave",
            "reqps",
            {"{{tenant}}": "sum by (tenant) (rate(dualmap_tenant_limited_requests_total[$__rate_interval]))"},
        ),
        (
            "Tokens of tenants",
            "of prompts, cached ones among them, and of answers",
            "short",
            {"{{tenant}} {{kind}}": "sum by (tenant, kind) (rate(dualmap_tenant_tokens_total[$__rate_interval]))"},
        ),
        (
            "Limits used",
            "above 1 a limit is overdrawn",
            "percentunit",
            {
                "{{tenant}} {{limit}} {{of}}": "sum by (tenant, limit, of) (max by (pool, tenant, limit, of)"
                f" (dualmap_tenant_limit_used_ratio{{{POOL}}}))"
            },
        ),
    ],
    "Instances": [
        ("Pending tokens", "to be prefilled", "short", of_instances("dualmap_instance_pending_tokens")),
        (
            "Dispatched tokens",
            "the part that the engine has",
            "short",
            of_instances("dualmap_instance_dispatched_tokens"),
        ),
        ("Held", "requests that can still move", "short", of_instances("dualmap_instance_queued_requests")),
        ("Running", "", "short", of_instances("dualmap_instance_running_requests")),
        (
            "Context tokens",
            "prompt and expected answer of what runs",
            "short",
            of_instances("dualmap_instance_context_tokens"),
        ),
        (
            "Prefill rate",
            "learned, tokens per second",
            "short",
            of_instances("dualmap_instance_prefill_tokens_per_second"),
        ),
        (
            "Blocks listed",
            "that its cache is believed to hold",
            "short",
            of_instances("dualmap_instance_cached_blocks"),
        ),
        ("Stalled", "work on time and no finished prefill", "s", of_instances("dualmap_instance_stalled_seconds")),
        (
            "Load variation",
            "coefficient of variation of pending tokens",
            "percentunit",
            {
                "{{pool}}": f"stddev by (pool) (max by (pool, instance) (dualmap_instance_pending_tokens{{{POOL}}}))"
                f" / avg by (pool) (max by (pool, instance) (dualmap_instance_pending_tokens{{{POOL}}}))"
            },
        ),
        (
            "Changes of state",
            "by the leader's health checks",
            "short",
            {"{{source}} → {{target}}": rate("dualmap_worker_health_transitions_total", "source, target")},
        ),
    ],
    "Scheduling": [
        ("Reasons", "why instances were chosen", "reqps", {"{{reason}}": rate("dualmap_decisions_total", "reason")}),
        ("Time held", "before dispatch", "s", quantiles("dualmap_hold_seconds")),
        (
            "Estimate error",
            "|expected − measured| TTFT over the measured",
            "percentunit",
            quantiles("dualmap_ttft_estimate_error_ratio"),
        ),
        ("Estimate error, seconds", "", "s", quantiles("dualmap_ttft_estimate_error_seconds")),
        ("Decision", "parsed to reserved", "s", quantiles("dualmap_decision_seconds")),
        (
            "Placements",
            "by round trips to the store",
            "reqps",
            {"{{round_trips}}": rate("dualmap_placements_total", "round_trips")},
        ),
        (
            "Decided again",
            "stale reservations, requests the store had lost",
            "reqps",
            {"stale": rate("dualmap_stale_reservations_total"), "replaced": rate("dualmap_replaced_requests_total")},
        ),
        ("Hot prefixes", "", "short", {"{{pool}}": f"max by (pool) (dualmap_worker_hot_prefixes{{{POOL}}})"}),
        (
            "Granted by sweeps",
            "held requests that no replica had planned",
            "reqps",
            {"{{pool}}": rate("dualmap_worker_swept_granted_total")},
        ),
        ("Rebalances", "queues examined", "reqps", {"{{cause}}": rate("dualmap_worker_rebalances_total", "cause")}),
    ],
    "Store and workers": [
        (
            "Store calls, P99",
            "",
            "s",
            {
                "{{call}}": "histogram_quantile(0.99, sum by (call, le) (rate(dualmap_store_call_seconds_bucket[$__rate_interval])))"
            },
        ),
        (
            "Store calls",
            "",
            "reqps",
            {"{{call}}": "sum by (call) (rate(dualmap_store_call_seconds_count[$__rate_interval]))"},
        ),
        (
            "Store errors",
            "",
            "reqps",
            {"{{call}}": "sum by (call) (rate(dualmap_store_errors_total[$__rate_interval]))"},
        ),
        ("Degraded", "replicas that decide alone", "short", {"replicas": "sum(dualmap_store_degraded)"}),
        ("Outbox", "transitions that wait for the store", "short", {"{{instance}}": "dualmap_outbox_transitions"}),
        ("Leaders", "by worker", "short", {"{{pool}} {{instance}}": f"dualmap_worker_leader{{{POOL}}}"}),
        (
            "Rounds",
            "of the leader's jobs",
            "reqps",
            {"{{job}} {{outcome}}": rate("dualmap_worker_ticks_total", "job, outcome")},
        ),
        (
            "Rounds, P99",
            "",
            "s",
            {
                "{{job}}": f"histogram_quantile(0.99, sum by (job, le) (rate(dualmap_worker_tick_seconds_bucket{{{POOL}}}[$__rate_interval])))"
            },
        ),
        (
            "Repairs",
            "drift, dead replicas",
            "short",
            {
                "drift": f"sum(increase(dualmap_worker_drift_repaired_total{{{POOL}}}[1h]))",
                "reaped replicas": f"sum(increase(dualmap_worker_reaped_replicas_total{{{POOL}}}[1h]))",
            },
        ),
        ("Samples", "that the leader learned from", "reqps", {"{{pool}}": rate("dualmap_worker_samples_total")}),
    ],
}


def dashboard(name: str, panels: list[Panel]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    choices = [
        ("pool", "label_values(dualmap_replicas, pool)"),
        ("instance", "label_values(dualmap_instance_state, instance)"),
    ]
    return {
        "uid": "dualmap-" + name.lower().replace(" ", "-"),
        "title": f"DualMap: {name}",
        "tags": ["dualmap"],
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "schemaVersion": 39,
        "links": [{"type": "dashboards", "tags": ["dualmap"], "title": "DualMap", "asDropdown": True}],
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                *(
                    {
                        "name": label,
                        "type": "query",
                        "query": query,
                        "datasource": source,
                        "refresh": 2,
                        "includeAll": True,
                        "multi": True,
                        "allValue": ".*",
                        "current": {"text": "All", "value": "$__all"},
                    }
                    for label, query in choices
                ),
            ]
        },
        "panels": [
            {
                "id": number + 1,
                "type": "timeseries",
                "title": title,
                "description": text,
                "datasource": source,
                "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": [
                    {"refId": chr(65 + place), "expr": query, "legendFormat": legend, "datasource": source}
                    for place, (legend, query) in enumerate(queries.items())
                ],
            }
            for number, (title, text, unit, queries) in enumerate(panels)
        ],
    }


def files() -> dict[Path, str]:
    """Every dashboard's file and its content."""
    made = {name: dashboard(name, panels) for name, panels in DASHBOARDS.items()}
    return {FOLDER / f"{each['uid']}.json": json.dumps(each, indent=1) + "\n" for each in made.values()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, "utf-8")
