"""Dashboards and alerts by a real Prometheus over a real fleet, where Debian's package is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fleet.fleet_process import Fleet, until
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
QUERIES = [
    (f"{path.stem}: {panel['title']}", target["expr"])
    for path in DASHBOARDS
    for panel in json.loads(path.read_text())["panels"]
    for target in panel["targets"]
]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs prometheus")


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result


def with_values(query: str) -> str:
    """A dashboard's query as Grafana sends it for all pools and instances."""
    return query.replace("$__rate_interval", "1m").replace('"$pool"', '".*"').replace('"$instance"', '".*"')


@pytest.fixture(scope="module")
def prometheus(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    replicas = fleet.dualmap("inspect", "overview", "--store.url", fleet.store_url)
    targets = sorted(set(re.findall(r"ops_url http://([\d.:]+)", replicas)))
    scrapes = [{"job_name": "router", "honor_labels": True, "static_configs": [{"targets": targets}]}]
    intervals = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    configuration = {"global": intervals, "rule_files": [str(ALERTS)], "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    process = subprocess.Popen(
        [
            program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        started = Prometheus(f"http://127.0.0.1:{port}")
        for number in range(4):
            fleet.placement(f"a prompt to be counted, number {number}")
        until(lambda: started.query("sum(dualmap_requests_total) > 0"), "it has scraped the fleet")
        yield started
    finally:
        process.terminate()
        process.wait(10)


@needs_promtool
def test_promtool_accepts_rules_and_configuration() -> None:
    for what, path in (("rules", ALERTS), ("config", ROOT / "deploy" / "prometheus" / "prometheus.yml")):
        options = ("--syntax-only",) if what == "config" else ()
        done = subprocess.run(
            ["promtool", "check", what, *options, str(path)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_every_dashboard_can_be_evaluated(prometheus: Prometheus) -> None:
    wanted = {"fleet: Requests", "fleet: Instances", "instances: Pending tokens", "store-and-workers: Store calls"}

    def shown() -> set[str]:
        return {name for name, query in QUERIES if prometheus.query(with_values(query))}

    until(lambda: {f"dualmap-{name}" for name in wanted} <= shown(), "rates have two scrapes to compare")
    pending = prometheus.query("max by (pool, instance) (dualmap_instance_pending_tokens)")
    assert {series["metric"]["instance"] for series in pending} == {f"instance-{number}" for number in range(1, 5)}


def test_every_alert_is_evaluated_and_a_healthy_fleet_fires_none_that_is_critical(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        [group] = prometheus.get("rules")["groups"]
        rules: list[dict[str, Any]] = group["rules"]
        return rules if all(rule["health"] == "ok" for rule in rules) else []

    # Other tests kill the store of this fleet; a replica may take a second to see that it is back.
    until(lambda: not prometheus.query('ALERTS{alertname="DualMapStoreAway"}'), "every replica sees the store")
    rules = until(evaluated, "every rule is evaluated")

    assert len(rules) > 15
    # Workers of `dualmap up` are not scraped, and nothing is said of them.
    assert [
        rule["name"] for rule in rules if rule["state"] == "firing" and rule["labels"]["severity"] == "critical"
    ] == []
