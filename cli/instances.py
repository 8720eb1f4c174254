"""``dualmap instances``: members of a running fleet, through any replica's ``/admin``."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from cli.fetch import fetch, require
from cli.settings import Settings

_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a replica, or the fleet's endpoint; by default where router.port says")
    parser.add_argument("--pool", help="pool name; by default the first configured one")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="all instances with state and load")
    add = actions.add_parser("add", help="add an instance; it serves as soon as its health check passes")
    add.add_argument("id", help="stable id: what maps to an instance follows its id")
    add.add_argument("instance_url", metavar="URL", help="base URL of the vLLM server")
    add.add_argument("--role", default="mixed", choices=("mixed", "prefill", "decode"))
    for figure in ("prefill-tokens-per-s", "kv-capacity-tokens", "dispatch-window-tokens", "max-running-requests"):
        add.add_argument(f"--{figure}", type=float if figure.startswith("prefill") else int)
    for action, effect in (
        ("drain", "send nothing new; what it has is finished, what waits for it moves"),
        ("resume", "take a drained instance back"),
        ("remove", "drain it, then forget it"),
    ):
        actions.add_parser(action, help=effect).add_argument("id")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    pool = arguments.pool or settings.pools[0].name
    call = AdminApi(arguments.url or endpoint(settings), _admin_key(settings))
    console = Console()
    if arguments.action == "list":
        console.print(instances_table(call("GET", f"/admin/instances?pool={quote(pool)}")["instances"]))
    elif arguments.action == "add":
        body = {"id": arguments.id, "url": arguments.instance_url, "role": arguments.role, "pool": pool}
        figures = ("prefill_tokens_per_s", "kv_capacity_tokens", "dispatch_window_tokens", "max_running_requests")
        body |= {name: getattr(arguments, name) for name in figures if getattr(arguments, name) is not None}
        call("POST", "/admin/instances", body)
        console.print(f"added {arguments.id}", highlight=False)
    else:
        remove = arguments.action == "remove"
        path = f"/admin/instances/{quote(arguments.id)}" + ("" if remove else f"/{arguments.action}")
        call("DELETE" if remove else "POST", f"{path}?pool={quote(pool)}")
        done = {"drain": "draining", "resume": "resumed", "remove": "removed"}[arguments.action]
        console.print(f"{done} {arguments.id}", highlight=False)
    return 0


def endpoint(settings: Settings) -> str:
    """Where this configuration's routers are reached from this machine."""
    host = settings.router.host if settings.router.host not in ("0.0.0.0", "::", "") else "127.0.0.1"
    return f"http://{host}:{settings.router.port}"


def _admin_key(settings: Settings) -> str | None:
    return settings.router.admin_key.get_secret_value() if settings.router.admin_key else None


class AdminApi:
    """Calls of one replica's ``/admin``; every failure is a CommandError with the replica's own message."""

    def __init__(self, base_url: str, key: str | None) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._key = key

    def __call__(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"{self._base_url}{path}"
        return require(fetch(url, method=method, body=body, key=self._key, timeout_s=_TIMEOUT_S), url)


def instances_table(instances: list[dict[str, Any]]) -> Table:
    """Instances as ``/admin/instances`` lists them."""
    table = Table(box=None, header_style="bold")
    for heading in ("instance", "state", "role", "url"):
        table.add_column(heading)
    for heading in ("pending tokens", "held", "running", "cached blocks", "prefill tokens/s"):
        table.add_column(heading, justify="right")
    for each in instances:
        load = each.get("load") or {}
        figures = ("pending_tokens", "queued_requests", "running_requests", "cached_blocks", "prefill_tokens_per_s")
        table.add_row(
            each["id"], each["state"], each["role"], each["url"], *(f"{load.get(name, 0):,.0f}" for name in figures)
        )
    return table
