"""The files of a fleet in containers fit the settings and each other."""

from __future__ import annotations

import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
import yaml

from cli.admin_api import endpoint
from cli.configuration import load_settings
from cli.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATIONS = [ROOT / "deploy" / "fleet.yaml", ROOT / "deploy" / "fleet-ascend.yaml"]
COMPOSE = ROOT / "docker-compose.yml"
HAPROXY = ROOT / "deploy" / "haproxy" / "haproxy.cfg"

_VARIABLE = re.compile(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}")


def service_environment(service: str, host: dict[str, str]) -> dict[str, str]:
    """What a service's process finds in its environment when the host's is ``host``, as docker compose has it."""
    document: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    environment: dict[str, str | None] = document["services"][service]["environment"]
    passed = {name: host.get(name) if value is None else value for name, value in environment.items()}
    return {
        name: _VARIABLE.sub(lambda match: host.get(match["name"]) or match["default"], value)
        for name, value in passed.items()
        if value is not None
    }


def service_settings(service: str, host: dict[str, str], configuration: Path = CONFIGURATIONS[0]) -> Settings:
    return load_settings((), service_environment(service, host), configuration)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda path: path.name)
def test_the_composed_fleet_runs_the_default_policy_unless_policy_names_another(configuration: Path) -> None:
    default = Settings().scheduling.policy

    assert load_settings((), {}, configuration).scheduling.policy == default
    assert service_settings("router", {}, configuration).scheduling.policy == default
    assert service_settings("router", {"POLICY": "preble"}, configuration).scheduling.policy == "preble"


def test_keys_of_the_host_close_the_composed_endpoint_and_reach_its_tools() -> None:
    keys = {"DUALMAP_ROUTER__ADMIN_KEY": "boss", "DUALMAP_ROUTER__API_KEYS": "one,two"}

    router, cli = service_settings("router", keys).router, service_settings("cli", keys).router

    assert [key.get_secret_value() for key in router.api_keys] == ["one", "two"]
    for settings in (router, cli):
        assert settings.admin_key is not None
        assert settings.admin_key.get_secret_value() == "boss"


def test_a_host_without_keys_leaves_those_of_the_file_alone(tmp_path: Path) -> None:
    configuration = tmp_path / "fleet.yaml"
    configuration.write_text("router: {admin_key: boss, api_keys: [one]}")

    router = service_settings("router", {}, configuration).router

    assert router.admin_key is not None
    assert len(router.api_keys) == 1


def test_the_composed_tools_ask_the_load_balancer_where_it_listens() -> None:
    url = urlsplit(endpoint(service_settings("cli", {})))

    assert url.hostname in yaml.safe_load(COMPOSE.read_text())["services"]
    assert url.hostname == "haproxy"
    assert f"bind :{url.port}\n" in HAPROXY.read_text()


class HealthHandler(BaseHTTPRequestHandler):
    statuses: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        self.send_response(self.statuses.pop(0) if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_load_balancer_is_healthy_while_its_own_health_says_so() -> None:
    probe = yaml.safe_load(COMPOSE.read_text())["services"]["haproxy"]["healthcheck"]["test"]
    kind, *command, script = (part.replace("$$", "$") for part in probe)
    port = re.search(r"/dev/tcp/127\.0\.0\.1/(\d+)", script)
    assert kind == "CMD"
    assert port is not None
    assert f"bind :{port[1]}\n    monitor-uri /health\n" in HAPROXY.read_text()

    with HTTPServer(("127.0.0.1", 0), HealthHandler) as server:
        script = script.replace(port[1], str(server.server_port))
        HealthHandler.statuses = [200, 503]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        outcomes = [subprocess.run([*command, script], timeout=20).returncode for _ in range(2)]
        server.shutdown()
        thread.join()

    assert outcomes == [0, 1]
    assert subprocess.run([*command, script], timeout=20, stderr=subprocess.DEVNULL).returncode != 0, "nobody listens"


def haproxy_section(name: str) -> str:
    """The lines of one section of haproxy's configuration, comments left out."""
    lines = [line for line in HAPROXY.read_text().splitlines() if not line.lstrip().startswith("#")]
    sections = re.split(r"^(?=\S)", "\n".join(lines), flags=re.MULTILINE)
    return next(section for section in sections if section.startswith(f"{name}\n"))


def seconds(text: str) -> float:
    assert text.endswith("s"), text
    return float(text[:-1])


def test_the_load_balancer_passes_on_that_a_client_has_left() -> None:
    assert "\n    option abortonclose\n" in haproxy_section("defaults")
    assert "no option abortonclose" not in HAPROXY.read_text()


def test_the_composed_fleet_has_time_to_stop_without_cutting_answers_off() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    router = service_settings("router", {}).router
    check = re.search(r"check inter (\w+) fall (\d+)", haproxy_section("backend routers"))
    assert check is not None

    assert router.settle_s > seconds(check[1]) * int(check[2]), "haproxy would still send to a closed port"
    for service in ("router", "haproxy"):
        assert seconds(services[service]["stop_grace_period"]) >= router.stop_within_s
