"""``dualmap adapters``: on which instances a pool's LoRA adapters are, through any replica's ``/admin``."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dualmap.cli.admin_api import AdminApi, add_connection_arguments
from dualmap.cli.as_json import as_json
from dualmap.cli.settings import Settings
from dualmap.simulation.figures.terminal import terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the values behind the table, as JSON")


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    found = AdminApi(arguments, settings).call("GET", "/adapters")
    if arguments.json:
        print(as_json(found))
    else:
        terminal().print(adapters_table(found))
    return 0


def adapters_table(found: dict[str, Any]) -> Group:
    rooms = found["room"].values()
    said = (
        f"pool {found['pool']}: {len(found['room'])} instances have {sum(each['device'] for each in rooms)} adapters on"
        f" their devices and {sum(each['host'] for each in rooms)} in host memory at most"
    )
    if not rooms:
        said = f"pool {found['pool']}: no instance tells its room for adapters (pools[].adapters sets it)"
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("adapter", "running", "idle s", "on the device of", "in host memory of"):
        table.add_column(name, justify="right" if name in ("running", "idle s") else "left")
    for each in found["adapters"]:
        where = (" ".join(each[place]) for place in ("device", "host"))
        table.add_row(each["adapter"], str(each["running"]), f"{each['idle_s']:.1f}", *where)
    return Group(Text(said), table)
