"""The routers that are compared: this fleet with any of its policies, and others from their wheels."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import wheels

from dualmap.cli.fleet_plan import free_ports, plain
from dualmap.research.chaos.fleet_process import unconfigured
from dualmap.scheduling.estimates.kv_tiers import LoadPrice, Tier
from dualmap.scheduling.settings import POLICIES
from dualmap.workers.engine_metrics import loads_of
from real_fleet.errors import LackingError
from real_fleet.instances import KV_EVENTS_OFFSET, KV_REPLAY_OFFSET, Instances
from real_fleet.processes import running, wait_until_answers

DEFAULT = "default"
_READY_WITHIN_S = 120.0
_ORDERS = ("auto", "fifo", "deadline")


KINDS = ("vllm-router", "sglang-router", "smg")
"""The wheels that choose instances; the other one is a proxy."""


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
        help=f"{DEFAULT}, POLICY or POLICY:ORDER of this fleet; {', '.join(f'{name}:POLICY' for name in KINDS)};"
        " vllm-router's kv_aware gets the KV events (none: the default, and cache_aware and kv_aware of the wheels that"
        " are there)",
    )  # fmt: skip
    group.add_argument("--peers", type=Path, metavar="DIR", help="folder of the others' wheels (none: this Python's)")
    group.add_argument("--install-peers", type=Path, metavar="DIR", help="install their wheels there first, by pip")
    group.add_argument("--replicas", type=int, default=2, metavar="N", help="router replicas of this fleet")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="workers of this fleet")


def install_peers(folder: Path) -> None:
    """Install the wheels into a folder of their own. Raises LackingError."""
    try:
        wheels.install(folder, KINDS)
    except wheels.WheelError as error:
        raise LackingError(str(error)) from error


def versions(names: Sequence[str], peers: Path | None) -> dict[str, str]:
    """The versions of the wheels among the routers, as they are installed."""
    kinds = sorted({name.partition(":")[0] for name in names} & set(KINDS))
    found = {kind: wheels.version_of(kind, peers) for kind in kinds}
    return {kind: version for kind, version in found.items() if version is not None}


def chosen(wanted: str | None, peers: Path | None) -> tuple[str, ...]:
    """The names of the routers to compare.

    Raises:
        LackingError: a name is unknown, or its wheel is not there.
    """
    if wanted is None:
        policies = {
            "vllm-router": ("kv_aware", "cache_aware"),
            "sglang-router": ("cache_aware",),
            "smg": ("cache_aware",),
        }
        there = [kind for kind in KINDS if wheels.is_there(kind, peers)]
        return (DEFAULT, *(f"{name}:{policy}" for name in there for policy in policies[name]))
    names = tuple(name.strip() for name in wanted.split(",") if name.strip())
    for name in names:
        kind, _, policy = name.partition(":")
        if kind in KINDS:
            if not policy:
                raise LackingError(f"--routers {name}: name its policy, as {name}:cache_aware")
            if not wheels.is_there(kind, peers):
                raise LackingError(f"{kind} is not installed: add --install-peers DIR, or --peers DIR where it is")
        elif kind not in (DEFAULT, *POLICIES) or policy not in ("", *_ORDERS):
            known = ", ".join((DEFAULT, *POLICIES))
            raise LackingError(f"--routers {name}: known are {known}; {', '.join(f'{each}:POLICY' for each in KINDS)}")
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
    if kind in KINDS:
        words = _peer_words(kind, policy, instances, port, metrics_port)
        environment = wheels.environment_with(options.peers)
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
    if instances.host_tokens is not None:
        pool["kv_tiers"] = {"host_tokens": instances.host_tokens}
    pool["instances"] = [
        {"id": f"instance-{number}", "url": url, **instances.pool} for number, url in enumerate(instances.urls, 1)
    ]
    return {"scheduling": scheduling, "router": {"port": port}, "pools": [pool]}


def _peer_words(kind: str, policy: str, instances: Instances, port: int, metrics_port: int) -> list[str]:
    words = wheels.launch_words(kind, policy, instances.urls, port, metrics_port)
    if policy == "kv_aware":
        if instances.kv_events is None:
            raise LackingError("kv_aware needs instances that publish KV events")
        words += ["--kv-event-model", instances.model, "--kv-event-block-size", str(instances.facts.block_tokens or 16)]
        for url in instances.urls:
            host, at = urlsplit(url).hostname, urlsplit(url).port or 80
            words += ["--kv-event-source", f"{url}=tcp://{host}:{at + KV_EVENTS_OFFSET}"]
            words += ["--kv-event-replay-source", f"{url}=tcp://{host}:{at + KV_REPLAY_OFFSET}"]
    return words


def load_errors(router_url: str, instances: Instances) -> list[float]:
    """Of each instance that loaded something from host memory, how far the fleet's expected time of its mean load is
    from what its engine took, as a share of that. Its counters go on from router to router."""
    described = {each["url"]: each["tiers"] for each in _answer(f"{router_url}/admin/instances")["instances"]}
    errors = []
    for url in instances.urls:
        with urlopen(f"{url}/metrics", timeout=60) as answer:
            reading = loads_of(answer.read().decode(errors="replace")).get(Tier.HOST)
        if reading is None or not reading.loads:
            continue
        price = LoadPrice(**described[url][0]["price"])
        taken_s = reading.busy_s / reading.loads
        errors.append(abs(price.load_s(round(reading.tokens / reading.loads)) / taken_s - 1))
    return errors


def _answer(url: str) -> Any:
    with urlopen(url, timeout=60) as answer:
        return json.load(answer)
