"""``dualmap adapters``: a pool's LoRA adapters, and on which instances they are, through any replica."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualmap.cli.admin_api import AdminApi, add_connection_and_json, refuse_errors
from dualmap.cli.as_json import as_json
from dualmap.cli.settings import Settings
from dualmap.simulation.figures.terminal import terminal

_LOAD_TIMEOUT_S = 320.0
"""A load takes minutes at worst, and the router gives it up first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="all of them, and where each is (the default)")
    load = actions.add_parser("load", help="register one, and load it on its homes")
    load.add_argument("name", help="the name that clients use")
    load.add_argument("path", help="folder of its weights on the engines' hosts, or what engines download")
    load.add_argument("--replace", action="store_true", help="the name has other weights from now on")
    load.add_argument("--rank", type=int, help="its rank, where known")
    load.add_argument("--tenant", metavar="NAME", help="the tenant that alone may use it (none: everyone)")
    unload = actions.add_parser("unload", help="serve one no more, and unload it everywhere")
    unload.add_argument("name", help="the name that was registered")
    add_connection_and_json(parser, actions.choices.values())


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    api = AdminApi(arguments, settings)
    if arguments.action in ("load", "unload"):
        body = {"lora_name": arguments.name}
        if arguments.action == "load":
            body |= _wanted(arguments)
        path = f"/{arguments.action}_lora_adapter"
        answer = api.send("POST", path, body, folder="/v1", timeout_s=_LOAD_TIMEOUT_S)
        refuse_errors(answer)
        print(answer.body.decode(errors="replace"))
        return 0
    found = api.call("GET", "/adapters")
    if arguments.json:
        print(as_json(found))
    else:
        terminal().print(adapters_table(found))
    return 0


def _wanted(arguments: argparse.Namespace) -> dict[str, Any]:
    wanted = {"lora_path": arguments.path, "rank": arguments.rank, "tenant": arguments.tenant}
    return {name: each for name, each in wanted.items() if each is not None} | {"load_inplace": arguments.replace}


def adapters_table(found: dict[str, Any]) -> Group:
    rooms = found["room"].values()
    said = (
        f"pool {found['pool']}: {len(found['room'])} instances have {sum(each['device'] for each in rooms)} adapters on"
        f" their devices and {sum(each['host'] for each in rooms)} in host memory at most"
    )
    if not rooms:
        said = f"pool {found['pool']}: no instance tells its room for adapters (pools[].adapters sets it)"
    table = Table(box=None, header_style="bold", pad_edge=False)
    names = ("adapter", "rank", "tenant", "running", "idle s", "loaded on", "on the device of", "in host memory of")
    for name in names:
        table.add_column(name, justify="right" if name in ("rank", "running", "idle s") else "left")
    parts: list[RenderableType] = [Text(said), table]
    for instance_id, room in found["room"].items():
        waiting = room.get("running", 0) - room["device"]  # a replica of another version may not say it
        if waiting > 0:
            parts.append(Text(f"{instance_id}: {waiting} adapters with running requests wait for a slot on the device"))
    for each in found["adapters"]:
        record = each.get("registered") or {}  # a replica of another version may not know it
        where = (" ".join(each[place]) for place in ("device", "host"))
        idle_s = "" if each["idle_s"] is None else f"{each['idle_s']:.1f}"
        about = str(record.get("rank") or ""), record.get("tenant") or ""
        loaded = " ".join(record.get("loaded", ())) if record else "(not registered)"
        table.add_row(each["adapter"], *about, str(each["running"]), idle_s, loaded, *where)
        for instance_id in record.get("outdated", ()):
            parts.append(Text(f"{each['adapter']}: {instance_id} has its former weights, and is to replace them"))
        for instance_id, why in record.get("failed", {}).items():
            parts.append(Text(f"{each['adapter']}: {instance_id} does not load it: {why}"))
    return Group(*parts)
