"""``dualmap revisions``: how many sessions each revision of a pool gets, through any replica."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

from dualmap.cli.admin_api import AdminApi, add_connection_and_json
from dualmap.cli.as_json import as_json
from dualmap.cli.settings import Settings
from dualmap.simulation.figures.terminal import terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="all of them, with instances and weights (the default)")
    weigh = actions.add_parser("set", help="change how many sessions revisions get; the others share what is left")
    weigh.add_argument("weights", nargs="+", type=_weight, metavar="REVISION=PERCENT", help="as v2=5%% or v2=5")
    weigh.add_argument("--move", action="store_true", help="move running sessions too, not new ones alone")
    forget = actions.add_parser("forget", help="forget a revision's weight; without any, revisions matter no more")
    forget.add_argument("revision")
    pin = actions.add_parser("tenant", help="have one revision serve a tenant")
    pin.add_argument("tenant")
    pin.add_argument("revision", nargs="?", default="", help="left out: by the weights again")
    shadow = actions.add_parser("shadow", help="copy answered requests to a revision that answers nobody")
    shadow.add_argument("revision", nargs="?", default="", help="left out: no copies any more")
    shadow.add_argument("percent", nargs="?", type=_percent, default=10.0, help="of all sessions (10)")
    actions.add_parser("audit", help="the last changes: when, by whom, what")
    add_connection_and_json(parser, actions.choices.values())


def _weight(text: str) -> tuple[str, float]:
    name, equals, percent = text.rpartition("=")
    try:
        if not name or not equals:
            raise ValueError
        return name, float(percent.removesuffix("%"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no REVISION=PERCENT, as v2=5%") from None


def _percent(text: str) -> float:
    try:
        return float(text.removesuffix("%"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage") from None


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def changes_a_fleet(arguments: argparse.Namespace) -> bool:
    return arguments.action in ("set", "forget", "tenant", "shadow")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    api = AdminApi(arguments, settings)
    if arguments.action == "audit":
        changes = api.call("GET", "/revisions/history")
        if arguments.json:
            print(as_json(changes))
        else:
            terminal().print(audit_table(changes))
        return 0
    if arguments.action == "set":
        body = {"weights": dict(arguments.weights), "move": arguments.move}
        found = api.call("PATCH", "/revisions", body)
    elif arguments.action == "forget":
        found = api.call("DELETE", f"/revisions/{quote(arguments.revision, safe='')}")
    elif arguments.action == "tenant":
        found = api.call("PUT", "/revisions/tenants", {"tenant": arguments.tenant, "revision": arguments.revision})
    elif arguments.action == "shadow":
        body = {"revision": arguments.revision, "percent": arguments.percent}
        found = api.call("PUT", "/revisions/shadow", body)
    else:
        found = api.call("GET", "/revisions")
    if arguments.json:
        print(as_json(found))
        return 0
    console = terminal()
    console.print(revisions_table(found))
    for line in remarks(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def revisions_table(found: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("revision", "sessions %", "instances", "ready"):
        table.add_column(name, justify="left" if name == "revision" else "right")
    for each in found["revisions"]:
        percent = "–" if each["percent"] is None else f"{each['percent']:.3g}"
        table.add_row(Text(each["revision"]), percent, str(each["instances"]), str(each["ready"]))
    return table


def remarks(found: dict[str, Any]) -> list[str]:
    """What the table does not show, a line each."""
    if not found["in_force"]:
        return ["no revision has a weight: all instances serve all sessions"]
    lines = [f"tenant {tenant}: {revision}" for tenant, revision in sorted(found["tenants"].items())]
    if shadow := found.get("shadow"):  # a replica of another version may not know it
        lines.append(f"{shadow['revision']} gets copies of {shadow['percent']:g} % of the sessions, and answers nobody")
    idle = [each["revision"] for each in found["revisions"] if each["percent"] is None]
    return lines + [f"{name} has no weight: its instances are sent nothing" for name in idle]


def audit_table(changes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("at (UTC)", "by", "what"):
        table.add_column(heading)
    for each in changes:
        at = datetime.fromtimestamp(each["at_ms"] / 1000, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
        table.add_row(at, Text(each["by"] or "–"), Text(each["text"]))
    return table
