"""The routers that are compared: this fleet with any of its policies, and others from their wheels."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dualmap.cli.fleet_plan import free_ports, plain
from dualmap.research.chaos.fleet_process import unconfigured
from dualmap.scheduling.settings import POLICIES
from real_fleet.errors import LackingError
from real_fleet.instances import KV_EVENTS_OFFSET, KV_REPLAY_OFFSET, Instances
from real_fleet.processes import running, wait_until_answers

DEFAULT = "default"
_READY_WITHIN_S = 120.0
_ORDERS = ("auto", "fifo", "deadline")


@dataclass(frozen=True, slots=True)
class Wheel:
    """Another project's router, as its wheel brings it."""

    package: str
    module: str
    log_level: str


WHEELS = {
    "vllm-router": Wheel("vllm-router==0.1.17", "vllm_router.launch_router", "warning"),
    "sglang-router": Wheel("sglang-router==0.3.2", "sglang_router.launch_router", "warn"),
}
"""In the versions that this command was tried with."""


@dataclass(frozen=True, slots=True)
class Router:
    """A running router."""

    url: str
    pid: int
    """All its processes descend from this one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routers")
    group.add_argument(
        "--routers", metavar="R,S",
        help=f"{DEFAULT}, POLICY or POLICY:ORDER of this fleet; {', '.join(f'{name}:POLICY' for name in WHEELS)}, whose"
        " kv_aware gets the KV events (none: the default, and cache_aware and kv_aware of the wheels that are there)",
    )  # fmt: skip
    group.add_argument("--peers", type=Path, metavar="DIR", help="folder of the others' wheels (none: this Python's)")
    group.add_argument("--install-peers", type=Path, metavar="DIR", help="install their wheels there first, by pip")
    group.add_argument("--replicas", type=int, default=2, metavar="N", help="router replicas of this fleet")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="workers of this fleet")


def install_peers(folder: Path) -> None:
    """Install the wheels into a folder of their own. Raises LackingError."""
    packages = [wheel.package for wheel in WHEELS.values()]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder), *packages],
        check=False,
    )
    if done.returncode != 0:
        raise LackingError(f"pip could not install {', '.join(packages)} into {folder}")


def peer_environment(peers: Path | None) -> dict[str, str]:
    if peers is None:
        return dict(os.environ)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(peers.resolve()), before)))}


def is_there(wheel: Wheel, environment: Mapping[str, str]) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({wheel.module.partition('.')[0]!r}) is None)"
    return subprocess.run([sys.executable, "-c", look], env=environment, check=False).returncode == 0


def versions(names: Sequence[str], peers: Path | None) -> dict[str, str]:
    """The versions of the wheels among the routers, as they are installed."""
    found = {}
    for wheel in sorted({name.partition(":")[0] for name in names} & WHEELS.keys()):
        look = f"import importlib.metadata; print(importlib.metadata.version({wheel!r}))"
        done = subprocess.run(
            [sys.executable, "-c", look], env=peer_environment(peers), capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            found[wheel] = done.stdout.strip()
    return found


def chosen(wanted: str | None, peers: Path | None) -> tuple[str, ...]:
    """The names of the routers to compare.

    Raises:
        LackingError: a name is unknown, or its wheel is not there.
    """
    environment = peer_environment(peers)
    if wanted is None:
        policies = {"vllm-router": ("kv_aware", "cache_aware"), "sglang-router": ("cache_aware",)}
        there = [name for name, wheel in WHEELS.items() if is_there(wheel, environment)]
        return (DEFAULT, *(f"{name}:{policy}" for name in there for policy in policies[name]))
    names = tuple(name.strip() for name in wanted.split(",") if name.strip())
    for name in names:
        kind, _, policy = name.partition(":")
        if kind in WHEELS:
            if not policy:
                raise LackingError(f"--routers {name}: name its policy, as {name}:cache_aware")
            if not is_there(WHEELS[kind], environment):
                raise LackingError(f"{kind} is not installed: add --install-peers DIR, or --peers DIR where it is")
        elif kind not in (DEFAULT, *POLICIES) or policy not in ("", *_ORDERS):
            known = ", ".join((DEFAULT, *POLICIES))
            raise LackingError(f"--routers {name}: known are {known}; {', '.join(f'{each}:POLICY' for each in WHEELS)}")
    if not names or len(set(names)) < len(names):
        raise LackingError(f"--routers needs different names, found {wanted!r}")
    return names


@contextmanager
def router_of(name: str, instances: Instances, options: argparse.Namespace, folder: Path) -> Iterator[Router]:
    """A router in front of the instances, for the time of the block.

    Raises:
        LackingError: it does not start; with the end of its log.
    """
    port, metrics_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    log = folder / "logs" / f"{name.replace(':', '-')}.log"
    kind, _, policy = name.partition(":")
    if kind in WHEELS:
        words = _peer_words(WHEELS[kind], policy, instances, port, metrics_port)
        environment = peer_environment(options.peers)
        ready = f"{url}/v1/models"
    else:
        config = folder / "fleet.yaml"
        config.write_text(json.dumps(_fleet_settings(kind, policy, instances, options, port), indent=1))
        words = [sys.executable, "-m", "dualmap", "up", "--config", str(config.resolve())]
        words += ["--replicas", str(options.replicas), "--workers", str(options.workers)]
        words += ["--status-interval-s", "60"]  # its figures are not looked at
        environment = unconfigured()
        ready = f"{url}/ready"
    with running(words, log, environment) as process:
        wait_until_answers(ready, process, log, _READY_WITHIN_S)
        yield Router(url, process.pid)


def _fleet_settings(
    policy: str, order: str, instances: Instances, options: argparse.Namespace, port: int
) -> dict[str, object]:
    """The fleet's configuration file: JSON, which is YAML."""
    scheduling = instances.scheduling(options.slo_s)
    scheduling |= {} if policy == DEFAULT else {"policy": policy}
    scheduling |= {"queue_order": order} if order else {}
    pool: dict[str, object] = {"name": "default", "model": instances.model, "tokenizer": instances.tokenizer}
    if instances.kv_events is not None:
        pool["kv_events"] = plain(instances.kv_events)
    pool["instances"] = [
        {"id": f"instance-{number}", "url": url, **instances.pool} for number, url in enumerate(instances.urls, 1)
    ]
    worker = {} if instances.time_scale == 1 else {"worker": {"time_scale": instances.time_scale}}
    return {"scheduling": scheduling, "router": {"port": port}, **worker, "pools": [pool]}


def _peer_words(wheel: Wheel, policy: str, instances: Instances, port: int, metrics_port: int) -> list[str]:
    words = [sys.executable, "-m", wheel.module, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    words += ["--prometheus-port", str(metrics_port), "--log-level", wheel.log_level]
    words += ["--worker-urls", *instances.urls]
    if policy == "kv_aware":
        if instances.kv_events is None:
            raise LackingError("kv_aware needs instances that publish KV events")
        words += ["--kv-event-model", instances.model, "--kv-event-block-size", str(instances.facts.block_tokens or 16)]
        for url in instances.urls:
            host, at = urlsplit(url).hostname, urlsplit(url).port or 80
            words += ["--kv-event-source", f"{url}=tcp://{host}:{at + KV_EVENTS_OFFSET}"]
            words += ["--kv-event-replay-source", f"{url}=tcp://{host}:{at + KV_REPLAY_OFFSET}"]
    return words
