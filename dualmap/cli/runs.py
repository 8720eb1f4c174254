"""``dualmap runs``: agents' runs on the memory of a pool, and those that wait, through any replica's ``/admin``."""

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

_COLUMNS = (
    "run", "tenant", "state", "home", "agents", "turns", "context", "output", "waits s", "waited s", "prefill s",
    "decode s", "tools s", "seen s ago",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("--state", choices=("parked", "active", "at a tool", "ended"), help="only runs of this state")
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="runs at most (default: 50)")
    parser.add_argument("--json", action="store_true", help="the values behind the table, as JSON")


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    wanted = {name: getattr(arguments, name) for name in ("state", "tenant", "limit")}
    found = AdminApi(arguments, settings).call(
        "GET", "/runs", query={name: each for name, each in wanted.items() if each is not None}
    )
    if arguments.json:
        print(as_json(found))
    else:
        terminal().print(runs_table(found))
    return 0


def runs_table(found: dict[str, Any]) -> Group:
    memory = found["memory"]
    said = (
        f"pool {found['pool']}: contexts of active runs have {memory['used_tokens']:,} of {memory['capacity_tokens']:,}"
        f" tokens; {memory['waiting_turns']} turns wait"
    )
    if not found["admitted"]:
        said = f"pool {found['pool']}: runs do not wait for memory here (scheduling.admit_runs is off)"
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("run", "tenant", "state", "home") else "right")
    for each in found["runs"]:
        table.add_row(
            each["run"][:12], each["tenant"], each["state"], each["home"],
            str(each["agents"]), str(each["turns"]), f"{each['context_tokens']:,}", f"{each['output_tokens']:,}",
            f"{each['waits_s']:.1f}" if each["waits_s"] else "",
            *(f"{each[name]:.1f}" for name in ("waited_s", "prefill_s", "decode_s", "tools_s", "seen_s_ago")),
        )  # fmt: skip
    return Group(Text(said), table)
