"""``dualmap instances``: members of a running fleet, through any replica's ``/admin``."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

from dualmap.cli import upgrade
from dualmap.cli.admin_api import AdminApi, NotKnownError, add_connection_arguments, refuse_errors, suggestion
from dualmap.cli.as_json import as_json
from dualmap.cli.errors import UsageError
from dualmap.cli.settings import Settings
from dualmap.runtime.amounts import whole_amount
from dualmap.runtime.durations import duration_s
from dualmap.simulation.figures.terminal import terminal

_FIGURES = (
    "prefill_tokens_per_s",
    "kv_capacity_tokens",
    "dispatch_window_tokens",
    "max_running_requests",
    "max_queued_requests",
)
_LOAD_COLUMNS = ("pending_tokens", "queued_requests", "running_requests", "cached_blocks", "prefill_tokens_per_s")
_SHOWN_MODELS = 4
_ACTIONS = {
    "list": "all instances with state and load",
    "add": "add an instance; it serves as soon as its health check passes",
    "drain": "send it nothing new; what it has is finished, what is held for it moves",
    "resume": "put it back into service",
    "role": "change what it serves: mixed, prefill or decode",
    "label": "change its revision: engine version, model revision and flags",
    "remove": "drain it, wait until it has nothing left, forget it",
    "upgrade": "give instances a new revision, some at a time, without cutting a stream",
    "audit": "the last changes: when, by whom, what",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, effect in _ACTIONS.items():
        action_parser = actions.add_parser(action, help=effect, description=effect)
        add_connection_arguments(action_parser)
        if action == "upgrade":
            upgrade.add_arguments(action_parser)
            continue
        if action == "audit":
            action_parser.add_argument("id", nargs="?", help="changes of this one alone")
            action_parser.add_argument("--limit", type=int, default=50, metavar="N", help="changes at most")
        if action in ("list", "audit"):
            action_parser.add_argument("--json", action="store_true", help="the values behind the table, as JSON")
        else:
            action_parser.add_argument("id", help="stable id: prefixes map to an instance by its id")
        if action == "remove":
            action_parser.add_argument(
                "--timeout-s", type=float, default=60.0, help="how long to wait for its requests"
            )
        if action == "drain":
            action_parser.add_argument(
                "--within",
                type=_time_s,
                metavar="TIME",
                help="let what it still has after this time go elsewhere: 30, 60s or 5m",
            )
        if action == "role":
            action_parser.add_argument("role", choices=("mixed", "prefill", "decode"))
        if action == "label":
            action_parser.add_argument("revision", help="label of its revision; '' for none")
        if action == "add":
            action_parser.add_argument("instance_url", metavar="INSTANCE_URL", help="base URL of the vLLM server")
            action_parser.add_argument("--role", default="mixed", choices=("mixed", "prefill", "decode"))
            action_parser.add_argument("--revision", default="", help="label of its engine version, model and flags")
            for figure in _FIGURES:
                kind = float if figure == "prefill_tokens_per_s" else whole_amount
                action_parser.add_argument(f"--{figure.replace('_', '-')}", type=kind, metavar="N")


def _time_s(text: str) -> float:
    try:
        return duration_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def changes_a_fleet(arguments: argparse.Namespace) -> bool:
    return bool(arguments.action != "list")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    api = AdminApi(arguments, settings)
    if arguments.action == "upgrade":
        upgrade.Upgrade(api, arguments).run()
        return 0
    try:
        return _run(api, arguments)
    except NotKnownError as error:
        meant = suggestion(arguments.id, lambda: [each["id"] for each in api.call("GET", "/instances")["instances"]])
        raise UsageError(f"{error}{meant}") from error


def _run(api: AdminApi, arguments: argparse.Namespace) -> int:
    if arguments.action == "list":
        listed = api.call("GET", "/instances")["instances"]
        if arguments.json:
            print(as_json(listed))
            return 0
        console = terminal()
        console.print(instances_table(listed))
        for line in tiers(listed):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in troubles(listed):
            console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
        return 0
    if arguments.action == "audit":
        of_one = {"instance": arguments.id} if arguments.id else {}
        changes = api.call("GET", "/instances/history", query={"limit": arguments.limit, **of_one})
        if arguments.json:
            print(as_json(changes))
        else:
            terminal().print(audit_table(changes))
        return 0
    if arguments.action == "add":
        given = {"id": arguments.id, "url": arguments.instance_url, "role": arguments.role, "pool": arguments.pool}
        if arguments.revision:
            given["revision"] = arguments.revision
        figures = {name: value for name in _FIGURES if (value := getattr(arguments, name)) is not None}
        added = api.call("POST", "/instances", given | figures)
        if added.get("warning"):  # a replica of another version may not know it
            print(f"dualmap instances: warning: {added['warning']}", file=sys.stderr)
        print(f"{arguments.id} added; it is ready once its health check passes")
    elif arguments.action == "role":
        changed = api.call("PATCH", f"/instances/{quote(arguments.id, safe='')}", {"role": arguments.role})
        print(f"{arguments.id} serves as {changed['role']}")
    elif arguments.action == "label":
        path = f"/instances/{quote(arguments.id, safe='')}"
        changed = api.call("PATCH", path, {"revision": arguments.revision})
        print(f"{arguments.id} is of revision {changed['revision'] or 'unlabelled'}")
    elif arguments.action == "remove":
        remove(api, arguments.id, arguments.timeout_s)
        print(f"{arguments.id} removed")
    else:
        within_s = getattr(arguments, "within", None)
        query = "" if within_s is None else f"?within_s={within_s:g}"
        changed = api.call("POST", f"/instances/{quote(arguments.id, safe='')}/{arguments.action}{query}")
        print(f"{arguments.id} is {changed['state']}")
    return 0


def remove(api: AdminApi, instance_id: str, timeout_s: float) -> None:
    """Drain an instance and forget it once it is idle.

    Raises:
        CommandError: it is unknown, or still busy after ``timeout_s``; it continues to drain then.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:  # the replica itself waits a while before it says that the instance is busy
        answer = api.send("DELETE", f"/instances/{quote(instance_id, safe='')}")
        if answer.status != HTTPStatus.CONFLICT or time.monotonic() >= deadline_s:
            break
    refuse_errors(answer)


def instances_table(instances: list[dict[str, Any]]) -> Table:
    """Instances as ``/admin/instances`` lists them."""
    table = Table(box=None, header_style="bold")
    for heading in ("instance", "state", "role", "url"):
        table.add_column(heading)
    for column in _LOAD_COLUMNS:
        table.add_column({"queued_requests": "held"}.get(column, column.replace("_", " ")), justify="right")
    table.add_column("models")
    for each in sorted(instances, key=lambda each: (each["pool"], each["id"])):
        load = each.get("load") or {}
        figures = (f"{load[name]:,.0f}" if name in load else "–" for name in _LOAD_COLUMNS)
        table.add_row(each["id"], each["state"], each["role"], each["url"], *figures, _models(each.get("models")))
    return table


def audit_table(changes: list[dict[str, Any]]) -> Table:
    """Changes as ``/admin/instances/history`` lists them."""
    table = Table(box=None, header_style="bold")
    for heading in ("at (UTC)", "by", "what", "instance", "pool", "detail"):
        table.add_column(heading)
    for each in changes:
        at = datetime.fromtimestamp(each["at_ms"] / 1000, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
        cells = (each["by"] or "–", each["action"], each["instance"], each["pool"], each["detail"])
        table.add_row(at, *map(Text, cells))
    return table


def troubles(instances: list[dict[str, Any]]) -> list[str]:
    """The troubles of instances, a line for each of them."""
    listed = sorted(instances, key=lambda each: (each["pool"], each["id"]))
    wrong = [f"{each['id']} ({each['state']}): {each['trouble']}" for each in listed if each.get("trouble")]
    not_exact = [(each["id"], each["kv_view"], each["kv_view_reason"]) for each in listed if each.get("kv_view_reason")]
    return wrong + [f"{name}: its cache is known as {view}: {reason}" for name, view, reason in not_exact]


def tiers(instances: list[dict[str, Any]]) -> list[str]:
    """The tiers of instances, and their part in pulls, with their prices, a line for each instance that has some."""
    listed = sorted(instances, key=lambda each: (each["pool"], each["id"]))
    known = [(each["id"], [*_tiers(each), *_pulls(each)]) for each in listed]
    return [f"{name}: {'; '.join(parts)}" for name, parts in known if parts]


def _tiers(instance: dict[str, Any]) -> list[str]:
    listed = [f"{each['tier']} of {each['tokens']:,} tokens, {_price(each)}" for each in instance.get("tiers") or ()]
    unused = instance.get("unused_tiers")  # a router of another version may not know it, nor what pulls lack
    return [*listed, f"placements expect nothing there: {unused}"] if unused else listed


def _pulls(instance: dict[str, Any]) -> list[str]:
    end, why_none = instance.get("pulls"), instance.get("no_pulls")
    if end is None:
        return [f"no pulls: {why_none}"] if why_none else []
    fails = ", fails a request whose pull is lost" if end.get("fails_requests") else ""
    return [f"pulls at {end['host']}:{end['port']}, {_price(end)}{fails}"]


def _price(priced: dict[str, Any]) -> str:
    """The price of loads from a tier, or of pulls, and why it is a default."""
    price, reason = priced["price"], priced.get("reason")
    default = f" (default: {reason})" if reason else ""
    return f"{1000 * price['start_s']:.3g} ms + {1e6 * price['token_s']:.3g} µs a token{default}"


def _models(models: dict[str, str] | None) -> str:
    """The names that an instance lists, those of its model first."""
    if models is None:
        return "?"
    names = sorted(models, key=lambda name: (bool(models[name]), name))
    return ", ".join(names[:_SHOWN_MODELS]) + (f", … ({len(names)})" if len(names) > _SHOWN_MODELS else "")
