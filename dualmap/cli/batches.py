"""``dualmap batches``: batches that are not over, how far they are, and their end, through any replica's ``/admin``."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Literal

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dualmap.cli.admin_api import AdminApi, add_connection_arguments
from dualmap.cli.as_json import as_json
from dualmap.cli.errors import UsageError
from dualmap.cli.settings import Settings
from dualmap.scheduling.batches.batch import ENDED
from dualmap.simulation.figures.terminal import terminal

_COLUMNS = ("batch", "tenant", "status", "", "answered", "failed", "lines", "window", "done in", "late by reason of")
_RIGHT = frozenset({"answered", "failed", "lines", "window", "done in"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("--tenant", metavar="NAME", help="all batches of this tenant, also those that are over")
    parser.add_argument(
        "--cancel", action="store_true", help="cancel all batches of the tenant that are not over, by --tenant"
    )
    parser.add_argument("--key", metavar="NAME", help="with --cancel: those alone that were made with this key")
    parser.add_argument("--json", action="store_true", help="the values behind the table, as JSON")


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    query = {} if arguments.tenant is None else {"tenant": arguments.tenant}
    if arguments.cancel:
        return _cancel(arguments, settings, query)
    if arguments.key is not None:
        raise UsageError("--key is for --cancel: batches are listed by their tenant alone")
    found = AdminApi(arguments, settings).call("GET", "/batches", query=query)
    if arguments.json:
        print(as_json(found))
    else:
        terminal().print(batches_table(found))
    return 0


def _cancel(arguments: argparse.Namespace, settings: Settings, query: dict[str, str]) -> int:
    if not query:
        raise UsageError("name the tenant whose batches are to be cancelled (--tenant)")
    if arguments.key is not None:
        query["key"] = arguments.key
    found = AdminApi(arguments, settings).call("POST", "/batches/cancel", query=query)
    cancelled, left = found["cancelled"], found.get("not_cancelled", [])
    print(as_json(found) if arguments.json else "\n".join([*cancelled, f"{len(cancelled)} cancelled"]))
    if left:
        print(f"not cancelled, as others keep changing them: {', '.join(left)}; run it again", file=sys.stderr)
    return 1 if left else 0


def batches_table(found: dict[str, Any]) -> Group:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in _COLUMNS:
        justify: Literal["left", "right"] = "right" if name in _RIGHT else "left"
        table.add_column(name, justify=justify, no_wrap=name == "batch", overflow="ignore")
    for each in found["batches"]:
        counts = each["request_counts"]
        done = counts["completed"] + counts["failed"]
        table.add_row(
            each["id"], each["tenant"], each["status"], ProgressBar(max(1, counts["total"]), done, width=20),
            f"{counts['completed']:,}", f"{counts['failed']:,}", f"{counts['total']:,}",
            "" if each["status"] in ENDED else _duration(each["expires_at"] - found["now"]),
            "" if (ends_s := each["forecast"]["ends_at"]) is None else _duration(ends_s - found["now"]),
            each["forecast"]["delay"] or "",
        )  # fmt: skip
    said = f"{len(found['batches'])} batches" if found["batches"] else "no batches"
    return Group(Text(said), table)


def _duration(time_s: int) -> str:
    """A time to the minute; empty once it is over."""
    if time_s <= 0:
        return ""
    hours, minutes = divmod(-(-time_s // 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
