"""A real Envoy and real pickers for tests, from the configuration that the documentation gives."""

from __future__ import annotations

import contextlib
import copy
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dualmap.research.chaos.fleet_process import SomeProcess, unconfigured
from tests.support.fork_servers import ForkedCommand, start_command
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "envoy" / "envoy.yaml"
BINARY = Path(sys.executable).parent / "envoy"


def page(url: str) -> str:
    """The text at a URL, which answers with success."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def example() -> dict[str, Any]:
    """The configuration as it is documented."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return document


def ext_proc_of(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of its filter that asks pickers."""
    (found,) = [each["typed_config"] for each in http_filters(config) if each["name"].endswith(".ext_proc")]
    return found


def http_filters(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Its HTTP filters, in their order."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return manager["http_filters"]


def without(config: dict[str, Any], *kinds: str) -> dict[str, Any]:
    """The configuration without its filters of these kinds: ``lua``, ``ext_proc``."""
    filters = http_filters(config)
    filters[:] = [each for each in filters if each["name"].rpartition(".")[2] not in kinds]
    return config


def set_hosts(config: dict[str, Any], cluster: str, ports: Sequence[int]) -> None:
    """Give a cluster other endpoints, on this machine."""
    named = next(each for each in config["static_resources"]["clusters"] if each["name"] == cluster)
    hosts = named["load_assignment"]["endpoints"][0]["lb_endpoints"]
    model = hosts[0]
    hosts.clear()
    for port in ports:
        host = copy.deepcopy(model)
        host["endpoint"]["address"]["socket_address"]["port_value"] = port
        hosts.append(host)


@dataclass
class Envoy:
    url: str
    admin_url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running_envoy(
    directory: Path, config: dict[str, Any], *, pickers: Sequence[int], instances: Sequence[int]
) -> Iterator[Envoy]:
    """An Envoy with this configuration, on free ports."""
    listens, admin = free_port(), free_port()
    config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = listens
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    set_hosts(config, "pickers", pickers)
    set_hosts(config, "instances", instances)
    path = directory / "envoy.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    with (directory / "envoy.out").open("wb") as out:
        process = subprocess.Popen(
            [str(BINARY), "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "-l", "warn"],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Envoy(f"http://127.0.0.1:{listens}", f"http://127.0.0.1:{admin}", process)
    finally:
        _end(process)


@dataclass
class RunningPicker:
    port: int
    ops_url: str
    process: ForkedCommand
    output: Path


@contextlib.contextmanager
def running_picker(directory: Path, config: Path, *options: str) -> Iterator[RunningPicker]:
    """A picker of the fleet that this file configures. It is not waited for."""
    port, ops_port = free_port(), free_port()
    output = directory / f"picker-{port}.out"
    ports = ("--picker.port", str(port), "--picker.ops_port", str(ops_port))
    words = ("picker", "--config", str(config), *ports, "--router.settle_s", "0.1", *options)
    process = start_command(*words, out=output, environment=unconfigured())
    try:
        yield RunningPicker(port, f"http://127.0.0.1:{ops_port}", process, output)
    finally:
        _end(process)


def _end(process: SomeProcess) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
