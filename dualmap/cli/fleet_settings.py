"""``dualmap settings set``, ``reset``, ``fleet`` and ``history``: scheduling settings of the running fleet."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import Any

import yaml
from rich.table import Table

from dualmap.cli.admin_api import AdminApi, add_connection_arguments
from dualmap.cli.configuration import counted
from dualmap.cli.errors import UsageError
from dualmap.cli.settings import Settings
from dualmap.simulation.figures.terminal import terminal

_ACTIONS = {
    "set": "change scheduling settings for all replicas and workers, while they run",
    "reset": "revert changes to the configured values",
    "fleet": "scheduling settings in effect in the running fleet",
    "history": "the last changes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for action, effect in _ACTIONS.items():
        action_parser = actions.add_parser(action, help=effect, description=effect)
        add_connection_arguments(action_parser)
        if action == "set":
            action_parser.add_argument("changes", nargs="+", metavar="NAME=VALUE", help="for example policy=dualmap")
        if action == "reset":
            action_parser.add_argument("names", nargs="+", metavar="NAME")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    api = AdminApi(arguments, settings)
    match arguments.action:
        case "set":
            changed = _change(api, dict(map(_parsed, arguments.changes)))
            print(f"in effect: {_listed(changed)}")
        case "reset":
            changed = _change(api, dict.fromkeys(map(_bare, arguments.names)))
            print(f"still changed: {_listed(changed)}")
        case "fleet":
            print(yaml.safe_dump(api.call("GET", "/settings"), sort_keys=False), end="")
        case _:
            terminal().print(_history(api.call("GET", "/settings/history")))
    return 0


def _change(api: AdminApi, changes: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = api.call("PATCH", "/settings", {"changes": changes})["changed"]
    return changed


def _parsed(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} is not a change: write NAME=VALUE, for example policy=dualmap")
    try:
        return _bare(name), json.loads(value)
    except ValueError:
        return _bare(name), counted(_bare(name), value)


def _bare(name: str) -> str:
    return name.removeprefix("scheduling.")


def _listed(changed: dict[str, Any]) -> str:
    return ", ".join(f"{name}={given}" for name, given in changed.items()) or "nothing"


def _history(changes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("at (UTC)", "by", "changes"):
        table.add_column(heading)
    for change in changes:
        at = datetime.fromtimestamp(change["at_ms"] / 1000, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
        changed = ", ".join(
            f"{name} reset" if given is None else f"{name}={given}" for name, given in change["changes"].items()
        )
        table.add_row(at, change["by"] or "–", changed)
    return table
