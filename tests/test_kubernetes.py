"""What scales engines in Kubernetes asks Prometheus for what a leading worker publishes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")

from dualmap.workers.metrics import WorkerMetrics
from tests.support.helm_chart import CHART, example, manifests, named, of_kind
from tests.support.kubernetes_schemas import complaints

PROMETHEUS = shutil.which("prometheus")
WITHIN_S = 60.0


def engine_scaling(kind: str, role: str = "mixed") -> dict[str, Any]:
    """What sets the number of the emulated engines."""
    scaling = {"kind": kind, "min": 2, "max": 6, "prometheusUrl": "http://prometheus:9090"}
    engine = {**example("emulated")["engines"][0], "autoscaling": scaling, "role": role}
    made = manifests({**example("emulated"), "engines": [engine]})
    (found,) = of_kind(made, "ScaledObject", "HorizontalPodAutoscaler")
    return found


def keda_trigger() -> dict[str, str]:
    return engine_scaling("keda")["spec"]["triggers"][0]["metadata"]


def adapter_rule() -> dict[str, Any]:
    (rule,) = yaml.safe_load((CHART.parent / "prometheus-adapter.yaml").read_text("utf-8"))["rules"]["external"]
    return rule


def adapter_query(pool: str) -> str:
    labels = engine_scaling("hpa")["spec"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]
    matchers = ",".join(f'{name}="{value}"' for name, value in {**labels, "pool": pool}.items())
    return str(adapter_rule()["metricsQuery"]).replace("<<.LabelMatchers>>", matchers)


def test_keda_and_an_hpa_take_the_number_as_it_is() -> None:
    assert keda_trigger()["threshold"] == "1"
    external = engine_scaling("hpa")["spec"]["metrics"][0]["external"]
    assert external["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert external["metric"]["name"] == adapter_rule()["name"]["as"]
    assert external["metric"]["selector"]["matchLabels"] == {"pool": "default", "role": "prefill"}
    assert engine_scaling("hpa", "decode")["spec"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"] == {
        "pool": "default",
        "role": "decode",
    }
    assert 'role="decode"' in engine_scaling("keda", "decode")["spec"]["triggers"][0]["metadata"]["query"]


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_an_engine_that_is_scaled_has_no_number_of_its_own(kind: str) -> None:
    scaled = engine_scaling(kind)
    engine = {**example("emulated")["engines"][0], "autoscaling": {"kind": kind, "min": 2, "max": 6}}
    made = manifests({**example("emulated"), "engines": [engine]})

    target = scaled["spec"]["scaleTargetRef"]
    assert "replicas" not in named(made, target["kind"], target["name"])["spec"]
    assert complaints(scaled) == []


@pytest.fixture
def workers() -> Iterator[tuple[list[WorkerMetrics], list[int]]]:
    """Two workers' pages: the first leads pool default, the second another one."""
    made, servers = [WorkerMetrics(["default"]), WorkerMetrics(["default"])], []
    made[0].wanted_instances.labels("default", "prefill").set(5)
    made[0].wanted_instances.labels("default", "decode").set(7)
    made[1].wanted_instances.labels("other", "prefill").set(9)
    for metrics in made:

        class Page(BaseHTTPRequestHandler):
            shown = metrics

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(self.shown.exposition())

            def log_message(self, *_: object) -> None:
                """Nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    yield made, [server.server_address[1] for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(PROMETHEUS is None, reason="Debian package prometheus is not installed")
def test_a_real_prometheus_answers_the_queries_with_the_leaders_number(
    workers: tuple[list[WorkerMetrics], list[int]], tmp_path: Path
) -> None:
    metrics, ports = workers
    targets = [f"127.0.0.1:{port}" for port in ports]
    scrape = {"job_name": "worker", "scrape_interval": "1s", "static_configs": [{"targets": targets}]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with subprocess.Popen(
        [str(PROMETHEUS), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as server:  # fmt: skip
        try:
            for query in (keda_trigger()["query"], adapter_query("default")):
                wait_for(port, query, 5.0)
            assert ceil(5.0 / float(keda_trigger()["threshold"])) == 5
            metrics[0].end_term("default")  # the leader changes
            metrics[1].wanted_instances.labels("default", "prefill").set(3)
            wait_for(port, keda_trigger()["query"], 3.0)
        finally:
            server.terminate()


def wait_for(port: int, query: str, wanted: float) -> None:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    until_s, found = time.monotonic() + WITHIN_S, None
    while time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:
            result = []
        found = [float(row["value"][1]) for row in result]
        if found == [wanted]:
            return
        time.sleep(0.2)
    raise AssertionError(f"{query}: {found}, not {wanted}")
