"""The files of a fleet in containers fit the settings and each other."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from dualmap.cli.admin_api import endpoint
from dualmap.cli.configuration import load_settings
from dualmap.cli.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATIONS = [ROOT / "deploy" / name for name in ("fleet.yaml", "fleet-ascend.yaml", "fleet-ascend-pd.yaml")]
COMPOSE = ROOT / "docker-compose.yml"
ASCEND = ROOT / "docker-compose.ascend.yml"
ASCEND_A3 = ROOT / "docker-compose.ascend-a3.yml"
ASCEND_PD = ROOT / "docker-compose.ascend-pd.yml"
STACKS = [(COMPOSE,), (COMPOSE, ASCEND), (COMPOSE, ASCEND, ASCEND_A3)]
HAPROXY = ROOT / "deploy" / "haproxy" / "haproxy.cfg"

INSTANCES = ["instance-1", "instance-2", "instance-3", "instance-4"]

_VARIABLE = re.compile(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}")


class ComposeLoader(yaml.SafeLoader):
    """YAML with the tag by which an overriding file replaces a list."""


ComposeLoader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def services(compose: Path, host: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The services of one file when the host's environment is ``host``."""
    text = _VARIABLE.sub(lambda match: (host or {}).get(match["name"]) or match["default"], compose.read_text())
    found: dict[str, dict[str, Any]] = yaml.load(text, ComposeLoader)["services"]
    return found


def option(command: list[str], name: str) -> str:
    """The value of ``--name=VALUE``."""
    return next(word.partition("=")[2] for word in command if word.startswith(f"--{name}="))


def service_environment(service: str, host: dict[str, str]) -> dict[str, str]:
    """What a service's process finds in its environment when the host's is ``host``, as docker compose has it."""
    environment: dict[str, str | None] = services(COMPOSE, host)[service]["environment"]
    passed = {name: host.get(name) if value is None else value for name, value in environment.items()}
    return {name: value for name, value in passed.items() if value is not None}


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
        outcomes = [subprocess.run([*command, script], timeout=60).returncode for _ in range(2)]
        server.shutdown()
        thread.join()

    assert outcomes == [0, 1]
    assert subprocess.run([*command, script], timeout=60, stderr=subprocess.DEVNULL).returncode != 0, "none listens"


# docker compose -----------------------------------------------------------------------------------------------
def compose_is_there() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not compose_is_there(), reason="needs docker compose")
@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack[-1].stem)
def test_docker_compose_understands_its_files(stack: tuple[Path, ...]) -> None:
    files = [word for compose in stack for word in ("--file", str(compose))]

    outcome = subprocess.run(["docker", "compose", *files, "config", "--quiet"], capture_output=True, text=True)

    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_a_change_of_the_fleets_settings_concerns_the_fleets_services_alone() -> None:
    changed = {"POLICY": "preble", "DUALMAP_ROUTER__API_KEYS": "one", "DUALMAP_ROUTER__ADMIN_KEY": "boss"}
    plain, other = services(COMPOSE), services(COMPOSE, changed)

    assert {name for name in plain if plain[name] != other[name]} == {"router", "worker", "cli"}
    for name in set(plain) - {"router", "worker", "cli"}:
        assert "environment" not in plain[name], f"{name} would have what others are told"
    for compose in (ASCEND, ASCEND_A3):
        before, after = services(compose), services(compose, changed)
        assert all(before[name] == after[name] for name in INSTANCES)


def test_logs_rotate_and_memory_is_limited() -> None:
    for name, service in services(COMPOSE).items():
        assert service["logging"]["options"] == {"max-size": "20m", "max-file": "5"}, name
        assert "mem_limit" in service or name == "cli", name
    assert all(services(ASCEND)[name]["mem_limit"] == 0 for name in INSTANCES), "an emulator's limit would kill vLLM"


def test_a_routers_memory_holds_the_bodies_that_it_may_buffer_and_what_they_become() -> None:
    limit = services(COMPOSE)["router"]["mem_limit"]

    assert limit.endswith("g")
    assert service_settings("router", {}).router.max_buffered_body_bytes * 4 <= int(limit[:-1]) << 30


@pytest.mark.parametrize("name", INSTANCES)
def test_an_ascend_instance_runs_in_its_images_environment_with_the_limits_that_the_fleet_knows(name: str) -> None:
    service = services(ASCEND)[name]
    assert "entrypoint" not in service | services(COMPOSE)[name], "the image's own sets CANN and ATB up"
    vllm, serve, model, *flags = service["command"]
    pool = load_settings((), {}, CONFIGURATIONS[1]).pools[0]
    instance = next(instance for instance in pool.instances if instance.id == name)

    assert (vllm, serve) == ("vllm", "serve")
    assert pool.model == model, "clients name the model that the instance serves"
    assert instance.dispatch_window_tokens == 2 * int(option(flags, "max-num-batched-tokens"))
    assert instance.max_running_requests == int(option(flags, "max-num-seqs"))
    assert int(option(flags, "shutdown-timeout")) < seconds(service["stop_grace_period"])


def test_no_npu_is_given_to_two_instances_and_on_a3_each_has_both_of_its_dies() -> None:
    for compose, dies in ((ASCEND, 1), (ASCEND_A3, 2)):
        given = [
            [device for device in services(compose)[name]["devices"] if re.search(r"davinci\d", device)]
            for name in INSTANCES
        ]
        assert [len(devices) for devices in given] == [dies] * len(INSTANCES)
        assert list(itertools.chain(*given)) == [f"/dev/davinci{number}" for number in range(dies * len(INSTANCES))]
    assert services(ASCEND_A3)["instance-1"]["image"] == services(ASCEND)["instance-1"]["image"] + "-a3"


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_of_one_role_has_the_connector_of_that_role(name: str) -> None:
    """The fleet knows its role and port; transfers find the NPU's address, and each service has ports of its own."""
    given = services(ASCEND_PD)
    service, pool = given[name], load_settings((), {}, CONFIGURATIONS[2]).pools[0]
    instance = next(instance for instance in pool.instances if instance.id == name)
    connectors = {each: json.loads(option(given[each]["command"], "kv-transfer-config")) for each in INSTANCES}

    assert service["command"][2] == pool.model
    assert urlsplit(instance.url).port == int(option(service["command"], "port"))
    assert connectors[name]["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[instance.role]
    assert connectors[name]["kv_load_failure_policy"] == "recompute"
    assert len({each["kv_port"] for each in connectors.values()}) == len(INSTANCES)
    assert len({each["engine_id"] for each in connectors.values()}) == len(INSTANCES)
    assert service["environment"]["PYTHONHASHSEED"] == "0"
    assert "/etc/hccn.conf:/etc/hccn.conf:ro" in service["volumes"]
    assert instance.dispatch_window_tokens == 2 * int(option(service["command"], "max-num-batched-tokens"))


@pytest.mark.parametrize("extras", ["", "tokens", "tokens,tracing"])
def test_the_image_has_the_dependencies_and_the_extras_that_it_is_built_with(tmp_path: Path, extras: str) -> None:
    step = re.search(r"^RUN (python3 -c .*?)\s+&& ", (ROOT / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL)
    assert step is not None
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "python3").symlink_to(sys.executable)

    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EXTRAS": extras}
    subprocess.run(["sh", "-c", step[1]], cwd=tmp_path, env=environment, check=True, timeout=60)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [package for name in extras.split(",") if name for package in project["optional-dependencies"][name]]
    assert (tmp_path / "requirements.txt").read_text().split("\n")[:-1] == project["dependencies"] + wanted
    assert services(COMPOSE, {"EXTRAS": extras})["router"]["build"]["args"] == {"EXTRAS": extras}


FAKE_DOCKER = """#!/bin/sh
echo "$*" >> "$CALLS"
case $* in "compose ps --quiet "*) printf 'one\ntwo\n' ;; esac
"""


def rolling_update(folder: Path, *services: str) -> tuple[int, list[str]]:
    """Exit code, and the calls of docker that changed something."""
    docker, calls = folder / "docker", folder / "calls"
    docker.write_text(FAKE_DOCKER)
    docker.chmod(0o755)
    calls.touch()
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls)}
    script = [ROOT / "deploy" / "rolling-update", *services]
    outcome = subprocess.run(script, env=environment, capture_output=True, timeout=60)
    return outcome.returncode, [call for call in calls.read_text().splitlines() if "compose ps" not in call]


def test_a_rolling_update_starts_each_successor_before_it_stops_the_old_one(tmp_path: Path) -> None:
    code, calls = rolling_update(tmp_path, "router")

    assert code == 0
    up, *_ = calls
    assert re.fullmatch(r"compose up .*--no-recreate --wait .*--scale router=3 router", up)
    assert calls == [up, "stop one", "rm one", up, "stop two", "rm two"]


def test_a_rolling_update_leaves_alone_what_cannot_run_twice(tmp_path: Path) -> None:
    assert rolling_update(tmp_path, "instance-1") == (2, [])


# haproxy ------------------------------------------------------------------------------------------------------
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


def test_the_load_balancer_sends_a_token_when_it_comes() -> None:
    assert "\n    option http-no-delay\n" in haproxy_section("defaults")
    assert "no option http-no-delay" not in HAPROXY.read_text()


def test_the_load_balancers_own_errors_have_the_shape_of_the_routers() -> None:
    named = dict(re.findall(r"^    errorfile (\d+) (\S+)$", haproxy_section("defaults"), re.MULTILINE))
    assert set(named) == {"400", "408", "500", "502", "503", "504"}

    for status, name in named.items():
        head, _, body = (HAPROXY.parent / name).read_text().partition("\n\n")
        fields = dict(line.split(": ") for line in head.splitlines()[1:])
        assert head.startswith(f"HTTP/1.1 {status} ")
        assert fields["content-type"] == "application/json"
        assert int(fields["content-length"]) == len(body)
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert ("retry-after" in fields) == (status == "503")


def test_an_edited_configuration_is_seen_when_the_load_balancer_reloads() -> None:
    [mount] = services(COMPOSE)["haproxy"]["volumes"]
    source, target, _ = mount.split(":")

    assert (ROOT / source).resolve() == HAPROXY.parent, "a file that is mounted by itself stays what it was"
    assert target == "/usr/local/etc/haproxy"


def test_the_composed_fleet_has_time_to_stop_without_cutting_answers_off() -> None:
    router = service_settings("router", {}).router
    check = re.search(r"check port (\d+) inter (\w+) ", haproxy_section("backend routers"))
    assert check is not None

    assert int(check[1]) == router.ops_port, "the port that stays open while a router drains"
    assert router.settle_s > 2 * seconds(check[2]), "haproxy would still send to a closed port"
    for service in ("router", "haproxy"):
        assert seconds(services(COMPOSE)[service]["stop_grace_period"]) >= router.stop_within_s


needs_haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy")


@needs_haproxy
def test_haproxy_understands_its_configuration() -> None:
    outcome = subprocess.run(["haproxy", "-c", "-f", str(HAPROXY)], capture_output=True, text=True, timeout=60)

    assert outcome.returncode == 0, outcome.stderr
    assert "WARNING" not in outcome.stderr


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Poll until the condition holds; the test fails at the deadline."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


class RouterHandler(BaseHTTPRequestHandler):
    """Stands for a router: says which one it is; nothing at all while ``go_on`` is not set. ``/stream`` is an answer
    that ends when ``finish`` is set."""

    protocol_version = "HTTP/1.1"
    server: StandInRouter

    def do_GET(self) -> None:
        self.server.go_on.wait()
        self.send_response(503 if self.path == "/ready" and self.server.draining else 200)
        if self.path == "/stream":
            self.send_header("content-length", "6")
            self.end_headers()
            self.wfile.write(self.server.name)
            self.server.finish.wait()
        else:
            self.send_header("content-length", "3")
            self.end_headers()
        self.wfile.write(self.server.name)

    def log_message(self, *_: object) -> None:
        pass


class StandInRouter(ThreadingHTTPServer):
    def __init__(self, name: bytes) -> None:
        super().__init__(("127.0.0.1", 0), RouterHandler)
        self.name = name
        self.go_on, self.finish = threading.Event(), threading.Event()
        self.go_on.set()
        self.draining = False


@contextmanager
def stand_in_router(name: bytes) -> Iterator[StandInRouter]:
    with StandInRouter(name) as router:
        thread = threading.Thread(target=router.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield router
        router.go_on.set()
        router.finish.set()
        router.shutdown()
        thread.join()


@contextmanager
def running_haproxy(folder: Path, *router_ports: int) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of the endpoint and of haproxy's own port, with the composed fleet's configuration but for addresses and
    how often it checks."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports.append(listener.getsockname()[1])
    servers = [f"server router{port} 127.0.0.1:{port} init-addr last,libc" for port in router_ports]
    text = HAPROXY.read_text()
    for old, new in (
        ("default-path config", f"default-path origin {HAPROXY.parent}"),
        ("bind :8000\n", f"bind 127.0.0.1:{ports[0]}\n"),
        ("bind :8404\n", f"bind 127.0.0.1:{ports[1]}\n"),
        ("inter 1s", "inter 100ms"),
        ("timeout check 3s", "timeout check 200ms"),
        ("check port 8001", "check"),
        ("server-template router 16 router:8000", "\n    ".join(servers)),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    configuration = folder / "haproxy.cfg"
    configuration.write_text(text)
    endpoint, own = (httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) for port in ports)
    with endpoint, own, (folder / "haproxy.log").open("w") as log:
        haproxy = subprocess.Popen(["haproxy", "-db", "-f", str(configuration)], stdout=log, stderr=log)
        try:
            eventually(lambda: listens(own) and listens(endpoint))
            yield endpoint, own
        finally:
            haproxy.terminate()
            haproxy.wait()


def is_in(own: httpx.Client, router: StandInRouter, state: str) -> bool:
    """Whether haproxy takes the router for being in this state."""
    line = f'server_status{{proxy="routers",server="router{router.server_port}",state="{state}"}} 1'
    return line in own.get("/metrics").text


Balance = Callable[..., tuple[Any, ...]]


@pytest.fixture
def balance(tmp_path: Path) -> Iterator[Balance]:
    """``endpoint, own, one, two = balance(b"one", b"two")``: haproxy in front of routers of these names, which are in
    service unless they are ``draining``."""
    with ExitStack() as stack:

        def start(*names: bytes, draining: bool = False) -> tuple[Any, ...]:
            routers = [stack.enter_context(stand_in_router(name)) for name in names]
            for router in routers:
                router.draining = draining
            ports = [router.server_port for router in routers]
            endpoint, own = stack.enter_context(running_haproxy(tmp_path, *ports))
            eventually(lambda: draining or all(is_in(own, router, "UP") for router in routers))
            return endpoint, own, *routers

        yield start


@contextmanager
def begun_stream(endpoint: httpx.Client) -> Iterator[Iterator[bytes]]:
    """Return what comes behind the first piece of an answer."""
    with endpoint.stream("GET", "/stream") as stream:
        pieces = stream.iter_raw()
        assert next(pieces) == b"one"
        yield pieces


def listens(client: httpx.Client) -> bool:
    try:
        client.get("/health")
    except httpx.TransportError:
        return False
    return True


@needs_haproxy
def test_while_no_router_lives_clients_get_an_error_that_says_when_to_come_back(balance: Balance) -> None:
    endpoint, own = balance()
    answer = endpoint.get("/v1/models")

    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "no_router"
    assert own.get("/health").status_code == 503


@needs_haproxy
def test_a_router_that_drains_gets_nothing_new_and_its_answers_go_on(balance: Balance) -> None:
    endpoint, _, drains = balance(b"one")
    with begun_stream(endpoint) as pieces:
        drains.draining = True
        eventually(lambda: endpoint.get("/v1/models").status_code == 503)
        drains.finish.set()

        assert b"".join(pieces) == b"one"


@needs_haproxy
def test_a_router_that_starts_gets_nothing_before_it_is_ready(balance: Balance) -> None:
    endpoint, _, starts = balance(b"one", draining=True)
    eventually(lambda: endpoint.get("/v1/models").status_code == 503)

    starts.draining = False
    eventually(lambda: endpoint.get("/v1/models").status_code == 200)


@needs_haproxy
def test_the_sessions_of_a_router_that_hangs_are_closed(balance: Balance) -> None:
    endpoint, _, hung = balance(b"one")
    with begun_stream(endpoint) as pieces:
        hung.go_on.clear()

        with pytest.raises(httpx.RemoteProtocolError):
            b"".join(pieces)
        assert not hung.finish.is_set()


@needs_haproxy
def test_a_router_that_hangs_gets_no_new_requests_until_it_answers_again(balance: Balance) -> None:
    endpoint, own, _, hung = balance(b"one", b"two")

    hung.go_on.clear()
    eventually(lambda: is_in(own, hung, "DOWN"))
    assert {endpoint.get("/ready").text for _ in range(20)} == {"one"}

    hung.go_on.set()
    eventually(lambda: is_in(own, hung, "UP"))
    eventually(lambda: endpoint.get("/ready").text == "two")


def test_the_composed_fleet_that_scales_has_a_service_for_every_instance_and_spares_up_to_its_maximum() -> None:
    pool = load_settings((), {}, ROOT / "deploy" / "fleet-autoscale.yaml").pools[0]
    assert pool.autoscale is not None
    assert {instance.id for instance in pool.instances} <= services(COMPOSE).keys()
    assert len(pool.instances) == pool.autoscale.max_instances
    assert sum(not instance.standby for instance in pool.instances) == pool.autoscale.min_instances
    assert services(COMPOSE)["instance-5"]["profiles"] == ["autoscale"]
