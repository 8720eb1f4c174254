"""``dualmap runs``: agents' runs on the memory of a pool, and those that wait, through any replica's ``/admin``."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualmap.cli.admin_api import AdminApi, add_connection_arguments
from dualmap.cli.as_json import as_json
from dualmap.cli.errors import UsageError
from dualmap.cli.settings import Settings
from dualmap.simulation.figures.terminal import terminal

_COLUMNS = (
    "run", "tenant", "state", "home", "agents", "turns", "context", "output", "waits s", "waited s", "prefill s",
    "decode s", "tools s", "seen s ago",
)  # fmt: skip
_PARTS = {
    "waited_s": "waiting for memory",
    "prefill_s": "to the first token",
    "decode_s": "decoding",
    "tools_s": "its own tools",
}
_BAR = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument(
        "run", nargs="?", metavar="RUN",
        help="explain this run: where its time went, and its agents. The beginning of its id, or the name that its"
        " client sends",
    )  # fmt: skip
    parser.add_argument("--state", choices=("parked", "active", "at a tool", "ended"), help="only runs of this state")
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="runs at most (default: 50)")
    parser.add_argument("--json", action="store_true", help="the values behind the table, as JSON")


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    wanted = {name: getattr(arguments, name) for name in ("state", "tenant", "run", "limit")}
    found = AdminApi(arguments, settings).call(
        "GET", "/runs", query={name: each for name, each in wanted.items() if each is not None}
    )
    if arguments.run and not found["runs"]:
        raise UsageError(
            f"no run is called {arguments.run!r} or has an id that begins so, of the thousand that were seen last;"
            " 'dualmap runs' lists them"
        )
    if arguments.json:
        print(as_json(found))
    elif arguments.run and len(found["runs"]) == 1:
        terminal().print(explained(found["runs"][0]))
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
    table = _table(*_COLUMNS)
    for each in found["runs"]:
        table.add_row(
            each["run"][:12], each["tenant"], each["state"], each["home"],
            str(len(each["agents"])), str(each["turns"]), f"{each['context_tokens']:,}", f"{each['output_tokens']:,}",
            f"{each['waits_s']:.1f}" if each["waits_s"] else "",
            *(f"{each[name]:.1f}" for name in (*_PARTS, "seen_s_ago")),
        )  # fmt: skip
    return Group(Text(said), table)


def explained(run: dict[str, Any]) -> Group:
    """One run: what it is and holds, where the time of its agents went, and its agents."""
    tenant, home = (f"{word} {run[name]}" if run[name] else "" for name, word in (("tenant", "of"), ("home", "on")))
    waits = f"a turn waits since {run['waits_s']:.1f} s" if run["waits_s"] else ""
    heading = ", ".join(filter(None, (f"run {run['run']}", tenant, run["state"], waits, home)))
    holds = (
        f"{run['turns']} turns since {run['begun_s_ago']:,.1f} s, the last sign of life {run['seen_s_ago']:,.1f} s ago;"
        f" {run['context_tokens']:,} tokens of context, {run['output_tokens']:,} of answers;"
        f" service {run['service_token_s']:,} token-seconds"
    )
    whole_s = sum(run[name] for name in _PARTS) or 1.0
    parts = _table("where its agents' time went", "s", "share", "")
    for name, words in _PARTS.items():
        share = run[name] / whole_s
        parts.add_row(words, f"{run[name]:,.1f}", f"{share:.0%}", "█" * round(_BAR * share))
    agents = _table("agent", "context", "in flight", "seen s ago")
    for each in run["agents"]:
        figures = f"{each['context_tokens']:,}", str(each["turns_in_flight"]), f"{each['seen_s_ago']:,.1f}"
        agents.add_row(each["agent"], *figures)
    shown: list[RenderableType] = [Text(heading, "bold"), Text(holds), Text(), parts, Text(), agents]
    return Group(*shown)


_TEXTS = frozenset({"run", "tenant", "state", "home", "agent", "where its agents' time went", ""})


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _TEXTS else "right")
    return table
